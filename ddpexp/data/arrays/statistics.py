"""Numbers of the samples that are trained on: mean and standard deviation, and what fills missing values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpexp.data.cache import cache_name, make_cache
from ddpexp.data.named_files import is_value_file
from ddpexp.data.schema import STATISTICS, Schema
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.system.files import digest

_VERSION = 3  # increase it when the content of caches changes: it is part of their names
_BLOCK = 1 << 16  # rows
_DIGITS = 20  # binary digits of a mean below those of the std: the same where another numpy adds up
_STATISTICS = ("mean", "std", "target_mean", "target_std")


def with_statistics(prepared: Mapping[str, Any], division: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of data whose schema has the numbers of the samples that are trained on.

    They are what fills missing values and, with `standardize`, mean and std of the inputs, a number for each feature,
    and those of targets that are numbers. `division` holds the keys of the data section that hold samples out.
    """
    schema = Schema.read(prepared["schema"])
    identity = {"hash": prepared["hash"], "standardize": prepared["standardize"], **division}
    if is_value_file(group_by := division["group_by"]):
        identity["groups"] = digest(Path(os.path.expanduser(group_by)))

    def fill(folder: Path) -> Mapping[str, Any]:
        return _statistics(prepared, schema, division)

    arrays = Path(prepared["folder"])
    name = cache_name("arrays-statistics", {**identity, "version": _VERSION})
    cache = make_cache([arrays.parent.parent, user_cache()], name, fill, "1 MB", sources=list(arrays.iterdir()))
    fills = (
        value if one.fill is None else one.fill for one, value in zip(schema.inputs, cache.record["fills"], strict=True)
    )
    inputs = tuple(replace(one, fill=value) for one, value in zip(schema.inputs, fills, strict=True))
    found: dict[str, Any] = {key: None if (value := cache.record[key]) is None else tuple(value) for key in _STATISTICS}
    known = replace(schema, inputs=inputs, **found)
    return {**prepared, "schema": known.as_json(), "facts": known.facts()}


def _statistics(prepared: Mapping[str, Any], schema: Schema, division: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np  # late: the launching command imports this module, and often finds a cache

    folder, part = Path(prepared["folder"]), prepared["parts"]["train"]
    inputs = np.load(folder / part["inputs"], mmap_mode="r")
    trained = np.zeros(len(inputs), bool)
    trained[_kept(prepared, division, len(inputs))] = True
    found: dict[str, Any] = {"fills": _fills(inputs, trained, schema), **dict.fromkeys(_STATISTICS)}
    if not prepared["standardize"]:
        return found
    found["mean"], found["std"] = _of_columns(inputs, trained, schema.in_place_of_missing(found["fills"]))
    if part["targets"] and schema.classes is None:
        targets = np.load(folder / part["targets"], mmap_mode="r")
        found["target_mean"], found["target_std"] = _of_columns(targets.reshape(len(targets), -1), trained)
    return found


def _fills(inputs: Any, trained: Any, schema: Schema) -> list[float | None]:
    """Return the number in place of missing values of each column of the inputs; None where there is none."""
    import numpy as np

    fills: list[float | None] = []
    for one, place in zip(schema.inputs, schema.places(), strict=True):
        if one.missing not in STATISTICS:
            fills.append(None)
            continue
        values = np.asarray(inputs[:, place], np.float64)[trained]
        values = values[~np.isnan(values)]
        if not len(values):
            raise RefusedError(
                f"Column {one.name} has no value in the training samples",
                key=f"data.missing.{one.name}",
                value=one.missing,
                suggestion="Leave the column out, or give a number to fill in.",
            )
        fills.append(float(values.mean() if one.missing == "mean" else np.median(values)))
    return fills


def _of_columns(values: Any, trained: Any, fills: Any = None) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each column over the rows of which `trained` is true.

    `fills` are the numbers in place of those that are missing. Shapes: (columns,).
    """
    import numpy as np

    def read(begin: int) -> Any:
        found = values[begin : begin + _BLOCK][trained[begin : begin + _BLOCK]].astype(np.float64)
        return found if fills is None else np.where(np.isnan(found), fills, found)

    blocks, count = range(0, len(values), _BLOCK), int(trained.sum())
    mean = sum(read(begin).sum(0) for begin in blocks) / count
    square = sum(((read(begin) - mean) ** 2).sum(0) for begin in blocks) / count
    std = np.array([float(f"{value:.6g}") for value in np.sqrt(square)])
    std[std == 0] = 1.0  # of a column with one value
    grid = 2.0 ** (np.floor(np.log2(std)) - _DIGITS)
    return (np.round(mean / grid) * grid).tolist(), std.tolist()


def _kept(prepared: Mapping[str, Any], division: Mapping[str, Any], count: int) -> Any:
    """Return the samples that are not held out, as `ddpexp.train.choose_samples` divides them."""
    import numpy as np

    from ddpexp.data.partition import fold_parts, fraction_parts
    from ddpexp.data.weights import checked_groups, read_values

    fraction, fold, folds = (division[key] for key in ("validation_fraction", "fold", "folds"))
    if not fraction and folds is None:
        return slice(None)
    folder = Path(prepared["folder"])
    part = prepared["parts"]["train"]
    group_by = division["group_by"]
    stratify = folds is not None if division["stratify"] is None else division["stratify"]
    labels = np.load(folder / part["targets"]) if stratify and "num_classes" in prepared["facts"] else None
    groups = np.load(folder / part["groups"]) if part["groups"] else None
    if is_value_file(group_by):
        groups = checked_groups(read_values(group_by, "data.group_by"), count, group_by)
    kept, _ = (
        fraction_parts(count, fraction, labels, groups)
        if folds is None
        else fold_parts(count, fold, folds, labels, groups)
    )
    return kept.indices()
