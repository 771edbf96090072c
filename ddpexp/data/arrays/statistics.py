"""Mean and standard deviation of the columns, of the samples that are trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.data.arrays.sources import GROUP_FILES
from ddpexp.data.cache import cache_name, make_cache
from ddpexp.data.user_cache import user_cache
from ddpexp.system.files import digest

_VERSION = 2  # increase it when the content of caches changes: it is part of their names
_BLOCK = 1 << 16  # rows
_DIGITS = 20  # binary digits of a mean below those of the std: the same where another numpy adds up


def with_statistics(prepared: Mapping[str, Any], division: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of data whose facts have `mean` and `std`, lists of a number for each column.

    Likewise `target_mean` and `target_std` of targets that are numbers; None where they are classes.

    They are those of the training part alone: `division` holds the keys of the data section that hold samples out.
    """
    identity = {"hash": prepared["hash"], **division}
    if (group_by := division["group_by"]) is not None and group_by.endswith(GROUP_FILES):
        identity["groups"] = digest(Path(os.path.expanduser(group_by)))

    def fill(folder: Path) -> Mapping[str, Any]:
        return _statistics(prepared, division)

    arrays = Path(prepared["folder"])
    name = cache_name("arrays-statistics", {**identity, "version": _VERSION})
    cache = make_cache([arrays.parent.parent, user_cache()], name, fill, "1 MB", sources=list(arrays.iterdir()))
    found = {key: cache.record[key] for key in ("mean", "std", "target_mean", "target_std")}
    return {**prepared, "facts": {**prepared["facts"], **found}}


def _statistics(prepared: Mapping[str, Any], division: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np  # late: the launching command imports this module, and often finds a cache

    folder, part = Path(prepared["folder"]), prepared["parts"]["train"]
    inputs = np.load(folder / part["inputs"], mmap_mode="r")
    trained = np.zeros(len(inputs), bool)
    trained[_kept(prepared, division, len(inputs))] = True
    mean, std = _of_columns(inputs, trained)
    found: dict[str, Any] = {"mean": mean, "std": std, "target_mean": None, "target_std": None}
    if part["targets"] and "num_classes" not in prepared["facts"]:
        targets = np.load(folder / part["targets"], mmap_mode="r")
        found["target_mean"], found["target_std"] = _of_columns(targets.reshape(len(targets), -1), trained)
    return found


def _of_columns(values: Any, trained: Any) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each column over the rows of which `trained` is true."""
    import numpy as np

    blocks = [slice(begin, begin + _BLOCK) for begin in range(0, len(values), _BLOCK)]
    count = int(trained.sum())
    mean = sum(values[block][trained[block]].astype(np.float64).sum(0) for block in blocks) / count
    square = sum(((values[block][trained[block]].astype(np.float64) - mean) ** 2).sum(0) for block in blocks) / count
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
    folder, part, group_by = Path(prepared["folder"]), prepared["parts"]["train"], division["group_by"]
    stratify = folds is not None if division["stratify"] is None else division["stratify"]
    labels = np.load(folder / part["targets"]) if stratify and "num_classes" in prepared["facts"] else None
    groups = np.load(folder / part["groups"]) if part["groups"] else None
    if group_by is not None and group_by.endswith(GROUP_FILES):
        groups = checked_groups(read_values(group_by, "data.group_by"), count, group_by)
    kept, _ = (
        fraction_parts(count, fraction, labels, groups)
        if folds is None
        else fold_parts(count, fold, folds, labels, groups)
    )
    return kept.indices()
