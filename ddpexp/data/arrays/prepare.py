"""Arrays and tables: checked once, before any worker starts, and mapped by all workers.

Standard library only, and fast to import: the launching command imports this module. numpy is imported where files are
read, which a start that finds its cache does not do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from ddpexp.data.arrays.sources import (
    ARRAYS,
    TABLES,
    Classes,
    ColumnKind,
    ColumnOptions,
    Names,
    SplitFiles,
    TargetType,
)  # fmt: skip
from ddpexp.data.cache import Cache, cache_name, find_cache, make_cache
from ddpexp.data.named_files import Source, is_value_file, source_of
from ddpexp.data.schema import Schema
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.system.text import size_text

_OF_TABLES = ("columns", "missing", "delimiter")  # options
_DELIMITERS = {"tab": "\t", "\\t": "\t"}  # as they are typed
_VERSION = 3  # increase it when the content of caches changes: it is part of their names


def prepare(
    path: str | None,
    inputs: str | Names | None = None,
    targets: str | Names | None = None,
    eval_path: str | None = None,
    eval_inputs: str | Names | None = None,
    eval_targets: str | Names | None = None,
    target_type: TargetType = "auto",
    classes: Classes | None = None,
    dtype: Literal["float32", "float64", "int64"] = "float32",
    standardize: bool = False,
    columns: Mapping[str, ColumnKind] | None = None,
    missing: Mapping[str, str | float] | None = None,
    delimiter: str | None = None,
    group_by: str | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Check files and their options, and store what cannot be mapped as it is; return a description of the data.

    The result is JSON: name, folder (of the cache), hash (of the files and what is read from them), num_train,
    num_test, note, guesses (lines on what a person could doubt), schema, facts, and what `load` needs. With the
    `schema` of a run every part is read by it; otherwise the training part decides one.

    Raises: RefusedError, if a file or an option is invalid.
    """
    parts = parts_of(path, inputs, targets, eval_path, eval_inputs, eval_targets, target_type)
    if is_value_file(group_by) or parts[0].source.kind not in TABLES:
        group_by = None  # a file with a value for each sample, or no column
    options = options_of(target_type, classes, dtype, group_by, columns, missing, delimiter)
    if parts[0].source.kind not in TABLES and (key := next((key for key in _OF_TABLES if getattr(options, key)), None)):
        raise RefusedError(
            f"is for tables, and {parts[0].source} holds arrays", key=f"data.{key}", suggestion="Leave it out."
        )
    return described(parts, options, standardize, schema)


def options_of(
    target_type: str,
    classes: Classes | None = None,
    dtype: str = "float32",
    group_by: str | None = None,
    columns: Mapping[str, ColumnKind] | None = None,
    missing: Mapping[str, str | float] | None = None,
    delimiter: str | None = None,
) -> ColumnOptions:
    """Return what the options declare of columns. Raises: RefusedError."""
    delimiter = _DELIMITERS.get(str(delimiter), delimiter)
    if delimiter is not None and len(delimiter) != 1:
        raise RefusedError(key="data.delimiter", value=delimiter, suggestion="Use one character, or tab.")
    names = tuple(map(str, classes)) if classes is not None else None
    return ColumnOptions(target_type, names, dtype, group_by, dict(columns or {}), dict(missing or {}), delimiter)


