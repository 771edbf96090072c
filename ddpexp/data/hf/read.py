"""Pictures, texts and rows for a trained model, converted as those of data=hf are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ddpexp.data.arrays.read import inputs_of, read_rows, texts_in
from ddpexp.data.arrays.read import read as read_arrays
from ddpexp.data.hf.convert import fitted, stored_size, token_rows
from ddpexp.data.inputs import Inputs, schema_of, texts_of
from ddpexp.data.pictures import pictures_of
from ddpexp.data.schema import Schema
from ddpexp.data.text import tokenizer as tokenizers
from ddpexp.errors import RefusedError


def read(given: Any, known: Mapping[str, Any], /, **options: Any) -> Inputs:
    """Return inputs as samples, with placeholders for their targets. Raises: RefusedError."""
    schema = schema_of(known)
    kind = schema.inputs[0].kind
    if kind == "image":
        return _pictures(given, schema, options.get("image_size"), known.get("divisor"))
    if kind == "text":
        return _texts(given, schema, str(options.get("tokenizer", "bytes")))
    is_list = len(schema.inputs) == 1 and schema.stored is None  # a column of lists, as arrays are
    return read_arrays(given, {"schema": _unnamed(schema)}) if is_list else read_rows(given, schema, options)


def _unnamed(schema: Schema) -> Mapping[str, Any]:
    values = schema.as_json()
    return {**values, "inputs": [{"name": None, "kind": "number"}]}


def _pictures(given: Any, schema: Schema, size: int | None, divisor: float | None) -> Inputs:
    channels, height, width = schema.shape
    pictures = pictures_of(given, channels)
    stored = stored_size(size)
    for number in range(len(pictures)):
        if size is None and pictures.size(number) != (height, width):
            found = pictures.size(number)
            raise RefusedError(
                f"has {found[1]} x {found[0]} pixels, and the model was trained on {width} x {height}",
                place=pictures.name(number),
                suggestion="Resize it.",
            )
        pictures.size(number, stored)
    rows = [fitted(pictures.pixels(number, channels, stored), size, channels) for number in range(len(pictures))]
    array = np.ascontiguousarray(np.stack(rows).transpose(0, 3, 1, 2))
    return inputs_of(array, schema, pictures.names, pictures.is_one, divisor)


def _texts(given: Any, schema: Schema, name: str) -> Inputs:
    tokenizer = tokenizers.configured(name)
    assert tokenizer is not None, "a run that trained has one"
    found = texts_in(given, str(schema.inputs[0].name)) or texts_of(given)
    texts, names, is_one = found
    return inputs_of(token_rows(texts, tokenizer, schema.shape[0]), schema, names, is_one)
