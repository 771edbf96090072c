"""Tables and arrays to predict for: what the run knows of its data counts, and there need be no targets.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddpexp.data.arrays import prepare as labelled
from ddpexp.data.arrays.prepare import described, names_of, part_of, source_of
from ddpexp.data.arrays.sources import TABLES, Names, Part, Source
from ddpexp.errors import RefusedError

_OF_TRAINING = (  # facts
    "classes", "num_classes", "num_outputs", "target_columns", "mean", "std", "target_mean", "target_std"
)  # fmt: skip


def prepare(trained_on: Mapping[str, Any], /, **options: Any) -> dict[str, Any]:
    """Prepare a file as the data that was trained on, with its columns, classes, means and standard deviations.

    A file without targets, and one to evaluate on where the training file is gone, is described alone (`whole`). The
    file is that of `eval_path`, or else that of `path`.

    Raises:
        RefusedError: as for training, or the inputs are others.
    """
    options = {key: value for key, value in options.items() if key != "group_by"}
    if not options.get("classes") and "classes" in trained_on:
        options["classes"] = tuple(trained_on["classes"])
    if not options.get("inputs") and "columns" in trained_on:
        options["inputs"] = tuple(trained_on["columns"])
    part = _alone(options)
    if part is None:
        prepared = labelled.prepare(**options)
    else:
        kind = options.get("target_type", "auto")
        has_targets = bool(part.targets or part.labels)
        value = None if kind == "none" else -1 if "num_classes" in trained_on else float("nan")
        prepared = described(
            [part],
            kind if has_targets else "none",
            options.get("classes"),
            options.get("dtype", "float32"),
            bool(options.get("standardize")),
        )
        prepared |= {"whole": True, "placeholder": value}
    facts = prepared["facts"]
    if facts["shape"] != trained_on["shape"]:
        raise RefusedError(
            f"a sample of {prepared['sources'][0]['key']}={prepared['sources'][0]['path']} has the shape "
            f"{facts['shape']}, and the model was trained on {trained_on['shape']}: choose the same inputs."
        )
    known = {key: trained_on[key] for key in _OF_TRAINING if key in trained_on}
    return {**prepared, "facts": {**facts, **known}}


def _alone(options: Mapping[str, Any]) -> Part | None:
    """Return the part to predict for if it is read alone, without the training file."""
    name = "eval" if options.get("eval_path") else "train"
    prefix = "eval_" if name == "eval" else ""
    path, training = options.get(f"{prefix}path"), options.get("path")
    if not path:
        return None
    inputs = options.get(f"{prefix}inputs") or options.get("inputs")
    source = source_of(f"data.{prefix}path", path)
    targets = names_of(options.get(f"{prefix}targets"))
    if source.kind != ".npy":
        targets = targets or names_of(options.get("targets"))
    if options.get("target_type") == "none" or not _has(source, targets):
        return replace(part_of(name, path, inputs, None, "none"), name="eval")
    if name == "eval" and not (training and os.path.exists(os.path.expanduser(training))):
        return part_of(name, path, inputs, targets, "auto")
    return None


def _has(source: Source, targets: Names | None) -> bool:
    """Return whether the targets are there: some of their names; a file of their own is checked where it is read."""
    if not targets or source.kind == ".npy":
        return bool(targets)
    if source.kind in TABLES:
        from ddpexp.data.arrays.tables import columns_of  # late: numpy

        return bool(set(targets) & set(columns_of(source)))
    try:
        with zipfile.ZipFile(source.path) as archive:
            return f"{targets[0]}.npy" in archive.namelist()
    except zipfile.BadZipFile:
        return True  # reported where it is read
