"""The command `ddpexp evaluate`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from ddpexp.cli.start import launch
from ddpexp.cli.verb import Call
from ddpexp.errors import RefusedError
from ddpexp.launch.launchers.base import Launcher
from ddpexp.run.evaluation import Evaluation
from ddpexp.run.stored_run import find_weights
from ddpexp.system.terminal import print_json


def evaluate(call: Call) -> int:
    """Evaluate the weights that are named, and return the exit code."""
    launcher, evaluation = evaluation_of(call)
    if not call.as_json:
        return launch(launcher, evaluation.job, call.server)
    with redirect_stdout(sys.stderr):  # standard output is for the metrics alone
        code = launch(launcher, evaluation.job, call.server)
    if (metrics := evaluation.answer()) is not None:
        print_json(metrics)
    return code


def evaluation_of(call: Call) -> tuple[Launcher, Evaluation]:
    """Return how to evaluate.

    Raises:
        RefusedError: no such weights, or a configuration that does not fit.
    """
    split = call.options["--split"].split(",") if "--split" in call.options else []
    if not all(split):
        raise RefusedError(
            "takes names of evaluation sets", place="--split", suggestion="Type --split eval,test, for example."
        )
    weights = find_weights(*call.source(), call.name, call.restate, call.checkpoint)
    return weights.run.experiment.launcher, Evaluation(weights, split, call.as_json)
