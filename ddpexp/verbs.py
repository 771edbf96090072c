"""The verbs beside training: what `ddpexp evaluate` does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from ddpexp import rundir
from ddpexp.config import Experiment, load, parse
from ddpexp.config.compose import compose, override_file
from ddpexp.errors import RefusedError
from ddpexp.jobs import Evaluation, Training
from ddpexp.launch import Launcher, Starter
from ddpexp.rundir import RunDir

_USAGE = """usage: ddpexp evaluate RUN_DIR_OR_WEIGHTS [key=value ...]

Evaluate the newest weights of a run directory, or a safetensors file, on the run's evaluation data.
Weights that lie in no run directory need a recipe: ddpexp evaluate weights.safetensors recipe=mnist"""


def member(argv: list[str]) -> tuple[Launcher, Training]:
    """Return the job that the launcher of another command has sent this one to: a run directory, or a JSON file of a job.

    Raises:
        RefusedError: neither is there, or its launcher does not work that way.
    """
    if len(argv) != 1:
        raise RefusedError("ddpexp member is for launchers: it takes the run directory, or the file, that they have made.")
    place = Path(argv[0])
    if place.is_dir():
        run = RunDir(place)
        if run.config.is_file() and run.config.stat().st_uid != os.getuid():
            raise RefusedError(f"{place} is another user's: its configuration says whose code runs, so it must be your own.")
        try:
            text, overrides = run.config.read_text(), yaml.safe_load(run.overrides.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise RefusedError(f"{place} is not a run directory: {error}.") from None
        experiment = load(text)
        job = Training(experiment, text, overrides, ["ddpexp", *overrides], run)
    else:
        try:
            described = json.loads(place.read_text())
        except (OSError, ValueError) as error:
            raise RefusedError(f"{place} describes no job: {error}.") from None
        experiment = load(described["config"])
        job = Training(experiment, described["config"], described["overrides"], described["command"])
    if not isinstance(experiment.launcher, Starter):
        raise RefusedError(f"{place}: its launcher starts no further commands.")
    return experiment.launcher, job


def evaluate(argv: list[str]) -> tuple[Launcher, Evaluation] | None:
    """Return how to evaluate the weights that `argv` names, or None when it only asked for help, which is printed.

    Raises:
        RefusedError: no such weights, or a configuration that does not fit.
    """
    if not argv:
        raise RefusedError(f"evaluate what?\n{_USAGE}")
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return None
    # Options may stand before the source, as in `evaluate --config-dir DIR SOURCE`.
    options = ("--config-dir", "-cd")
    place = next((i for i, word in enumerate(argv) if word[0] != "-" and (i == 0 or argv[i - 1] not in options)), 0)
    source, words = Path(argv[place]), argv[:place] + argv[place + 1 :]
    if not source.exists():
        raise RefusedError(f"evaluate {source}: there is no such directory or file.")
    home = next((folder for folder in (source, *source.resolve().parents) if _is_run(folder)), None)
    if home is not None:
        text, experiment = _of_run(home, words)
    else:
        text, experiment = _of_words(source, words)
    weights = rundir.newest_checkpoint(source / "checkpoints") if _is_run(source) else source
    return experiment.launcher, Evaluation(experiment, text, weights)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "manifest.json").is_file()


def _of_run(home: Path, words: list[str]) -> tuple[str, Experiment]:
    values, text = override_file(home / "config.yaml", words)
    return text, parse(values)


def _of_words(source: Path, words: list[str]) -> tuple[str, Experiment]:
    if not words:
        raise RefusedError(f"evaluate {source}: it lies in no run directory, so name its recipe, for example recipe=mnist.")
    composed = compose(words)
    if composed is None:
        raise RefusedError(f"evaluate {source}: {' '.join(words)} is no configuration.")
    return composed.text, parse(composed.values)