def described(
    parts: Sequence[SplitFiles], options: ColumnOptions, standardize: bool, schema: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Check and store parts; return their description, as `prepare` does. Raises: RefusedError."""
    sources = [source for part in parts for source in (part.source, part.labels) if source is not None]
    identity = {"version": _VERSION, "parts": [asdict(part) for part in parts], **options.identity()}
    bases = [Path(sources[0].path).parent, user_cache()]

    def fill(folder: Path, known: Schema | None) -> Mapping[str, Any]:
        from ddpexp.data.arrays.store import Reading  # late: numpy

        return Reading(folder, options, known).store(parts)

    cache = cached("arrays", bases, identity, schema, fill, sources)
    decided = Schema.read(cache.record["schema"])
    if standardize and len(decided.shape) != 1:
        raise RefusedError(
            f"is for rows of numbers, and a sample of {sources[0]} has the shape {list(decided.shape)}",
            key="data.standardize",
            value=True,
            suggestion="Use data.standardize=false, and normalize in the model.",
        )
    note = f"samples of {_contents(decided)}, from {sources[0].path}"
    described = description("arrays", cache, options, standardize, schema, note)
    return {**described, "sources": [asdict(source) for source in sources]}


def cached(
    kind: str,
    bases: Sequence[Path],
    identity: Mapping[str, Any],
    schema: Mapping[str, Any] | None,
    fill: Callable[[Path, Schema | None], Mapping[str, Any]],
    sources: Sequence[Source],
) -> Cache:
    """Return the cache of files. With the schema of a run: one whose training part has decided it, or one filled by it.

    Raises: RefusedError, if it cannot be written.
    """
    known = Schema.read(schema).decided() if schema is not None else None
    if known is not None:
        found = find_cache(bases, cache_name(kind, identity))
        if found is not None and Schema.read(found.record["schema"]) == known:
            return found
        identity = {**identity, "schema": known.as_json()}
    space = size_text(sum(source.size for source in sources)) if sources else "some space"
    files = [source.path for source in sources]
    return make_cache(bases, cache_name(kind, identity), lambda folder: fill(folder, known), space, sources=files)


def description(
    name: str, cache: Cache, options: ColumnOptions, standardize: bool, schema: Mapping[str, Any] | None, note: str
) -> dict[str, Any]:
    """Return what a cache holds, as `load` understands it."""
    record = cache.record
    shown = Schema.read(record["schema"] if schema is None else schema)
    num_train, num_test = (record["parts"].get(part, {}).get("samples", 0) for part in ("train", "eval"))
    return {
        "name": name,
        "folder": str(cache.folder),
        "hash": _hash(record, options),
        "num_train": num_train,
        "num_test": num_test,
        "note": f"{num_train:,} + {num_test:,} {note}",
        "guesses": _guesses(record, options, standardize) if schema is None else [],
        "parts": record["parts"],
        "sources": [],
        "standardize": standardize,
        "schema": shown.as_json(),
        "facts": shown.facts(),
    }


def parts_of(
    path: str | None,
    inputs: str | Names | None,
    targets: str | Names | None,
    eval_path: str | None,
    eval_inputs: str | Names | None,
    eval_targets: str | Names | None,
    target_type: str,
) -> list[SplitFiles]:
    """Return the parts that the options name; one without names of its own has those of the training part."""
    if not path:
        raise RefusedError(
            "is not set", key="data.path", suggestion="Name the file to train on, a .csv, .parquet, .npy or .npz file."
        )
    parts = [part_of("train", path, inputs, targets, target_type)]
    kind = parts[0].source.kind
    if eval_path or eval_inputs or (eval_targets and kind != ".npy"):
        if kind == ".npy" and target_type != "none" and not eval_targets:
            raise RefusedError(
                "is not set",
                key="data.eval_targets",
                suggestion="Name the .npy file with the targets of data.eval_path.",
            )
        shared = eval_targets or targets
        parts.append(part_of("eval", eval_path or path, eval_inputs or inputs, shared, target_type))
    return parts


def part_of(
    name: str, path: str, inputs: str | Names | None, targets: str | Names | None, target_type: str
) -> SplitFiles:
    """Return a part of the data by its options. Raises: RefusedError."""
    prefix = "data." if name == "train" else "data.eval_"
    source = source_of(f"{prefix}path", path)
    chosen, wanted = names_of(inputs), names_of(targets)
    if target_type == "none" and wanted:
        raise RefusedError(
            "is for data without targets",
            key="data.target_type",
            value="none",
            suggestion=f"Leave out {prefix}targets.",
        )
    if source.kind not in ARRAYS + TABLES:
        table = "A table of texts separated by tabs is read with the ending .csv." if source.kind == ".tsv" else ""
        raise RefusedError(
            f"is not a file of a known type ({', '.join(ARRAYS + TABLES)})",
            key=source.key,
            value=source.path,
            suggestion=table,
        )
    if source.kind != ".npy":
        return SplitFiles(name, source, chosen, wanted, None)
    if chosen:
        raise RefusedError(
            "holds one array without a name",
            key=f"{prefix}inputs",
            value=chosen[0],
            suggestion="Leave the key out.",
            place=source,
        )
    if target_type == "none":
        return SplitFiles(name, source, None, None, None)
    if not wanted or len(wanted) > 1 or not wanted[0].lower().endswith(".npy"):
        raise RefusedError(
            f"The targets of {source} are not in the same file",
            key=f"{prefix}targets",
            value=wanted[0] if wanted else "null",
            suggestion=f"Name their file, such as {prefix}targets=labels.npy, or use data.target_type=none for data "
            "without targets.",
        )
    return SplitFiles(name, source, None, None, source_of(f"{prefix}targets", wanted[0]))


def names_of(names: str | Names | None) -> Names | None:
    """Return names that may be one name, as a tuple."""
    if isinstance(names, str):
        return (names,)
    return tuple(names) if names else None


def _hash(record: Mapping[str, Any], options: ColumnOptions) -> str:
    """Return a hash of what is trained on."""
    facts = Schema.read(record["schema"]).facts()
    known = {key: value for key, value in facts.items() if key not in ("num_outputs", "target_columns")}
    declared = [dict(options.columns), dict(options.missing), options.delimiter]
    what = [record["digests"], known, options.dtype, *([declared] if any(declared) else [])]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _guesses(record: Mapping[str, Any], options: ColumnOptions, standardize: bool) -> list[str]:
    """Return the lines on what a person could doubt of what a training part has decided."""
    rounded = [] if standardize or options.dtype != "float32" else record["rounded"]
    return [
        *record["guesses"],
        *(
            f"column {name} has digits that float32 lacks: data.standardize=true computes in float64 first, and "
            "data.dtype=float64 keeps them"
            for name in rounded
        ),
    ]


def _contents(schema: Schema) -> str:
    what = f"{len(schema.classes):,} classes" if schema.classes is not None else "numbers as targets"
    shape = " x ".join(map(str, schema.shape)) or "1"
    return f"{shape} numbers, {what if schema.targets else 'no targets'}"
