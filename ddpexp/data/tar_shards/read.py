"""Pictures, texts and arrays for a trained model, decoded as the samples of tar shards are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddpexp.data.base import IndexData, SampleNames
from ddpexp.data.inputs import INPUT, Inputs, array_of, as_path, listed, schema_of, wrong_kind
from ddpexp.data.pictures import Pictures, pictures_of
from ddpexp.data.schema import Field
from ddpexp.data.tar_shards.dataset import decode, pixels_as_float
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular

_PLACEHOLDERS = {"category": -1, "text": ""}  # in place of targets that nobody knows; else NaN


def read(given: Any, known: Mapping[str, Any], /, **options: Any) -> Inputs:
    """Return inputs as samples, with placeholders for their targets. Raises: RefusedError."""
    schema = schema_of(known)
    if len(schema.inputs) > 1:
        listing = ", ".join(str(field.name) for field in schema.inputs)
        raise RefusedError(
            f"A sample of the run has several inputs ({listing})",
            place=INPUT,
            suggestion="Store such samples as a tar shard, and name it with data.eval_path=SHARD.",
        )
    placeholders = [_PLACEHOLDERS.get(field.kind, float("nan")) for field in schema.targets]
    if schema.inputs[0].kind == "image":
        pictures = pictures_of(given, 3)
        for number in range(len(pictures)):
            pictures.size(number)  # an error for a file without a picture
        samples: IndexData = _Pictures(pictures, options.get("image_size"), placeholders)
        return Inputs(samples, pictures.names, pictures.is_one)
    values, is_one = listed(given)
    decoded = [_value(value, schema.inputs[0]) for value in values]
    paths = [str(value) for value in values if isinstance(value, Path)]
    names = SampleNames("file", paths) if len(paths) == len(values) else None
    return Inputs(_Values(decoded, placeholders), names, is_one)


def _value(value: Any, field: Field) -> Any:
    """Return an input that is no picture, decoded; a text is one itself. Raises: RefusedError."""
    if field.kind == "text" and isinstance(value, str):
        return value
    if (path := as_path(value)) is not None:
        extension = path.suffix.removeprefix(".")
        if path.is_file() and str(field.name).rpartition(".")[2] == extension:
            try:
                with open_regular(path) as opened:
                    return decode(opened.read(), extension)
            except (OSError, ValueError, json.JSONDecodeError) as error:
                raise RefusedError(f"cannot be decoded: {error}", place=str(value)) from None
    elif (array := array_of(value)) is not None:
        return torch.from_numpy(array)
    raise wrong_kind(value, f"a .{field.name} file, as those of the shards are")


@dataclass(frozen=True)
class _Pictures(IndexData):
    pictures: Pictures
    image_size: int | None
    placeholders: Sequence[Any]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        source = self.pictures.sources[index]
        if isinstance(source, str):
            with open_regular(source) as opened:
                return decode(opened.read(), "jpg", self.image_size), *self.placeholders
        return pixels_as_float(source.convert("RGB"), self.image_size), *self.placeholders


@dataclass(frozen=True)
class _Values(IndexData):
    values: Sequence[Any]
    placeholders: Sequence[Any]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.values[index], *self.placeholders
