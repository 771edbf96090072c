"""The worker of `ddpexp predict`: what a task predicts for each sample of a set, in their order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.checkpoint.reader import weights_sha256
from ddpexp.config.instantiate import instantiate
from ddpexp.config.parse import load
from ddpexp.config.schema import Experiment
from ddpexp.data.base import SampleNames, names_in
from ddpexp.data.batches import EvalBatches
from ddpexp.data.datasets import Splits
from ddpexp.data.streams import Stream
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.predict.files import check_holds, contents
from ddpexp.predict.inputs import INPUT_SET, read_inputs
from ddpexp.predict.names import Predictions, plain
from ddpexp.settings.metrics import TEST_SET
from ddpexp.strategy.mesh import DataRank
from ddpexp.system import files
from ddpexp.system.limits import reason_with_limit
from ddpexp.task import HasPredict
from ddpexp.train import gpu_memory
from ddpexp.train.build import build_evals, open_data
from ddpexp.train.evaluate import no_test
from ddpexp.train.join import join_world
from ddpexp.train.precision import Precision
from ddpexp.train.process import Interrupted, open_log, run_rank
from ddpexp.train.worker import build_trained, situation

TRAIN = "train"
_BLOCK_BYTES = 16 << 20  # of predictions that are exchanged at once
_EXAMPLE = """    def predict(self, model, batch):
        inputs = batch[0]
        return {"output": model(inputs)}"""

Arrays = dict[str, NDArray[Any]]


def main(prediction: str, control: Control | None = None) -> int:
    """Predict; `prediction` is JSON made by `ddpexp.predict.job.Prediction`. Like `run_rank`."""
    return run_rank(lambda control: _predict(json.loads(prediction), control), control)


def _predict(prediction: Mapping[str, Any], control: Control) -> None:
    experiment, layout = load(prediction["config"]), Layout(**prediction["layout"])
    control.status.set_phase("join")
    world = join_world(experiment, layout, control)
    with gpu_memory.explained(lambda: situation(experiment, world, control, prediction["batch_size"])):
        _predict_set(prediction, experiment, world, control)


def _predict_set(prediction: Mapping[str, Any], experiment: Experiment, world: World, control: Control) -> None:
    """Predict for one set, and write the file, or answer. Ranks: all; communicates."""
    log = open_log(world, control, None)
    control.status.set_phase("build")
    task = task_of(experiment)
    name, splits, names = _set_of(prediction, experiment, task, world)
    rank = DataRank(world.rank, world.world_size)
    batches = build_evals(experiment, splits, rank, world.device, prediction["batch_size"])[name]
    batches = replace(batches, limit=None)
    model, models = build_trained(experiment, Path(prediction["weights"]), "predict", world.device)
    out = Path(prediction["out"]) if prediction["out"] is not None else None
    control.status.set_phase("evaluate")
    with Precision(experiment.trainer.precision, world.device, False).autocast(), torch.no_grad():
        own = list(_own(task, model, batches, out, control))
    if world.sum(torch.tensor(float(control.stop_requested), device=world.device)):
        raise Interrupted(0)  # there is nothing to save
    digest = weights_sha256(models)
    provenance = {**prediction["provenance"], "weights_sha256": digest, "split": name, "batch_size": batches.batch_size}
    arrays = {
        key: _gathered([batch[key] for batch in own], np.dtype(dtype), shape, batches, world, control)
        for key, (dtype, shape) in _agreed_row_types(own, world).items()
    }
    if world.is_rank_zero:
        predictions = Predictions(arrays, names, provenance.get("classes"), prediction["targets"])
        if out is not None:
            _write(out, predictions, provenance)
            shapes = ", ".join(f"{key} {' x '.join(map(str, array.shape))}" for key, array in arrays.items())
            log.info(f"{batches.num_samples:,} predictions for `{name}` in {files.relative(out)}: {shapes}")
        elif prediction["answer"] is not None:
            records = [plain(record) for record in predictions.masked().records()]
            facts = {"weights": prediction["weights"], "weights_sha256": digest, "predictions": records}
            files.answer(Path(prediction["answer"]), facts)
    world.barrier()


_GENERATE = "ddpexp generate RUN_DIR --prompt TEXT prints what a language model writes. "


def task_of(experiment: Experiment) -> HasPredict:
    """Return the task, once it can predict. Raises: RefusedError."""
    task = instantiate(experiment.task, experiment.trust, "task")
    if not isinstance(task, HasPredict):
        raise RefusedError(
            "has no method predict, which returns the predictions for a batch",
            key="task",
            value=experiment.task.target,
            suggestion=f"{_GENERATE if experiment.data.target == 'text' else ''}Add one, for example:\n{_EXAMPLE}",
        )
    return task


def _set_of(
    prediction: Mapping[str, Any], experiment: Experiment, task: HasPredict, world: World
) -> tuple[str, Splits, SampleNames | None]:
    """Return the name of the set to predict for, splits with it alone, and the names of its samples. Ranks: all."""
    if prediction["given"] is not None:
        given = Path(prediction["given"])
        inputs = read_inputs(experiment, task, prediction["trained_on"], given, prediction["split"])
        return INPUT_SET, Splits(inputs.samples, {INPUT_SET: inputs.samples}), inputs.names
    if (prediction["data"] or {}).get("is_single_set"):
        experiment = _undivided(experiment)
    name, splits = chosen_set(open_data(experiment, prediction["data"], world), prediction["split"])
    return name, splits, names_in(splits.evals[name])


def _undivided(experiment: Experiment) -> Experiment:
    """Return an experiment without held-out samples, folds and sample weights."""
    keys: dict[str, Any] = {"validation_fraction": 0.0, "fold": None, "folds": None, "weights": None}
    keys["lengths"] = None
    return replace(experiment, data=replace(experiment.data, **keys, samples_per_epoch=None))


def chosen_set(splits: Splits, split: str | None) -> tuple[str, Splits]:
    """Return the name of the set to predict for, and splits whose only evaluation set it is.

    Raises:
        RefusedError: there is no such set, or it has no length.
    """
    names = [*splits.evals, TRAIN]
    if split is None:
        default = next((name for name in splits.evals if name != TEST_SET), None)
        if default is None:
            raise RefusedError(
                "the data has no evaluation set", suggestion=f"Type --split with one of {', '.join(names)}."
            )
        split = default
    if split not in names:
        raise RefusedError(
            f"is not a set of the data, which has {', '.join(names)}",
            place=f"--split {split}",
            suggestion=no_test(split),
        )
    data = splits.evals.get(split, splits.train)
    if isinstance(data, Stream):
        reason = "The data is a stream without a length, which has no order to predict in"
        raise RefusedError(reason, place=f"--split {split}")
    return split, replace(splits, evals={split: data})


def _own(task: HasPredict, model: Any, batches: EvalBatches, out: Path | None, control: Control) -> Iterator[Arrays]:
    """Yield the predictions for this rank's batches, until a stop is requested."""
    begin = batches.rank * batches.batch_size
    first: dict[str, Any] | None = None
    for batch in batches:
        control.status.heartbeat()
        if control.stop_requested:
            return
        count = min(batches.batch_size, batches.num_samples - begin)
        arrays = as_arrays(task.predict(model, batch), count, f"samples {begin} to {begin + count - 1}")
        row_types = _row_types(arrays)
        if first is None:
            if out is not None:
                check_holds(out, {name: shape for name, (_, shape) in row_types.items()})
            first = row_types
        if row_types != first:
            raise DdpexpError(
                f"predict returned {_described(row_types)} for the samples {begin} to {begin + count - 1}, but "
                f"{_described(first)} for the samples before",
                suggestion="Return rows of one shape and type for every batch.",
            )
        yield arrays
        begin += batches.batch_size * batches.world_size


