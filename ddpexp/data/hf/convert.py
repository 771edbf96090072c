"""Converting columns of a data set of the library `datasets` to arrays, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps

from ddpexp.compat.datasets import column_of
from ddpexp.data.arrays.encode import combined
from ddpexp.data.arrays.inputs import Reader, field_of
from ddpexp.data.arrays.sources import ColumnOptions
from ddpexp.data.arrays.store import Reading
from ddpexp.data.arrays.targets import TargetColumn, check_finite
from ddpexp.data.hf.sets import columns_of, open_sets
from ddpexp.data.image_folder.decode import BrokenImageError, decode
from ddpexp.data.image_folder.options import StoredSize
from ddpexp.data.npy import npy_header
from ddpexp.data.schema import Field, Schema
from ddpexp.data.text import tokenizer as tokenizers
from ddpexp.errors import RefusedError
from ddpexp.system.files import sha256_of_file

_BATCH = 256  # rows that are read at a time
_LARGEST = 1 << 30  # pixels of a side: no limit


def convert(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write the chosen columns of the sets to a folder; return the record of the cache, or why it cannot be written.

    Raises:
        RefusedError: the data is not what the options say.
    """
    try:
        return _converted(Path(request["folder"]), request)
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror or str(error)}


def _converted(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    for path in folder.glob("*.npy"):
        path.unlink()
    sets = open_sets(request)
    conversion = _Conversion(folder, request)
    stored = {part: conversion.part(part, data) for part, data in sets.items()}
    conversion.reading.digests = {
        f"{key}-{name}": sha256_of_file(folder / part[name])
        for key, part in stored.items()
        for name in ("inputs", "targets")
        if part[name]
    }
    return {"parts": stored, "what": conversion.what, **conversion.reading.record()}


@dataclass(frozen=True)
class _Inputs:
    """Inputs that are stored: the fields, and what else a schema has of them."""

    shape: Sequence[int]
    fields: Sequence[Field]
    more: Mapping[str, Any] = field(default_factory=dict)


class _Conversion:
    """The conversion of parts, the training part first, by a schema that it decides if there is none."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        known, self.options = request["schema"], ColumnOptions(**request["options"])
        self.folder = folder
        self.request = request
        self.where = f"data.path={request['path']}"
        self.reading = Reading(folder, self.options, Schema.read(known) if known is not None else None)
        self.what = "numbers"

    def part(self, part: str, data: Any) -> dict[str, Any]:
        request = self.request
        columns_of(data, request, part)
        if len(data) == 0:
            raise RefusedError(f"The set for {part} has no samples", place=self.where)
        file = f"{part}-inputs.npy"
        inputs = self._inputs(file, data)
        self.reading.check_shape(inputs.shape, f"{self.where} (for {part})")
        targets = self.reading.targets([self._target(data, name) for name in request["targets"] or []], "data.targets")
        self.reading.decide(inputs.shape, inputs.fields, targets, **inputs.more)
        groups = None
        if self.options.group_by and part == "train":
            groups = np.unique(np.array(data[self.options.group_by][:]), return_inverse=True)[1]
        return self.reading.stored(part, file, len(data), targets, groups)

    def _inputs(self, file: str, data: Any) -> _Inputs:
        import datasets

        names = self.request["inputs"]
        known = data.features  # once: the library copies all of them for each use
        features = [known[name] for name in names]
        if isinstance(features[0], datasets.Image) and len(names) == 1:
            self.what = "images"
            return self._images(file, data.cast_column(names[0], datasets.Image(decode=False)), names[0])
        is_text = len(names) == 1 and getattr(features[0], "dtype", None) in ("string", "large_string")
        if is_text and self.options.columns.get(names[0], "text") == "text":
            self.what = "texts"
            return self._texts(file, data, names[0])
        if len(names) == 1 and not isinstance(features[0], datasets.Value | datasets.ClassLabel):
            values = self._list(data, names[0])
            self.reading.save(file, values.astype(self.options.dtype))
            return _Inputs(values.shape[1:], [Field(names[0], "number")])
        return self._columns(file, data, dict(zip(names, features, strict=True)))

    def _columns(self, file: str, data: Any, features: Mapping[str, Any]) -> _Inputs:
        """Store columns of numbers and categories beside one another."""
        schema, dtype = self.reading.schema, self.options.dtype
        fields = schema.inputs if schema is not None else [self._field(name, one) for name, one in features.items()]
        readers = [
            Reader(one, f"{self.where}: column {name}", dtype) for one, name in zip(fields, features, strict=True)
        ]
        for reader, name in zip(readers, features, strict=True):
            reader.add(_values(data, name), 1)
        found = combined(readers, dtype, schema, may_have_index=False)
        if schema is None:
            self.reading.guesses += found.guesses
            self.reading.rounded = list(found.rounded)
        self.reading.save(file, found.inputs)
        return _Inputs(found.inputs.shape[1:], found.fields, {"stored": found.inputs.dtype.name})

    def _field(self, name: str, feature: Any) -> Field:
        import datasets

        dtype = feature.dtype if isinstance(feature, datasets.Value | datasets.ClassLabel) else ""
        kind = self.options.columns.get(name) or ("date" if dtype.startswith(("date", "timestamp")) else "number")
        if kind == "drop":
            raise RefusedError(
                "leaves out a column that data.inputs names",
                key=f"data.columns.{name}",
                value="drop",
                suggestion="Remove the column from one of the two keys.",
            )
        if not dtype or (kind == "number" and dtype in ("string", "large_string")):
            as_names = f", or read names as categories with data.columns={{{name}: category}}" if dtype else ""
            raise RefusedError(
                f"is a column of {_spoken(feature)}",
                key="data.inputs",
                value=name,
                suggestion=f"Use one such column by itself, or several of numbers{as_names}.",
            )
        return field_of(name, kind, self.options.missing, self.options.dtype)

    def _list(self, data: Any, name: str) -> NDArray[Any]:
        try:
            values = np.asarray(data.with_format("numpy")[name][:])
        except ValueError:
            values = np.empty(0, object)
        if values.dtype.kind not in "biuf" or values.ndim < 2:
            raise RefusedError(
                f"is a column of {_spoken(data.features[name])}, which are not numbers of one shape",
                key="data.inputs",
                value=name,
                suggestion="Use another column, or make all its values the same length.",
            )
        check_finite(values, f"data.inputs={name}", self.options.dtype)
        return values

    def _target(self, data: Any, name: str) -> TargetColumn:
        """Return a column of targets, in which classes go by the names that the data set gives them."""
        import datasets

        feature, values = data.features[name], _values(data, name)
        if not isinstance(feature, datasets.ClassLabel):
            return TargetColumn(name, values, f"{self.where}: column {name}")
        schema, options = self.reading.schema, self.reading.options
        if schema is None and options.classes is None:
            self.reading.options = options = replace(options, classes=tuple(feature.names))
        others = options.classes is not None and set(options.classes).isdisjoint(feature.names)
        if others if schema is None else schema.targets[0].numbered:
            return TargetColumn(name, values, f"{self.where}: column {name}")
        values = [feature.names[int(code)] if code >= 0 else "" for code in values]
        return TargetColumn(name, values, f"{self.where}: column {name}")

    def _texts(self, file: str, data: Any, name: str) -> _Inputs:
        length, tokenizer = self.request["max_length"], tokenizers.configured(self.request["tokenizer"])
        assert tokenizer is not None, "checked before"
        padding = tokenizer.vocab_size
        with _Writer(self.folder / file, (len(data), length), "<i4") as writer:
            for begin in range(0, len(data), _BATCH):
                texts = _checked(data[begin : begin + _BATCH][name], name, begin)
                writer.write(token_rows(texts, tokenizer, length))
        more = {"vocab_size": padding + 1, "pad_token": padding, "dtype": "int64"}
        return _Inputs([length], [Field(name, "text")], more)

    def _images(self, file: str, data: Any, name: str) -> _Inputs:
        size, channels = self.request["image_size"], self.request["channels"]
        first = self._pixels(data[0][name], name, 0)
        height, width = first.shape[:2]
        with (
            _Writer(self.folder / file, (len(data), channels, height, width), "|u1") as writer,
            ThreadPoolExecutor(os.cpu_count()) as threads,
        ):
            for begin in range(0, len(data), _BATCH):
                rows = data[begin : begin + _BATCH][name]
                numbers = range(begin, begin + len(rows))
                pixels = list(threads.map(lambda row, number: self._pixels(row, name, number), rows, numbers))
                for number, one in enumerate(pixels):
                    if one.shape != first.shape:
                        raise RefusedError(
                            f"The image of row {begin + number + 1:,} has {one.shape[0]} x {one.shape[1]} pixels, but "
                            f"the image of row 1 has {height} x {width}",
                            key="data.inputs",
                            value=name,
                            suggestion=f"Set data.image_size, such as data.image_size={min(size or 224, 224)}.",
                        )
                writer.write(np.stack(pixels).transpose(0, 3, 1, 2))
        return _Inputs([channels, height, width], [Field(name, "image")], {"channels": channels})

    def _pixels(self, row: Any, name: str, number: int) -> NDArray[np.uint8]:
        """Decode an image, upright, cut from the middle to `image_size`. Shapes: (height, width, channels)."""
        size, channels = self.request["image_size"], self.request["channels"]
        try:
            if row is None:
                raise BrokenImageError("it is missing")
            source = row["bytes"] if row["bytes"] is not None else row["path"]
            return fitted(decode(source, stored_size(size), channels), size, channels)
        except (BrokenImageError, OSError) as error:
            raise RefusedError(
                f"The image of row {number + 1:,} cannot be read: {error}", key="data.inputs", value=name
            ) from None


def stored_size(image_size: int | None) -> StoredSize:
    """Return how large an image is decoded."""
    return StoredSize(image_size or _LARGEST, image_size or _LARGEST)


def fitted(image: Pillow.Image, size: int | None, channels: int) -> NDArray[np.uint8]:
    """Return the pixels of a decoded image, cut from the middle to `size`. Shapes: (height, width, channels)."""
    if size is not None:
        image = ImageOps.fit(image, (size, size), Pillow.Resampling.BICUBIC)
    return np.asarray(image).reshape(image.height, image.width, channels)


def token_rows(texts: Sequence[str], tokenizer: tokenizers.Tokenizer, length: int) -> NDArray[np.int32]:
    """Return the tokens of texts, cut off or padded to a length. Shapes: (texts, length)."""
    padding, size = tokenizer.vocab_size, tokenizers.token_bytes(tokenizer.vocab_size)
    rows = np.full((len(texts), length), padding, np.int32)
    if tokenizer.encoding != "utf-8":  # the tokenizer of bytes
        texts = [text.encode().decode(tokenizer.encoding) for text in texts]
    for row, packed in zip(rows, tokenizer.pack(texts), strict=True):
        tokens = np.frombuffer(packed, f"<u{size}")[:length]
        row[: len(tokens)] = tokens
    return rows


class _Writer:
    """Writes an `.npy` file row by row, so that it need not fit into memory."""

    def __init__(self, path: Path, shape: tuple[int, ...], descr: str) -> None:
        self.file = open(path, "xb")  # noqa: SIM115
        self.file.write(npy_header(shape, descr))

    def __enter__(self) -> _Writer:
        return self

    def write(self, rows: NDArray[Any]) -> None:
        self.file.write(np.ascontiguousarray(rows).data)

    def __exit__(self, *error: object) -> None:
        self.file.close()


def _values(data: Any, name: str) -> Any:
    """Return a column as texts, numbers or moments; a missing value is empty, or NaN."""
    listed = column_of(data, name).to_pylist()
    if (first := next((value for value in listed if value is not None), None)) is None or isinstance(first, str):
        return ["" if value is None else value for value in listed]
    if isinstance(first, date):
        return np.array(listed, "datetime64[us]")
    return np.array([np.nan if value is None else value for value in listed])


def _checked(values: Sequence[Any], name: str, begin: int) -> Sequence[Any]:
    missing = next((row for row, value in enumerate(values) if value is None), None)
    if missing is not None:
        raise RefusedError(
            f"Column {name} has no value in row {begin + missing + 1:,}: a model cannot learn from a missing value",
            key="data.path",
            suggestion="Leave the row out or put a value there.",
        )
    return values


def _spoken(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or type(feature).__name__)
