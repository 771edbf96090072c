"""The metrics of one evaluation set: means, and what a task's `finish` and torchmetrics make of the other sums."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from numbers import Real
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.mesh import DataRank
from ddpexp.task import EvalSums, HasFinish, MetricUpdate, NamedEvalSums, Sums, Task
from ddpexp.train.batch_states import BatchStates, States
from ddpexp.train.losses import PREFIX, are_named, pairs_of, weights_of
from ddpexp.train.metrics import MetricError, mean
from ddpexp.train.task_checks import is_number, named, shown
from ddpexp.train.task_step import function_of
from ddpexp.train.torchmetrics_states import MetricStates, values_of

Totals = Mapping[str, tuple[float, float]]


class SetMetrics:
    """What the batches of one evaluation set add to metrics that are no pairs of scalars."""

    def __init__(self, task: Task, world: World, data: DataRank, num_batches: int) -> None:
        """Start empty; `num_batches` are those of all ranks."""
        self._task, self._world = task, world
        self._num_batches = num_batches
        self._names: list[str] | None = None  # of the entries that are no pairs of scalars
        self._metrics: dict[str, MetricStates] = {}
        self._weights: dict[str, float] = {}  # of several losses, by the names of their records
        self.states = BatchStates(world, data, num_batches)

    def split(self, sums: EvalSums | NamedEvalSums, counts: bool = True) -> Sums:
        """Add the entries of a batch that are no pairs of scalars; return the sums without them.

        Several losses become pairs, and their sum is left to `values`.

        With `counts` false they are not added: only their names and shapes are learned.

        Raises:
            DdpexpError: the names or shapes are not those of the first batch, a metric cannot be merged, or it does not
                accept the batch.
        """
        loss = torch.zeros((), device=self._world.device)
        count: Any = 0
        metrics: Mapping[str, Any]
        if are_named(sums):
            losses, metrics = sums  # type: ignore[misc]
            self._note_weights(weights_of(losses))
            metrics = {**metrics, **pairs_of(losses)}
        else:
            loss, count, metrics = sums  # type: ignore[misc]
        scalars: dict[str, Any] = {name: entry for name, entry in metrics.items() if is_scalar_pair(entry)}
        others = {name: entry for name, entry in metrics.items() if name not in scalars}
        if others or self._names:
            with torch.autocast(self._world.device.type, enabled=False):
                self._add(others, counts)
        self._names = sorted(others)
        return loss, count, scalars

    def _note_weights(self, weights: Mapping[str, float]) -> None:
        if self._weights and weights != self._weights:
            raise DdpexpError(
                f"returned losses with the weights {_weights_text(weights)} after {_weights_text(self._weights)} in an "
                "evaluation, but the means of all batches have one weight",
                suggestion="Return the same losses with the same weights for every batch if not model.training.",
                place=named(function_of(self._task)),
            )
        self._weights = dict(weights)

    def _add(self, entries: Mapping[str, Any], counts: bool) -> None:
        states: dict[str, Any] = {}
        for name, entry in entries.items():
            if isinstance(entry, MetricUpdate):
                if name not in self._metrics:
                    self._metrics[name] = MetricStates(name, entry, self._world.device)
                states |= {f"{name}|{key}": state for key, state in self._metrics[name].of_batch(entry).items()}
            else:
                states |= _states_of(name, entry, self._world.device)
        if self._names not in (None, sorted(entries)) or not self.states.add(states, counts):
            raise DdpexpError(
                f"returned the metrics {', '.join(sorted(entries)) or 'none'} in another number, type or shape than "
                f"in the batch before ({', '.join(self._names or []) or 'none'}), but the metrics of all batches are "
                "added up",
                suggestion="Return the same every time.",
                place=named(function_of(self._task)),
            )

    def values(self, totals: Totals) -> dict[str, float]:
        """Return everything to be recorded of the set.

        Ranks: all, with the same result; communicates if there is more than pairs of scalars, or a `finish`.

        Raises:
            MetricError: on all ranks, for what `finish` or a metric does on rank zero.
        """
        means = {name: mean(*pair) for name, pair in totals.items()}
        if self._weights:
            # A loss without anything to count adds nothing, as in training.
            parts = [weight * means[name] for name, weight in self._weights.items() if totals[name][1]]
            means["loss"] = reduce(add, parts) if parts else math.nan
            totals = {**totals, "loss": (means["loss"], 1.0)}
        has_finish = isinstance(self._task, HasFinish)
        if not self._names and not has_finish:
            return means
        reduced = self.states.reduce() if self._names else {}
        return means | agreed(self._world, lambda: self._computed(means, totals, reduced))

    def _computed(self, means: Mapping[str, float], totals: Totals, reduced: Mapping[str, Any]) -> dict[str, float]:
        """Return what is recorded beside the means. Ranks: rank zero."""
        sums: dict[str, Any] = dict(totals)
        values: dict[str, float] = {}
        unrecorded = []
        for name in self._names or ():
            if name in self._metrics:
                prefix = f"{name}|"
                own = {key.removeprefix(prefix): state for key, state in reduced.items() if key.startswith(prefix)}
                sums[name] = self._metrics[name].compute(own, self._num_batches)
                numbers = values_of(name, sums[name])
                _check_new(numbers, means.keys() | values.keys(), f"the metric {name!r}")
                values |= numbers
                unrecorded += [] if numbers else [name]
            else:
                sums[name] = reduced[name] if name in reduced else (reduced[f"{name}|sum"], reduced[f"{name}|count"])
                unrecorded.append(name)
        if isinstance(self._task, HasFinish):
            numbers = finished(self._task, sums)
            _check_new(numbers, (means.keys() | values.keys()) - {"loss"}, named(self._task.finish))
            return values | numbers
        if unrecorded:
            raise MetricError(
                f"returns {', '.join(unrecorded)}, which no logger can record",
                suggestion="Give the task a method finish(self, sums) that returns {name: number}: see "
                "ddpexp.task.HasFinish.",
                place=named(function_of(self._task)),
            )
        return values


def _weights_text(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name.removeprefix(PREFIX)} {weight:g}" for name, weight in weights.items())


def is_scalar_pair(entry: Any) -> bool:
    """Return whether an entry is a sum and a count of which the mean is recorded."""
    return isinstance(entry, tuple | list) and len(entry) == 2 and all(map(is_number, entry))


def _states_of(name: str, entry: Any, device: torch.device) -> States:
    """Return what an entry adds, such as an array of integers or a pair of arrays."""
    if not isinstance(entry, tuple | list):
        return {name: ("sum", torch.as_tensor(entry, device=device))}
    total, count = (torch.as_tensor(part, device=device).detach().double() for part in entry)
    return {f"{name}|sum": ("sum", total), f"{name}|count": ("sum", count)}


def finished(task: HasFinish, sums: Mapping[str, Any]) -> dict[str, float]:
    """Return what a task's `finish` makes of the sums.

    Raises:
        MetricError: it fails, or returns something else than numbers by their names.
    """
    source = named(task.finish)
    try:
        returned: Any = task.finish(sums)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise MetricError(f"raised {problem}; sums holds {', '.join(sums)}", place=source) from error
    if not isinstance(returned, Mapping):
        raise MetricError(f"returned {shown(returned)}, where {{name: number}} belongs, {{}} for none", place=source)
    values = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not name:
            raise MetricError(f"returned a metric named {name!r}: a name must be a text", place=source)
        if not isinstance(value, Real) and _num_elements(value) != 1:
            raise MetricError(f"returned {shown(value)} as {name!r}, where one number belongs", place=source)
        values[name] = float(value)
    return values


def _check_new(numbers: Mapping[str, float], others: Collection[str], source: str) -> None:
    twice = sorted(numbers.keys() & set(others))
    if twice:
        raise MetricError(
            f"gives {', '.join(twice)}, which is recorded already", suggestion="Give it another name.", place=source
        )


def agreed(world: World, compute: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Return on all ranks what `compute` returns on rank zero, for ranks may compute the last bits differently.

    Ranks: all; communicates.

    Raises:
        MetricError: on all ranks, if `compute` has raised one.
    """
    error: MetricError | None = None
    text = b""
    if world.is_rank_zero:
        try:
            with torch.autocast("cpu", enabled=False), torch.autocast(world.device.type, enabled=False):
                text = json.dumps(dict(compute())).encode()
        except MetricError as problem:
            error = problem
            text = json.dumps(str(problem)).encode()
    length = world.broadcast(torch.tensor([len(text)], device=world.device))
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if world.is_rank_zero:
        buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    result = json.loads(bytes(world.broadcast(buffer.to(world.device)).cpu().tolist()))
    if error is not None:
        raise error
    if isinstance(result, str):
        raise MetricError(result)
    return {str(name): float(value) for name, value in result.items()}


def _num_elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return value.size if isinstance(value, np.ndarray) else 0
