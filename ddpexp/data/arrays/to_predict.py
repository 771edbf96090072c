"""Tables and arrays for a trained model: read by the schema of its run, and there need be no targets.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddpexp.data.arrays import prepare as labelled
from ddpexp.data.arrays.prepare import described, names_of, options_of, part_of
from ddpexp.data.arrays.sources import TABLES, Names, SplitFiles
from ddpexp.data.named_files import Source, source_of
from ddpexp.data.schema import Schema


def prepare(schema: Mapping[str, Any], /, **options: Any) -> dict[str, Any]:
    """Prepare a file by the schema of the data that was trained on.

    A file without targets, and one to evaluate on where the training file is gone, is described alone
    (`is_single_set`). The file is that of `eval_path`, or else that of `path`.

    Raises:
        RefusedError: as for training, or the data does not fit the schema.
    """
    options = {key: value for key, value in options.items() if key != "group_by"}
    part = _alone(options)
    if part is None:
        return labelled.prepare(**options, schema=schema)
    kind = options.get("target_type", "auto")
    has_targets = bool(part.targets or part.labels)
    names = ("classes", "dtype", "columns", "missing", "delimiter")
    given = {name: options[name] for name in names if name in options}
    declared = options_of(kind if has_targets else "none", **given)
    prepared = described([part], declared, bool(options.get("standardize")), schema)
    placeholder: float | None = None
    if kind != "none":
        placeholder = float("nan") if Schema.read(schema).classes is None else -1
    return {**prepared, "is_single_set": True, "placeholder": placeholder}


def _alone(options: Mapping[str, Any]) -> SplitFiles | None:
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
    if options.get("target_type") == "none" or not _has(source, targets, options.get("delimiter")):
        return replace(part_of(name, path, inputs, None, "none"), name="eval")
    if name == "eval" and not (training and os.path.exists(os.path.expanduser(training))):
        return part_of(name, path, inputs, targets, "auto")
    return None


def _has(source: Source, targets: Names | None, delimiter: str | None) -> bool:
    """Return whether the targets are there: some of their names; a file of their own is checked where it is read."""
    if not targets or source.kind == ".npy":
        return bool(targets)
    if source.kind in TABLES:
        from ddpexp.data.arrays.tables import reader_of  # late: numpy

        return bool(set(targets) & set(reader_of(source, delimiter).names))
    try:
        with zipfile.ZipFile(source.path) as archive:
            return f"{targets[0]}.npy" in archive.namelist()
    except zipfile.BadZipFile:
        return True  # reported where it is read
