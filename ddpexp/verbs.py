"""The verbs beside training: what `ddpexp evaluate` does."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ddpexp import rundir
from ddpexp.config import Experiment, layout, parse
from ddpexp.config.compose import compose, override_file
from ddpexp.data.batch_plan import plan_batches
from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, RefusedError
from ddpexp.launch import Job
from ddpexp.launch.spawn import Server
from ddpexp.prepare import prepare

_USAGE = """usage: ddpexp evaluate RUN_DIR_OR_WEIGHTS [key=value ...]

Evaluate the newest weights of a run directory, or a safetensors file, on the run's evaluation data.
Weights that lie in no run directory need a recipe: ddpexp evaluate weights.safetensors recipe=mnist"""


def evaluate(argv: list[str], server: Server | None) -> int:
    """Print the metrics of the weights that `argv` names; writes nothing beside them.

    Raises:
        RefusedError: no such weights, or a configuration that does not fit.
    """
    if not argv:
        print(_USAGE, file=sys.stderr)
        return EXIT_REFUSED
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return EXIT_DONE
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
    found = layout(experiment)
    data = prepare(experiment.data, experiment.trust)
    batch = plan_batches(experiment.trainer.global_batch_size, experiment.trainer.micro_batch_size, found.world_size)
    described = {
        "config": text,
        "layout": asdict(found),
        "data": data,
        "weights": str(weights.resolve()),
        "batch_size": batch.micro_batch_size,
    }
    job = Job("ddpexp.worker:evaluate", [json.dumps(described)], found, logs=None)
    return experiment.launcher.launch(job, server)


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