def as_arrays(predicted: Any, count: int, where: str) -> Arrays:
    """Return what a task has predicted for a batch as arrays with a row for each sample.

    Raises:
        DdpexpError: it is something else.
    """
    named = predicted if isinstance(predicted, Mapping) else {"prediction": predicted}
    if not named:
        raise DdpexpError(
            "predict returned an empty mapping", suggestion="Return a tensor, or a mapping of names to tensors."
        )
    arrays = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            value = value.detach()
            array = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).cpu().numpy()
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            array = value
        else:
            raise DdpexpError(
                f"predict returned {type(value).__name__}{f' as {name!r}' if isinstance(predicted, Mapping) else ''}",
                suggestion="Return a tensor or an array of numbers, or a mapping of names to them.",
            )
        if array.shape[:1] != (count,):
            rows = f"{array.shape[0]} rows" if array.ndim else "a single number"
            raise DdpexpError(
                f"predict returned {rows} as {str(name)!r} for the {where}, of which there are {count}",
                suggestion="Return one row for each sample, in the order of the batch.",
            )
        arrays[str(name)] = np.ascontiguousarray(array)
    return arrays


def _row_types(arrays: Arrays) -> dict[str, Any]:
    """Return the type and the shape of a row of each array, as JSON."""
    return {name: [array.dtype.str, list(array.shape[1:])] for name, array in arrays.items()}


