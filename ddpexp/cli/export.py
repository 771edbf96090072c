"""The command `ddpexp export`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp import __version__
from ddpexp.checkpoint.format import is_checkpoint
from ddpexp.cli.verb import Call
from ddpexp.config.build import did_you_mean
from ddpexp.errors import EXIT_DONE, DdpexpError, RefusedError
from ddpexp.run.prepare import prepare
from ddpexp.run.stored_config import trained_data
from ddpexp.run.stored_run import StoredWeights, find_weights
from ddpexp.system import separate_process
from ddpexp.system.files import relative

FORMATS = {
    "safetensors": (),
    "hf": (),
    "pt": (),
    "pt2": (),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),  # with what each needs
}
_OF_DATA = (
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
)  # that a program needs to use the model


def export(call: Call) -> int:
    """Export the model that is named, print the names of the files, and return the exit code.

    Raises:
        RefusedError: no such weights, a folder that is not empty, or a format that is not installed.
    """
    (source, overrides), options = call.source(), call.options
    if "--out" not in options:
        raise RefusedError("needs a folder to write to", place=f"export {source}", suggestion="Add --out FOLDER.")
    out, kind = Path(options["--out"]).expanduser(), options.get("--format", "safetensors")
    check(out, kind)
    weights = find_weights(source, overrides, call.name, call.restate)
    if not is_checkpoint(weights.path):
        raise RefusedError(
            "is not a checkpoint", place=f"export {weights.path}", suggestion="Name a run, or one of its checkpoints."
        )
    try:
        answer = separate_process.call(
            "ddpexp.export.worker:main", request_of(weights, out, kind), {"CUDA_VISIBLE_DEVICES": ""}
        )
    except separate_process.NoAnswerError as error:
        raise DdpexpError(
            f"the process that exports ended with exit code {error.status}", suggestion="See its output above."
        ) from None
    if "failed" in answer:
        raise DdpexpError(f"Failed with {answer['failed']}", place=f"export {source} --format {kind}")
    compared = "several models, not compared" if answer["difference"] is None else (
        f"greatest difference from the model on a batch: {answer['difference']:.3g}"
    )  # fmt: skip
    print(f"{relative(out)}: {', '.join(answer['files'])}\n{compared}")
    return EXIT_DONE


def check(out: Path, kind: str) -> None:
    """Check the options.

    Raises:
        RefusedError: no such format, a package that it needs is missing, or the folder cannot be made.
    """
    if kind not in FORMATS:
        raise RefusedError(
            "is not a format", place=f"--format {kind}", suggestion=did_you_mean(kind, FORMATS, "--format ").lstrip()
        )
    missing = [name for name in FORMATS[kind] if importlib.util.find_spec(name) is None]
    if missing:
        raise RefusedError(
            f"needs {', '.join(missing)}", place=f"--format {kind}", suggestion=f"Type pip install 'ddpexp[{kind}]'."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RefusedError("is not an empty folder", place=f"--out {out}", suggestion="Export into a new one.")
    parent = out.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RefusedError(f"The directory {parent} is missing or read-only", place=f"--out {out}")


def request_of(weights: StoredWeights, out: Path, kind: str) -> dict[str, Any]:
    """Return what the process that exports needs."""
    run = weights.run
    return {
        "config": run.text,
        "weights": str(weights.path.resolve()),
        "out": str(out.absolute()),
        "format": kind,
        "data": prepare(run.experiment.data, run.experiment.trust, stored=run.home is not None),
        "made": {
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
    return {key: known[key] for key in ("name", *_OF_DATA) if known.get(key) is not None}
