"""Raw inputs: pictures, texts and rows that are in no data set, for a trained model to predict for.

Each kind of data has a function `read` (`ddpexp/config/registry.py`) that makes a set of samples of them, as its
evaluation set has them. It gets the inputs, the description of the data that was trained on, and the keys of the data
section.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddpexp.data.base import IndexData, SampleNames
from ddpexp.data.schema import Schema
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular

INPUT = "the input"  # in messages


@dataclass(frozen=True)
class Inputs:
    """Raw inputs as samples of an evaluation set."""

    samples: IndexData
    names: SampleNames | None  # None: by their indices
    is_one: bool  # one picture, text or row by itself


def listed(given: Any) -> tuple[Sequence[Any], bool]:
    """Return raw inputs as a list, and whether it is one by itself."""
    return (list(given), False) if isinstance(given, list | tuple) else ([given], True)


def as_path(value: Any) -> Path | None:
    """Return the file or folder that a path or a text names, which exists; None for all else.

    Raises:
        RefusedError: there is none.
    """
    if not isinstance(value, str | os.PathLike):
        return None
    path = Path(os.fspath(value)).expanduser()
    if not path.exists():
        seen_from = "" if path.is_absolute() else f" in the folder {Path.cwd()}"
        raise RefusedError(f"There is no such file{seen_from}", place=str(value))
    return path


def array_of(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array, or a tensor as one; None for all else."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype.itemsize == 2 and value.is_floating_point() else value).numpy())
    return value if isinstance(value, np.ndarray) else None


def load_array(path: Path, member: str | None = None) -> np.ndarray[Any, Any]:
    """Return the array of a `.npy` file, or one of a `.npz` file. Raises: RefusedError."""
    try:
        with open_regular(path) as opened:
            loaded = np.load(opened, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                return np.asarray(loaded)
            names = loaded.files
            if member in names or len(names) == 1:
                return np.asarray(loaded[member if member in names else names[0]])
    except (ValueError, EOFError, OSError) as error:
        raise RefusedError(f"cannot be read as an array: {error}", place=str(path)) from None
    raise RefusedError(
        f"holds the arrays {', '.join(names)}",
        place=str(path),
        suggestion="Name the one to predict for with data.inputs=NAME.",
    )


def wrong_kind(value: Any, needed: str) -> RefusedError:
    """Return the error for an input that is none of what the data of the run is made of."""
    is_path = isinstance(value, str | os.PathLike)
    reason = "is of another kind than the data that the model was trained on"
    place = str(value) if is_path else f"{INPUT} of type {type(value).__name__}"
    return RefusedError(reason, place=place, suggestion=f"Give {needed}.")


def schema_of(known: Mapping[str, Any]) -> Schema:
    """Return the schema by which the data of a run is read. Raises: RefusedError, if its record has none."""
    if not isinstance(known.get("schema"), Mapping):
        raise RefusedError("The record of the run says nothing of how its data is read", place=INPUT)
    return Schema.read(known["schema"])


def texts_of(given: Any) -> tuple[list[str], SampleNames | None, bool]:
    """Return texts: a text is one itself, and a path that of a file, or of all files in a folder.

    Raises:
        RefusedError: there is no such file, or something is no text.
    """
    values, is_one = listed(given)
    texts: list[str] = []
    names: list[str] = []
    for value in values:
        if isinstance(value, str):
            texts.append(value)
            continue
        if not isinstance(value, Path) or (path := as_path(value)) is None:
            raise wrong_kind(value, "a text, or the Path of a file with one")
        files = sorted(file for file in path.rglob("*.txt")) if path.is_dir() else [path]
        is_one = is_one and not path.is_dir()
        for file in files:
            try:
                with open_regular(file) as opened:
                    texts.append(opened.read().decode("utf-8-sig"))
            except (OSError, UnicodeDecodeError) as error:
                raise RefusedError(f"is no text in UTF-8: {error}", place=str(file)) from None
            names.append(str(file.relative_to(path)) if path.is_dir() else str(value))
    if not texts:
        raise RefusedError("holds no texts (names ending in .txt)", place=str(given))
    return texts, SampleNames("file", names) if len(names) == len(texts) else None, is_one