def _described(row_types: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {np.dtype(dtype)} {' x '.join(map(str, shape)) or 'numbers'}"
        for name, (dtype, shape) in row_types.items()
    )


def _agreed_row_types(own: list[Arrays], world: World) -> dict[str, Any]:
    """Return the type and the shape of a row of each array, on which all ranks agree. Ranks: all; communicates."""
    found = [types for types in world.gather_values(_row_types(own[0]) if own else None) if types is not None]
    if not found:
        raise DdpexpError("the data set is empty: there is nothing to predict")
    other = next((types for types in found if types != found[0]), None)
    if other is not None:
        raise DdpexpError(
            f"predict returned {_described(other)} for some batches, and {_described(found[0])} for others",
            suggestion="Return rows of one shape and type for every batch.",
        )
    result: dict[str, Any] = found[0]
    return result


def _gathered(
    own: list[NDArray[Any]],
    dtype: np.dtype[Any],
    row: list[int],
    batches: EvalBatches,
    world: World,
    control: Control,
) -> NDArray[Any]:
    """Return the rows of all ranks in the order of the samples, on rank zero; the others get an empty array.

    Exchanged as bytes, of which all ranks but one have zeros: their sum is exact. Ranks: all; communicates.
    """
    size, num_samples = batches.batch_size, batches.num_samples
    rows = np.empty((num_samples if world.is_rank_zero else 0, *row), dtype)
    row_bytes = dtype.itemsize * int(np.prod(row, dtype=np.int64))
    per_block = max(1, _BLOCK_BYTES // max(1, size * row_bytes))
    for first in range(0, batches.num_batches, per_block):
        begin, end = first * size, min((first + per_block) * size, num_samples)
        block = np.zeros((end - begin, *row), dtype)
        for number in range(first, min(first + per_block, batches.num_batches)):
            if number % world.world_size == world.rank:
                place = number * size - begin
                array = own[number // world.world_size]
                block[place : place + len(array)] = array
        control.status.heartbeat()
        if world.world_size > 1 and block.size:
            summed = torch.from_numpy(block.reshape(-1).view(np.uint8)).to(world.device)
            block = world.sum(summed).cpu().numpy().view(dtype).reshape(block.shape)
        if world.is_rank_zero:
            rows[begin:end] = block
    return rows


def _write(out: Path, predictions: Predictions, provenance: Mapping[str, Any]) -> None:
    """Write the file, complete or not at all.

    Raises:
        DdpexpError: it cannot be written.
    """
    try:
        for path, content in contents(out, predictions, provenance).items():
            files.write_data(path, content)
    except OSError as error:
        raise DdpexpError(f"cannot be written: {reason_with_limit(error, out.parent)}", place=out) from None
