"""The command `ddpexp predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddpexp.cli.subcommands import weights_of
from ddpexp.config import commands
from ddpexp.config.build import did_you_mean
from ddpexp.errors import RefusedError
from ddpexp.launch.launchers.base import Launcher
from ddpexp.run.prediction import Prediction, Source, check_format, check_out

_USAGE = f"""{commands.of("predict").usage}

Write what the task's method predict returns for each sample of a data set, in
their order, with the newest weights of a run directory, those of a checkpoint
or of a safetensors file.

  --out FILE       .npz, .npy, .csv or .parquet, replaced once it is complete
  --split NAME     an evaluation set, or train; default: the evaluation set

Other data is named by overrides, such as data.root=OTHER. docs/predict.md."""

OPTIONS = ("--out", "--split")
_OTHERS = ("--config-dir", "-cd")


def predict(argv: Sequence[str], command: Sequence[str]) -> tuple[Launcher, Prediction] | None:
    """Return how to predict with the weights that `argv` names, or None when it only asked for help, which is printed.

    Raises:
        RefusedError: no such weights, a file that cannot be written, or a configuration that does not fit.
    """
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return None
    options, others = _options(argv)
    if not others:
        raise RefusedError(f"predict with what?\n{_USAGE}")
    if "--out" not in options:
        raise RefusedError(f"predict {others[0]}: where to? Add --out FILE.npz, or .npy, .csv or .parquet.")
    out = Path(options["--out"]).expanduser()
    check_format(out)
    check_out(out)
    found = weights_of(others, "predict", command)
    source = Source(found.weights, found.home, out, options.get("--split"))
    return found.experiment.launcher, Prediction(found.experiment, found.text, source)


def _options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of this command, and the other arguments."""
    options: dict[str, str] = {}
    others: list[str] = []
    remaining = iter(argv)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name in OPTIONS:
            value = value if equals else next(remaining, "")
            if not value or value.startswith("-") or name in options:
                raise RefusedError(f"predict {name}: it takes one value, once, such as {_EXAMPLES[name]}.")
            options[name] = value
        elif argument.startswith("--") and name not in _OTHERS:
            raise RefusedError(f"predict {name}: no such option.{did_you_mean(name, (*OPTIONS, *_OTHERS))}")
        else:
            others.append(argument)
    return options, others


_EXAMPLES = {"--out": "--out predictions.npz", "--split": "--split test"}
