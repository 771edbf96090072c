"""Predictions for raw inputs in this process, on the CPU: the same as those of `ddpexp predict --input` there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ddpexp.config.instantiate import instantiate
from ddpexp.config.schema import Experiment
from ddpexp.data.batches import EvalBatches
from ddpexp.data.inputs import Inputs
from ddpexp.errors import LoaderError, RefusedError
from ddpexp.predict.inputs import INPUT_SET, read_inputs
from ddpexp.predict.job import batch_size_of, request_of
from ddpexp.predict.names import Predictions
from ddpexp.predict.worker import as_arrays, task_of
from ddpexp.run.stored_config import data_facts, trained_data
from ddpexp.train.precision import Precision

_CPU = torch.device("cpu")


def predictions_for(
    experiment: Experiment, manifest: Mapping[str, Any], model: Any, given: Any, split: str | None
) -> Any:
    """Return what the task of a run predicts for inputs: a record for each, or one for a single input.

    Raises:
        RefusedError: the task predicts nothing, or the inputs cannot be read.
    """
    task = task_of(experiment)
    with _readable(), _threads(experiment, manifest):
        inputs = read_inputs(experiment, task, trained_data(manifest), given, split)
        precision = Precision(experiment.trainer.precision, _CPU, False)
        parts = []
        with precision.autocast(), torch.no_grad():
            for batch, count in _batches(inputs, batch_size_of(experiment)):
                parts.append(as_arrays(task.predict(model, batch), count, f"inputs of {INPUT_SET}"))
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    facts = data_facts(manifest)
    classes = facts.get("classes")
    records = Predictions(
        arrays, inputs.names, classes if isinstance(classes, list) else None, facts.get("target_columns")
    ).records()
    return records[0] if inputs.is_one else records


def model_input(experiment: Experiment, manifest: Mapping[str, Any], given: Any, split: str | None) -> Any:
    """Return what a batch of inputs has for the model: its first tensor, or the whole batch if that is a mapping.

    Raises:
        RefusedError: the inputs cannot be read.
    """
    experiment.trust.make_importable()
    task = instantiate(experiment.task, experiment.trust, "task")
    with _readable(), _threads(experiment, manifest):
        inputs = read_inputs(experiment, task, trained_data(manifest), given, split)
        [(batch, _)] = _batches(inputs, len(inputs.samples))
    return batch[0] if isinstance(batch, tuple | list) else batch


def _batches(inputs: Inputs, size: int) -> Iterator[tuple[Any, int]]:
    """Yield batches, and how many samples each has."""
    batches = EvalBatches(inputs.samples, size, 0, 1, _CPU, name=INPUT_SET)
    for number, batch in enumerate(batches):
        yield batch, min(size, batches.num_samples - number * size)


@contextmanager
def _threads(experiment: Experiment, manifest: Mapping[str, Any]) -> Iterator[None]:
    """Compute with as many threads as the command does in the block, whose sums are then the same."""
    before, threads = torch.get_num_threads(), request_of(experiment, manifest).threads
    torch.set_num_threads(threads if isinstance(threads, int) else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _readable() -> Iterator[None]:
    """Refuse a picture whose pixels turn out to be damaged."""
    try:
        yield
    except LoaderError as error:
        raise RefusedError(str(error)) from None
