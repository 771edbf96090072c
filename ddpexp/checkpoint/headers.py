"""Names, shapes and dtypes of safetensors files, read from their headers alone; free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpexp.checkpoint.format import is_checkpoint, is_named_so
from ddpexp.errors import RefusedError
from ddpexp.system.files import is_shallow, parse_json, read_plain_file
from ddpexp.system.text import first_few

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_HEADER_BYTES = 100_000_000  # as the safetensors library reads at most
_DEPTH = 8


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: str  # as the format names it, such as F32
    file: Path
    stored_as: str  # its name in the file: of tied tensors, the only one that is stored
    begin: int  # of its bytes in the file
    end: int

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file by name; tied ones appear under each of their names.

    Raises:
        RefusedError: it is no safetensors file, or it is cut off.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path.name} is not a plain file")
        size = path.stat().st_size
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or num_bytes > min(size - 8, _HEADER_BYTES):
                raise ValueError("its header is cut off, or it is another kind of file")
            header = json.loads(file.read(num_bytes))
        if not isinstance(header, dict) or not is_shallow(header, _DEPTH):
            raise ValueError("its header is not a table of tensors")
        metadata = header.pop("__metadata__", None) or {}
        entries = {name: _entry(path, name, values, 8 + num_bytes, size) for name, values in header.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise RefusedError(f"cannot be read as safetensors ({reason})", place=path.name) from None
    tied = {
        name: entries[first] for name, first in metadata.items() if first in entries and name not in entries
    }  # as ddpexp and the safetensors library store them
    return {**entries, **tied}


def _entry(path: Path, name: str, values: Mapping[str, Any], base: int, size: int) -> Entry:
    shape, (begin, end) = tuple(values["shape"]), values["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)) or begin > end:
        raise ValueError(f"{name} has a shape or a position that cannot be")
    if end > size - base:
        raise ValueError(f"it is cut off: {name} would end at byte {end:,} of {size - base:,}")
    return Entry(shape, str(values["dtype"]), path, name, base + begin, base + end)


def read_index(path: Path) -> dict[str, Entry]:
    """Return the tensors of files that an index of Hugging Face's form names.

    Raises:
        RefusedError: the index is damaged, a file is missing or damaged, or lacks a tensor.
    """
    try:
        tree = parse_json(read_plain_file(path))
        places = dict(tree["weight_map"])
        if not all(isinstance(text, str) for item in places.items() for text in item):
            raise ValueError("its weight_map does not map names to files")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RefusedError(f"is not an index of safetensors files ({error})", place=path.name) from None
    strange = next((name for name in places.values() if Path(name).name != name or not name), None)
    if strange is not None:
        raise RefusedError(f"names {strange!r}, which is not a file beside it", place=path.name)
    missing = sorted({name for name in places.values() if not (path.parent / name).is_file()})
    if missing:
        raise RefusedError(f"names files that are not beside it: {first_few(missing, 3)}", place=path.name)
    files = {name: read_header(path.parent / name) for name in sorted(set(places.values()))}
    absent = [f"{name} in {place}" for name, place in places.items() if name not in files[place]]
    if absent:
        raise RefusedError(f"names tensors that its files lack: {first_few(absent, 3)}", place=path.name)
    tied = {name: entry for entries in files.values() for name, entry in entries.items() if name != entry.stored_as}
    return {**tied, **{name: files[place][name] for name, place in places.items()}}


def read_source(path: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file, of an index of several, or of a folder that holds either.

    Raises:
        RefusedError: it is damaged, or the folder holds neither.
    """
    if path.is_dir():
        path = file_in(path)
    return read_index(path) if path.name.endswith(_INDEX_SUFFIX) else read_header(path)


def file_in(folder: Path, names: Sequence[str] = (INDEX, SINGLE)) -> Path:
    """Return the file of weights in a folder that is no checkpoint, as Hugging Face's libraries write it.

    Raises:
        RefusedError: there is none.
    """
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is not None:
        return found
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pth", ".pt"))
    if others:
        raise RefusedError(
            f"holds no {INDEX} and no {SINGLE}",
            suggestion=f"Name one of its files, {first_few(others, 3)}.",
            place=folder,
        )
    raise RefusedError(f"holds no weights: neither {INDEX} nor {SINGLE} nor a checkpoint", place=folder)


def is_foreign_folder(path: Path) -> bool:
    """Return whether a path is a folder of weights that is no checkpoint of ours."""
    return path.is_dir() and not is_checkpoint(path) and not is_named_so(path)
