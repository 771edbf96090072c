"""Build the model, the data and the task of an experiment in this process, as a worker does. Imports torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddpexp.checkpoint import initial
from ddpexp.checkpoint.loading import load_weights
from ddpexp.config import facts
from ddpexp.config.instantiate import instantiate
from ddpexp.config.schema import Experiment
from ddpexp.data.datasets import Splits
from ddpexp.distributed.world import World
from ddpexp.export.trained import unchanged_random_state
from ddpexp.run.prepare import prepare
from ddpexp.strategy.replica import modules_of
from ddpexp.train.build import build_model, open_data
from ddpexp.train.recipe_checks import check_task


def new_model(experiment: Experiment) -> Any:
    """Return the model with the weights that a run starts with, on the CPU, in training mode."""
    experiment.trust.make_importable()
    with unchanged_random_state():
        model = build_model(experiment)
        if experiment.run.init_from is not None:
            _initialize(model, experiment)
    return model


def _initialize(model: Any, experiment: Experiment) -> None:
    """Load the weights of run.init_from."""
    run, lora = experiment.run, experiment.trainer.lora
    with TemporaryDirectory(prefix="ddpexp-init-") as folder:
        path, _ = initial.converted(run, initial.find(run, _warn), Path(folder))
        averaged, selection = run.init_weights == "ema", initial.selection(run)
        load_weights(modules_of(model), path, initial.override(run), averaged, selection, lora=lora)


def open_splits(experiment: Experiment) -> Splits:
    """Prepare and open the data."""
    experiment.trust.make_importable()
    with unchanged_random_state():
        return open_data(experiment, prepare(experiment.data, experiment.trust), World.alone())


def facts_of(experiment: Experiment, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of the data that a configuration refers to; prepares the data if it refers to any."""
    if not any(facts.referring(values)):
        return {}
    prepared = prepare(experiment.data, experiment.trust)
    return facts.used(values, (prepared or {}).get("facts") or {}, f"data.prepare={experiment.data.prepare}")


def new_task(experiment: Experiment) -> Any:
    """Return the task."""
    experiment.trust.make_importable()
    task = instantiate(experiment.task, experiment.trust, "task")
    check_task(task, experiment.task.target, evaluates=experiment.trainer.eval_every != 0)
    return task


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
