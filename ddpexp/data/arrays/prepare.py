"""Arrays and tables: checked once, before any worker starts, and mapped by all workers.

Standard library only, and fast to import: the launching command imports this module. numpy is imported where files are
read, which a start that finds its cache does not do.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from ddpexp.data.arrays.sources import ARRAYS, GROUP_FILES, TABLES, Names, Part, Source
from ddpexp.data.cache import cache_name, make_cache
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular
from ddpexp.system.limits import human

_FEW_OF_A_CLASS = 10  # samples; below that whole numbers may be amounts
_VERSION = 2  # increase it when the content of caches changes: it is part of their names


def prepare(
    path: str | None,
    inputs: str | Names | None = None,
    targets: str | Names | None = None,
    eval_path: str | None = None,
    eval_inputs: str | Names | None = None,
    eval_targets: str | Names | None = None,
    target_type: Literal["auto", "class", "number", "none"] = "auto",
    classes: Names | None = None,
    dtype: Literal["float32", "float64", "int64"] = "float32",
    standardize: bool = False,
    group_by: str | None = None,
) -> dict[str, Any]:
    """Check files and their options, and store what cannot be mapped as it is; return a description of the data.

    The result is JSON: name, folder (of the cache), hash (of the files and what is read from them), num_train,
    num_test, note, facts, and what `load` needs.

    Raises: RefusedError, if a file or an option is invalid.
    """
    parts = parts_of(path, inputs, targets, eval_path, eval_inputs, eval_targets, target_type)
    if group_by is not None and (group_by.endswith(GROUP_FILES) or parts[0].source.kind not in TABLES):
        group_by = None  # a file with a value for each sample, or no column
    return described(parts, target_type, classes, dtype, standardize, group_by)


def described(
    parts: Sequence[Part],
    target_type: str,
    classes: Names | None,
    dtype: str,
    standardize: bool,
    group_by: str | None = None,
) -> dict[str, Any]:
    """Check and store parts; return their description, as `prepare` does. Raises: RefusedError."""
    options = {"target_type": target_type, "classes": classes, "dtype": dtype, "group_by": group_by}
    identity = {"version": _VERSION, "parts": [asdict(part) for part in parts], **options}

    def fill(folder: Path) -> Mapping[str, Any]:
        from ddpexp.data.arrays.store import Reading  # late: numpy

        return Reading(folder, target_type, classes, dtype, group_by).store(parts)

    sources = [source for part in parts for source in (part.source, part.labels) if source is not None]
    bases = [Path(sources[0].path).parent, user_cache()]
    files = [source.path for source in sources]
    space = human(sum(source.size for source in sources))
    record = (cache := make_cache(bases, cache_name("arrays", identity), fill, space, sources=files)).record
    stored = record["parts"]
    if standardize and len(shape := record["facts"]["shape"]) != 1:
        raise RefusedError(
            f"data.standardize=true is for rows of numbers, and a sample of {sources[0]} has the shape {shape}: use "
            "data.standardize=false, and normalize in the model."
        )
    num_train, num_test = (stored[name]["samples"] if name in stored else 0 for name in ("train", "eval"))
    names = parts[0].targets if sources[0].kind in TABLES else None
    note = _note(num_train, num_test, record, sources[0])
    if target_type == "auto" and _may_be_amounts(record["facts"], num_train):
        note += "; these are whole numbers: data.target_type=number predicts amounts"
    return {
        "name": "arrays",
        "folder": str(cache.folder),
        "hash": hash_of(record, dtype),
        "num_train": num_train,
        "num_test": num_test,
        "note": note,
        "parts": stored,
        "sources": [asdict(source) for source in sources],
        "dtype": dtype,
        "standardize": standardize,
        "facts": {**record["facts"], "target_columns": list(names) if names else None},
    }


def parts_of(
    path: str | None,
    inputs: str | Names | None,
    targets: str | Names | None,
    eval_path: str | None,
    eval_inputs: str | Names | None,
    eval_targets: str | Names | None,
    target_type: str,
) -> list[Part]:
    """Return the parts that the options name; one without names of its own has those of the training part."""
    if not path:
        raise RefusedError("data.path is not set: name the file to train on, a .csv, .parquet, .npy or .npz file.")
    parts = [part_of("train", path, inputs, targets, target_type)]
    kind = parts[0].source.kind
    if eval_path or eval_inputs or (eval_targets and kind != ".npy"):
        if kind == ".npy" and target_type != "none" and not eval_targets:
            raise RefusedError("data.eval_targets is not set: name the .npy file with the targets of data.eval_path.")
        shared = eval_targets or targets
        parts.append(part_of("eval", eval_path or path, eval_inputs or inputs, shared, target_type))
    return parts


def part_of(name: str, path: str, inputs: str | Names | None, targets: str | Names | None, target_type: str) -> Part:
    """Return a part of the data by its options. Raises: RefusedError."""
    prefix = "data." if name == "train" else "data.eval_"
    source = source_of(f"{prefix}path", path)
    chosen, wanted = names_of(inputs), names_of(targets)
    if target_type == "none" and wanted:
        raise RefusedError(f"data.target_type=none is for data without targets: leave out {prefix}targets.")
    if source.kind not in ARRAYS + TABLES:
        table = " A table of texts separated by tabs is read with the ending .csv." if source.kind == ".tsv" else ""
        raise RefusedError(
            f"{source}: files of {', '.join(ARRAYS + TABLES)} are read, by the ending of their names.{table}"
        )
    if source.kind != ".npy":
        return Part(name, source, chosen, wanted, None)
    if chosen:
        raise RefusedError(f"{prefix}inputs={chosen[0]}: {source} holds one array without a name, so leave this out.")
    if target_type == "none":
        return Part(name, source, None, None, None)
    if not wanted or len(wanted) > 1 or not wanted[0].lower().endswith(".npy"):
        raise RefusedError(
            f"{prefix}targets={wanted[0] if wanted else 'null'}: the targets of {source} are in a file of their own: "
            f"name it, such as {prefix}targets=labels.npy, or use data.target_type=none if there are none."
        )
    return Part(name, source, None, None, source_of(f"{prefix}targets", wanted[0]))


def source_of(key: str, path: str) -> Source:
    """Return a file as it is now.

    Raises:
        RefusedError: it is missing, empty or cannot be read.
    """
    full = os.path.abspath(os.path.expanduser(path))
    try:
        with open_regular(full) as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        seen_from = "" if os.path.isabs(os.path.expanduser(path)) else f" in the folder {os.getcwd()}"
        raise RefusedError(f"{key}={path} cannot be read{seen_from}: {error.strerror}.") from None
    if status.st_size == 0:
        raise RefusedError(f"{key}={path} is empty: name a file with data.")
    return Source(key, full, status.st_size, status.st_mtime_ns)


def names_of(names: str | Names | None) -> Names | None:
    """Return names that may be one name, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names) if names else None


def hash_of(record: Mapping[str, Any], dtype: str) -> str:
    """Return a hash of what is trained on."""
    facts = {key: value for key, value in record["facts"].items() if key != "num_outputs"}  # follows from the others
    return hashlib.sha256(json.dumps([record["digests"], facts, dtype]).encode()).hexdigest()


def _may_be_amounts(facts: Mapping[str, Any], num_samples: int) -> bool:
    """Return whether classes are whole numbers of which most are rare, as prices are and classes are not."""
    classes = facts.get("classes", ())
    return len(classes) > num_samples / _FEW_OF_A_CLASS and all(map(str.isdigit, classes))


def _note(num_train: int, num_test: int, record: Mapping[str, Any], source: Source) -> str:
    facts = record["facts"]
    what = f"{facts['num_classes']:,} classes" if "num_classes" in facts else "numbers as targets"
    if not any(part["targets"] for part in record["parts"].values()):
        what = "no targets"
    shape = " x ".join(map(str, facts["shape"])) or "1"
    return f"{num_train:,} + {num_test:,} samples of {shape} numbers, {what}, from {source.path}"
