"""Data sets that the library `datasets` reads: converted to arrays once, before any worker starts.

Standard library only, and fast to import: the launching command imports this module. The library is imported in a
process of its own, and only where no cache is found.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from ddpexp.data.arrays.prepare import cached, description, names_of, options_of
from ddpexp.data.arrays.sources import Classes, ColumnKind, Names
from ddpexp.data.named_files import Source, files_matching, is_value_file, source_of
from ddpexp.data.schema import Schema
from ddpexp.data.text import tokenizer as tokenizers
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.settings.key import Key
from ddpexp.system import separate_process

_VERSION = 3  # increase it when the content of caches changes: it is part of their names
_MODULE = "datasets"
_MOST_PIXELS = 4096

HUGGING_FACE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""The variables by which Hugging Face's libraries fetch nothing."""


def prepare(
    path: str | None,
    name: str | None = None,
    revision: str | None = None,
    split: str = "train",
    eval_path: str | None = None,
    eval_split: str | None = "auto",
    inputs: str | Names | None = None,
    targets: str | Names | None = None,
    target_type: Literal["auto", "class", "number", "none"] = "auto",
    classes: Classes | None = None,
    image_size: Annotated[int | None, Key(at_least=1, at_most=_MOST_PIXELS)] = None,
    channels: Literal[1, 3] = 3,
    tokenizer: str = "bytes",
    max_length: Annotated[int, Key(at_least=1)] = 256,
    dtype: Literal["float32", "float64", "int64"] = "float32",
    standardize: bool = False,
    columns: Mapping[str, ColumnKind] | None = None,
    missing: Mapping[str, str | float] | None = None,
    group_by: str | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make sure that the chosen columns are in a cache; return a description of the data.

    The result is JSON, as that of `ddpexp.data.arrays.prepare.prepare`, which `load` understands; with the `schema` of
    a run every set is read by it.

    Raises: RefusedError, if the data or an option is invalid.
    """
    if not path:
        raise RefusedError(
            "is not set", key="data.path", suggestion="Name a file, a folder, or a data set of the Hugging Face hub."
        )
    _check_columns(path, names_of(inputs), names_of(targets), target_type)
    train_files, eval_files = _files(path, "data.path"), _files(eval_path, "data.eval_path") if eval_path else []
    group_by = None if is_value_file(group_by) else group_by
    options = options_of(target_type, classes, dtype, group_by, columns, missing)
    request = {
        "path": path, "name": name, "revision": revision, "split": split, "eval_path": eval_path,
        "eval_split": eval_split, "inputs": names_of(inputs), "targets": names_of(targets), "image_size": image_size,
        "channels": channels, "tokenizer": tokenizer, "max_length": max_length, "options": options.identity(),
        "schema": None,
    }  # fmt: skip
    files = [*train_files, *eval_files]
    identity = {
        "version": _VERSION,
        **request,
        "files": [vars(file) for file in files],
        "tokenizer_files": _identity(tokenizer),
    }
    local = Path(os.path.abspath(os.path.expanduser(path))).parent if train_files else None
    bases = [base for base in (local, user_cache()) if base is not None]

    def fill(folder: Path, known: Schema | None) -> Mapping[str, Any]:
        return _converted(folder, request if known is None else {**request, "schema": known.as_json()})

    cache = cached("hf", bases, identity, schema, fill, files)
    what = cache.record["what"]
    if standardize and what != "numbers":
        raise RefusedError(
            f"is for columns of numbers, and data.inputs={inputs} is a column of {what}",
            key="data.standardize",
            value=True,
            suggestion="Use data.standardize=false.",
        )
    described = description("hf", cache, options, standardize, schema, f"samples of {what}, from {path}")
    return {**described, "divisor": 255.0 if what == "images" else None}


def _check_columns(path: str, inputs: Sequence[str] | None, targets: Sequence[str] | None, target_type: str) -> None:
    if not inputs or (not targets and target_type != "none"):
        key = "targets" if inputs else "inputs"
        raise RefusedError(
            "is not set", key=f"data.{key}", suggestion=f"Name the columns of data.path={path} that are {key}."
        )
    if target_type == "none" and targets:
        raise RefusedError(
            "is for data without targets", key="data.target_type", value="none", suggestion="Leave out data.targets."
        )


def is_on_hub(path: str) -> bool:
    """Return whether a path is that of no file or folder here, and written like a name on the hub."""
    if glob.has_magic(path) or os.path.exists(os.path.expanduser(path)):
        return False
    return path.count("/") <= 1 and not path.startswith((".", "~", "/")) and "." not in os.path.basename(path)


def _files(path: str, key: str) -> list[Source]:
    """Return the files that a path, a folder or a pattern names; none for a name on the hub.

    Raises:
        RefusedError: a path matches no file, or one cannot be read.
    """
    suggestion = "Name a file, a folder, or a data set of the hub."
    if is_on_hub(path):
        return []
    if not glob.has_magic(path) and not os.path.exists(os.path.expanduser(path)):
        raise RefusedError("does not exist", key=key, value=path, suggestion=suggestion)
    names = files_matching(path)
    if not names:
        raise RefusedError("holds no files", key=key, value=path, suggestion=suggestion)
    return [source_of(key, name, path, may_be_empty=len(names) > 1) for name in names]


def _identity(tokenizer: str) -> list[str]:
    if tokenizer == "char":
        raise RefusedError(
            "builds its vocabulary from a text file, which data=hf does not read",
            key="data.tokenizer",
            value="char",
            suggestion="Use bytes, or a tokenizer's file or name.",
        )
    return tokenizers.identity(tokenizer)


def _converted(folder: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the data in a process of its own, and return the record of the cache."""
    if importlib.util.find_spec(_MODULE) is None:
        raise RefusedError(
            "needs the library datasets", key="data", value="hf", suggestion="Install it: pip install 'ddpexp[hf]'."
        )
    # A file on this machine may hold addresses: the library fetches nothing from there.
    is_local = not any(is_on_hub(request[key]) for key in ("path", "eval_path") if request[key])
    offline = dict.fromkeys(HUGGING_FACE, "1") if is_local and not tokenizers.is_on_hub(request["tokenizer"]) else {}
    try:
        answer: dict[str, Any] = separate_process.call(
            "ddpexp.data.hf.convert:convert", {**request, "folder": str(folder)}, offline
        )
    except separate_process.NoAnswerError as error:
        raise RefusedError(
            f"could not be converted (exit code {error.status})",
            key="data.path",
            value=request["path"],
            suggestion="See its output above.",
        ) from None
    if "errno" in answer:  # a full disk: `make_cache` reports it
        raise OSError(answer["errno"], answer["problem"], str(folder))
    return answer
