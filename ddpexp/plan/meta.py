"""The model of a run on torch's meta device, where it needs no memory, and a batch of the run's data."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from ddpexp.compat import lazy_dynamo
from ddpexp.config.parse import load
from ddpexp.config.schema import Experiment
from ddpexp.data.batches import EvalBatches
from ddpexp.errors import RefusedError
from ddpexp.system.limits import reason
from ddpexp.system.oom import bound_memory
from ddpexp.train.build import build_model

META, CPU = torch.device("meta"), torch.device("cpu")


def found_or_error(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function finds, or its error, for `ddpexp.plan.gather.error_of`."""
    try:
        return find()
    except RefusedError as error:
        return {"refused": error.as_dict()}
    except Exception as error:  # of the user's own code, as it would end a run
        traceback.print_exc()
        limit = reason(error)
        return {"failed": f"{type(error).__name__}: {error}{f' ({limit})' if limit else ''}"}


def load_experiment(config: str) -> Experiment:
    """Load a configuration as a worker does, with the code that it trusts."""
    experiment = load(config)
    experiment.trust.make_importable()
    if not experiment.trainer.compiles:
        lazy_dynamo.defer(on_meta=True)
    return experiment


def build_on_meta(experiment: Experiment, notes: dict[str, str]) -> tuple[Any, torch.device]:
    """Build the model or models as a worker does, without memory; where their code does not work so, in memory."""
    try:
        with META:
            return build_model(experiment), META
    except RefusedError:
        raise
    except Exception as error:
        notes["model"] = (
            f"built in memory, because its code does not work on torch's meta device ({type(error).__name__}: {error})"
        )
    return build_in_memory(experiment), CPU


def build_in_memory(experiment: Experiment) -> Any:
    """Build the model or models as a worker does, within the free memory."""
    bound_memory()
    return build_model(experiment)


def first_batch(experiment: Experiment, train: Any, num_samples: int) -> Any:
    """Return the first samples of a set, on the host."""
    return EvalBatches(train, num_samples, 0, 1, CPU, on_device=experiment.data.on_device is True).first()
