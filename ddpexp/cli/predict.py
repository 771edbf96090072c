"""The command `ddpexp predict`."""

from __future__ import annotations

from pathlib import Path

from ddpexp.cli.start import launch
from ddpexp.cli.verb import Call
from ddpexp.errors import RefusedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.predict.job import Prediction, check_format, check_out
from ddpexp.run.stored_run import find_weights


def predict(call: Call) -> int:
    """Predict with the weights that are named, and return the exit code."""
    return launch(*prediction_of(call), call.server)


def prediction_of(call: Call) -> tuple[Launcher, Job]:
    """Return how to predict.

    Raises:
        RefusedError: no such weights, a file that cannot be written, or a configuration that does not fit.
    """
    source, overrides = call.source()
    if "--out" not in call.options:
        raise RefusedError(
            "needs a file to write", place=f"predict {source}", suggestion="Add --out FILE.npz, .npy, .csv or .parquet."
        )
    out = Path(call.options["--out"]).expanduser()
    check_format(out)
    check_out(out)
    weights = find_weights(source, overrides, call.name, call.restate, call.checkpoint)
    return weights.run.experiment.launcher, Prediction(weights, out, call.options.get("--split")).job
