"""Converting columns of a data set of the library `datasets` to arrays, in a process of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps

from ddpexp.data.arrays.store import Reading
from ddpexp.data.arrays.tables import Column
from ddpexp.data.hf.sets import columns_of, open_sets
from ddpexp.data.image_folder.decode import BrokenImageError, decode
from ddpexp.data.image_folder.options import StoredSize
from ddpexp.data.npy import npy_header
from ddpexp.data.text import tokenizer as tokenizers
from ddpexp.errors import RefusedError
from ddpexp.system import files
from ddpexp.system.memory_file import read_memory_file
from ddpexp.system.process import die_with_parent

_BATCH = 256  # rows that are read at a time
_LARGEST = 1 << 30  # pixels of a side: no limit


def main(parent: int, answers: int, folder: str, request: int) -> None:
    """Subprocess entry point: convert what a memory file requests; write the record of the cache, or a problem."""
    die_with_parent(parent)
    try:
        answer = convert(Path(folder), read_memory_file(request))
    except RefusedError as error:
        answer = {"refused": str(error)}
    except OSError as error:
        answer = {"errno": error.errno, "problem": error.strerror or str(error)}
    files.answer(answers, answer)


def convert(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Write the chosen columns of the sets to a folder; return the record of the cache.

    Raises:
        RefusedError: the data is not what the options say. OSError: it cannot be written.
    """
    for path in folder.glob("*.npy"):
        path.unlink()
    sets = open_sets(request)
    conversion = _Conversion(folder, request)
    stored = {part: conversion.part(part, data) for part, data in sets.items()}
    train = stored["train"]
    if any(part["shape"] != train["shape"] for part in stored.values()):
        raise RefusedError(
            f"the samples of the sets of data.path={request['path']} have the shapes "
            f"{' and '.join(str(part['shape']) for part in stored.values())}: make them the same."
        )
    facts = {"shape": train["shape"], **conversion.facts, **conversion.reading.facts}
    digests = {
        f"{key}-{name}": _digest(folder / part[name])
        for key, part in stored.items()
        for name in ("inputs", "targets")
        if part[name]
    }
    return {"parts": stored, "facts": facts, "digests": digests, "what": conversion.what}


