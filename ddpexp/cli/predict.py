"""The command `ddpexp predict`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from ddpexp.cli.start import launch
from ddpexp.cli.verb import Call
from ddpexp.errors import RefusedError
from ddpexp.launch.launchers.base import Launcher
from ddpexp.predict.job import Prediction, check_format, check_out
from ddpexp.run.stored_run import find_weights
from ddpexp.system.terminal import print_json


def predict(call: Call) -> int:
    """Predict with the weights that are named, and return the exit code."""
    launcher, prediction = prediction_of(call)
    if prediction.out is not None:
        return launch(launcher, prediction.job, call.server)
    with redirect_stdout(sys.stderr):  # standard output is for the predictions alone
        code = launch(launcher, prediction.job, call.server)
    if code == 0 and (answer := prediction.answer()) is not None:
        if call.as_json:
            print_json(answer)
        else:
            from ddpexp.predict.names import printed  # late: numpy

            print(printed(answer["predictions"]), flush=True)
    return code


def prediction_of(call: Call) -> tuple[Launcher, Prediction]:
    """Return how to predict.

    Raises:
        RefusedError: no such weights or input, a file that cannot be written, or a configuration that does not fit.
    """
    source, overrides = call.source()
    out = Path(call.options["--out"]).expanduser() if "--out" in call.options else None
    given = Path(call.options["--input"]).expanduser() if "--input" in call.options else None
    if out is not None:
        if call.as_json:
            raise RefusedError(
                f"prints the predictions, and --out {out} writes them",
                place="predict --json",
                suggestion="Leave one of the two out.",
            )
        check_format(out)
        check_out(out)
    elif given is None:
        if Path(source).is_file() and Path(source).suffix != ".safetensors":
            raise RefusedError(
                "The run comes first, and what it predicts for behind --input",
                place=f"predict {source}",
                suggestion=f"Type ddpexp predict RUN_DIR --input {shlex.quote(source)}.",
            )
        raise RefusedError(
            "needs a file to write, or an input",
            place=f"predict {source}",
            suggestion="Add --out FILE.npz, .npy, .csv or .parquet, or --input FILE to predict for a picture, a text "
            "or rows of your own.",
        )
    if given is not None:
        if not given.exists():
            raise RefusedError(
                "There is no such file", place=f"--input {call.options['--input']}", suggestion=_meant(given)
            )
        overrides = [*_here(overrides), *overrides]
    weights = find_weights(source, overrides, call.name, call.restate, call.checkpoint)
    return weights.run.experiment.launcher, Prediction(weights, out, call.options.get("--split"), given)


def _here(overrides: Sequence[str]) -> list[str]:
    """Return overrides by which an input is predicted for in one process here, unless others are typed."""
    typed = {word.partition("=")[0].lstrip("+") for word in overrides}
    return [word for word in ("launcher=spawn", "trainer.gpus=1") if word.partition("=")[0] not in typed]


def _meant(given: Path) -> str:
    """Return what a text may be meant for that is no file."""
    if re.match(r"\w+:/", str(given)):
        return "Download it, and name the file."
    if set("*?") & set(str(given)):
        return f"Type --input {shlex.quote(str(given.parent))} for all files of the folder."
    return "" if given.suffix or not str(given).count(" ") else "Write the text to a file, and name that."
