"""What `ddpexp export` asks its process for, and whether that can be done here. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp import __version__
from ddpexp.config.build import did_you_mean
from ddpexp.errors import RefusedError
from ddpexp.run.prepare import prepare
from ddpexp.run.stored_config import trained_data
from ddpexp.run.stored_run import StoredWeights

PACKAGES = {  # that a format needs
    "safetensors": (),
    "hf": (),
    "pt": (),
    "pt2": (),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}
_FACTS = (
    "mean",
    "std",
    "num_classes",
    "classes",
    "shape",
    "size",
    "eval_size",
    "columns",
    "schema",
    "target_mean",
    "target_std",
    "vocab_size",
    "block_size",
    "tokenizer",
)
"""Of the data: what a program needs to use the model."""

_FILES = (".pt", ".pth", ".pt2", ".onnx", ".safetensors", ".ckpt", ".bin")


def check(out: Path, format_name: str) -> None:
    """Check the options.

    Raises:
        RefusedError: no such format, a package that it needs is missing, or the folder cannot be made.
    """
    if format_name not in PACKAGES:
        raise RefusedError(
            "is not a format",
            place=f"--format {format_name}",
            suggestion=did_you_mean(format_name, PACKAGES, "--format "),
        )
    missing = [name for name in PACKAGES[format_name] if importlib.util.find_spec(name) is None]
    if missing:
        raise RefusedError(
            f"needs {', '.join(missing)}",
            place=f"--format {format_name}",
            suggestion=f"Type pip install 'ddpexp[{format_name}]'.",
        )
    if out.suffix in _FILES:
        raise RefusedError(
            "names a file, and an export is a folder of files",
            place=f"--out {out}",
            suggestion=f"Type --out {out.with_suffix('')}.",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RefusedError("is not an empty folder", place=f"--out {out}", suggestion="Export into a new one.")
    parent = out.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RefusedError(f"The directory {parent} is missing or read-only", place=f"--out {out}")


def request_of(weights: StoredWeights, out: Path, format_name: str) -> dict[str, Any]:
    """Return what the process that exports needs."""
    run = weights.run
    return {
        "config": run.text,
        "weights": str(weights.path.resolve()),
        "out": str(out.absolute()),
        "format": format_name,
        "data": prepare(run.experiment.data, run.experiment.trust, stored=run.home is not None),
        "provenance": {
            "ddpexp": __version__,
            "run": str(run.home.path.resolve()) if run.home is not None else None,
            "weights": weights.path.name,
            "data": described(trained_data(run.manifest)),
        },
    }


def described(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a program must know of the data that a model was trained on: preprocessing and names of classes."""
    facts = data.get("facts")
    known = {**data, **facts} if isinstance(facts, Mapping) else data
    return {key: known[key] for key in ("name", *_FACTS) if known.get(key) is not None}