class _Conversion:
    """The conversion of parts, the training part first."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder, self.request = folder, request
        options = request["target_type"], request["classes"], request["dtype"], request["group_by"]
        self.reading = Reading(folder, *options)
        self.facts: dict[str, Any] = {}
        self.what = "numbers"

    def part(self, part: str, data: Any) -> dict[str, Any]:
        request, where = self.request, f"data.path={self.request['path']}"
        columns_of(data, request, part)
        if len(data) == 0:
            raise RefusedError(f"{where}: the set for {part} has no samples.")
        inputs, shape = self._inputs(part, data)
        targets = self._targets(data)
        groups = None
        if request["group_by"] and part == "train":
            codes = np.unique(np.array(data[request["group_by"]][:]), return_inverse=True)[1]
            groups = self.reading.save("train-groups.npy", codes)
        return {
            "samples": len(data),
            "shape": shape,
            "inputs": inputs,
            "targets": self.reading.save_targets(part, targets) if targets is not None else None,
            "groups": groups,
        }

    def _inputs(self, part: str, data: Any) -> tuple[str, list[int]]:
        import datasets

        names = self.request["inputs"]
        known = data.features  # once: the library copies all of them for each use
        features = [known[name] for name in names]
        file = f"{part}-inputs.npy"
        if isinstance(features[0], datasets.Image) and len(names) == 1:
            self.what = "images"
            return self._images(file, data.cast_column(names[0], datasets.Image(decode=False)), names[0])
        if len(names) == 1 and getattr(features[0], "dtype", None) in ("string", "large_string"):
            self.what = "texts"
            return self._texts(file, data, names[0])
        if len(names) == 1 and not isinstance(features[0], datasets.Value | datasets.ClassLabel):
            values = self._list(data, names[0])
        else:
            columns = zip(names, features, strict=True)
            values = np.stack([self._numbers(data, name, feature) for name, feature in columns], 1)
            self.facts |= {"num_features": len(names), "columns": list(names)}
        return self.reading.save(file, values.astype(self.request["dtype"])), list(values.shape[1:])

    def _numbers(self, data: Any, name: str, feature: Any) -> NDArray[np.float64]:
        import datasets

        if not isinstance(feature, datasets.Value | datasets.ClassLabel) or feature.dtype in ("string", "large_string"):
            raise RefusedError(
                f"data.inputs={name} is a column of {_spoken(feature)}: use one such column by itself, or several of "
                "numbers."
            )
        return Column(name, _values(data, name)).numbers(f"data.path={self.request['path']}")

    def _list(self, data: Any, name: str) -> NDArray[Any]:
        try:
            values = np.asarray(data.with_format("numpy")[name][:])
        except ValueError:
            values = np.empty(0, object)
        if values.dtype.kind not in "biuf" or values.ndim < 2:
            raise RefusedError(
                f"data.inputs={name} is a column of {_spoken(data.features[name])}, which are no numbers of one shape: "
                "use another column, or make them the same length."
            )
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            raise RefusedError(f"data.inputs={name} holds {values[tuple(wrong[0])]} in row {wrong[0][0] + 1:,}.")
        return values

    def _targets(self, data: Any) -> NDArray[Any] | None:
        import datasets

        names = self.request["targets"]
        if not names:
            return None
        where = f"data.path={self.request['path']}: column "
        if len(names) > 1:
            columns = [Column(name, _values(data, name)).numbers(where) for name in names]
            return np.stack(columns, 1).astype(np.float32)
        feature = data.features[names[0]]
        if isinstance(feature, datasets.ClassLabel) and self.reading.classes is None:
            self.reading.classes = feature.names
        values = Column(names[0], _values(data, names[0])).best()
        return self.reading.targets(values, f"{where}{names[0]}")

    def _texts(self, file: str, data: Any, name: str) -> tuple[str, list[int]]:
        length, tokenizer = self.request["max_length"], tokenizers.configured(self.request["tokenizer"])
        assert tokenizer is not None, "checked before"
        size = tokenizers.token_bytes(tokenizer.vocab_size)
        padding = tokenizer.vocab_size
        self.facts |= {"vocab_size": padding + 1, "pad_token": padding}
        with _Writer(self.folder / file, (len(data), length), "<i4") as writer:
            for begin in range(0, len(data), _BATCH):
                texts = _checked(data[begin : begin + _BATCH][name], name, begin)
                rows = np.full((len(texts), length), padding, np.int32)
                if tokenizer.encoding != "utf-8":  # the tokenizer of bytes
                    texts = [text.encode().decode(tokenizer.encoding) for text in texts]
                for row, packed in zip(rows, tokenizer.pack(texts), strict=True):
                    tokens = np.frombuffer(packed, f"<u{size}")[:length]
                    row[: len(tokens)] = tokens
                writer.write(rows)
        return file, [length]

    def _images(self, file: str, data: Any, name: str) -> tuple[str, list[int]]:
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
                            f"data.inputs={name}: the image of row {begin + number + 1:,} has {one.shape[0]} x "
                            f"{one.shape[1]} pixels, and that of row 1 {height} x {width}: set data.image_size, such "
                            f"as data.image_size={min(size or 224, 224)}."
                        )
                writer.write(np.stack(pixels).transpose(0, 3, 1, 2))
        return file, [channels, height, width]

    def _pixels(self, row: Any, name: str, number: int) -> NDArray[np.uint8]:
        """Decode an image, upright, cut from the middle to `image_size`. Shapes: (height, width, channels)."""
        size, channels = self.request["image_size"], self.request["channels"]
        try:
            if row is None:
                raise BrokenImageError("it is missing")
            source = row["bytes"] if row["bytes"] is not None else row["path"]
            image = decode(source, StoredSize(size or _LARGEST, size or _LARGEST), channels)
        except (BrokenImageError, OSError) as error:
            raise RefusedError(
                f"data.inputs={name}: the image of row {number + 1:,} cannot be read: {error}."
            ) from None
        if size is not None:
            image = ImageOps.fit(image, (size, size), Pillow.Resampling.BICUBIC)
        return np.asarray(image).reshape(image.height, image.width, channels)


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
    """Return a column as texts or numbers. Raises: RefusedError, if one is missing."""
    # Not data[name], which copies the descriptions of all columns.
    values = data.data.table.column(name)
    listed = (values if data._indices is None else values.take(data._indices.table.column(0))).to_pylist()
    _checked(listed, name, 0)
    return listed if listed and isinstance(listed[0], str) else np.asarray(listed)


def _checked(values: Sequence[Any], name: str, begin: int) -> Sequence[Any]:
    missing = next((row for row, value in enumerate(values) if value is None), None)
    if missing is not None:
        raise RefusedError(
            f"data.path: column {name} has no value in row {begin + missing + 1:,}: a model cannot learn from that, so "
            "leave the row out or put a value there."
        )
    return values


def _spoken(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
