"""Metrics of training and evaluation summed over micro-batches and ranks, and the clock for throughput."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ddpexp.distributed.transfers import is_host
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.mesh import DataRank
from ddpexp.task import Sums
from ddpexp.train.task_checks import named


class NonFiniteError(DdpexpError):
    """A loss became infinite or not a number."""


class MetricError(DdpexpError):
    """A metric of an evaluation cannot be computed; raised on all ranks."""


def nonfinite_error(name: str, value: float, step: int) -> NonFiniteError:
    """Return the error for a metric that is not finite. Units: steps, from 1."""
    return NonFiniteError(
        f"{name} is {value} at step {step}: the training has diverged or a sample is bad",
        suggestion="callbacks=find_nonfinite names the module that it comes from. Lower optimizer.lr, set "
        "trainer.clip_grad_norm, or skip such steps with trainer.nonfinite=skip.",
    )


def detached(sums: Sums) -> Sums:
    """Return the sums without the graphs that computed them."""
    loss, count, metrics = sums
    return loss.detach(), count, {name: (_without_graph(total), n) for name, (total, n) in metrics.items()}


def copied(sums: Sums) -> Sums:
    """Return copies of the sums without the graphs that computed them."""
    loss, count, metrics = sums
    copies = {name: (_copy(total), _copy(n)) for name, (total, n) in metrics.items()}
    return _copy(loss), _copy(count), copies


class MetricAccumulator:
    """Sums of the loss and the metrics over several steps, reduced over all ranks when they are read.

    `add` keeps what the task returned without waiting for the device; reading the sums copies all of them to the host
    at once. In the reduction every micro-batch of the global batch has a slot of its own, which is zero on all other
    ranks. The sums over micro-batches therefore have the same order, and the same bits, at every number of workers.
    """

    def __init__(
        self,
        world: World,
        data: DataRank,
        slots: Sequence[int],
        num_slots: int,
        source: Callable[..., Any] | None = None,
        copies: bool = False,
        equal_counts: Collection[str] | None = None,
    ) -> None:
        """Start empty; this rank fills `slots` of the `num_slots` slots of a step, in the order of its micro-batches.

        `source` is the function of the task that returns the sums, for errors. `copies`: the next step may overwrite
        what it has returned. With `equal_counts` the loss's counts that are numbers must be the same in all slots of a
        step, and those of the metrics that it names, which may be added later.
        """
        self._world, self._data = world, data
        self._keep = copied if copies else detached
        if is_host(world.device):
            self._keep = _to_numbers
        self._slots = slots
        self._num_slots = num_slots
        self._source = source
        self._equal_counts = equal_counts if world.world_size > 1 else None
        self._has_number: list[bool] = []  # for each of the steps: whether its counts are numbers
        self._steps: list[Sequence[Sums]] = []  # not reduced yet: for each step the sums of its micro-batches
        self._names: list[str] | None = None  # of the metrics, sorted; None before the first sums
        self._restored_names: list[str] = []  # of the metrics in restored rows
        self.flagged = False  # whether any rank passed a flag to the last `reduce`
        self.of_ranks: list[list[float]] = []  # the numbers that each rank passed to the last `reduce`
        self._rows: list[list[float]] = []  # reduced: for each step loss, count, then sum and count of each metric

    def __len__(self) -> int:
        """Return the number of steps since the last record."""
        return len(self._rows) + len(self._steps)

    def add(self, sums: Sequence[Sums]) -> None:
        """Add a step. Shapes: one entry for each micro-batch of this rank, its tensors scalars; graphs are dropped."""
        self._steps.append(list(map(self._keep, sums)))
        if self._equal_counts is not None:
            self._has_number.append(not isinstance(sums[-1][1], Tensor))

    def totals(self, stopped: bool = False, digest: int = 0) -> dict[str, tuple[float, float]] | None:
        """Return sum and count over everything added by name, or None if any rank passes `stopped`.

        Ranks: all, with the same `digest`; communicates.

        Raises:
            DdpexpError: the ranks' digests differ.
        """
        return None if self._reduce(stopped, digest) else self._totals(range(len(self._rows)))

    def state(self) -> list[dict[str, Any]]:
        """Return the reduced sums since the last record as plain values for a checkpoint, and keep them.

        Shapes: at most one entry; its rows have 2 + 2 * num_metrics numbers.
        Ranks: all; communicates.
        """
        self._reduce()
        return [{"names": self._metric_names(), "rows": self._rows.copy()}] if self._rows else []

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore what `state` returned."""
        for entry in saved:
            self._restored_names, self._rows = list(entry["names"]), [list(row) for row in entry["rows"]]

    def reduce(
        self, first_step: int, stop: bool, flag: bool = False, own: Callable[[], Sequence[float]] | None = None
    ) -> dict[str, float]:
        """Return the means since the last call, and start again from zero.

        Steps with a non-finite loss are left out of the means and counted as `skipped_steps`. The `flag` of this rank
        travels with the sums: see `flagged`. So do the numbers that `own` returns, equally many on every rank: see
        `of_ranks`, which is empty where nothing had to be reduced.

        Ranks: all; communicates.

        Raises:
            NonFiniteError: `stop` is set and a loss is not finite; names the first such step.
        """
        self.of_ranks = []
        self.flagged = self._reduce(flag, own=own)
        bad = self._nonfinite_rows()
        if stop and bad:
            raise self._nonfinite(bad[0], first_step)
        means = self._means([row for row in range(len(self._rows)) if row not in bad])
        self._rows = []
        return {**means, **({"skipped_steps": float(len(bad))} if bad else {})}

    def check_finite(self, first_step: int) -> None:
        """Check the losses since the last record. Ranks: all; communicates.

        Raises:
            NonFiniteError: a loss is not finite; names the first such step.
        """
        self._reduce()
        for row in self._nonfinite_rows():
            raise self._nonfinite(row, first_step)

    def _nonfinite(self, row: int, first_step: int) -> NonFiniteError:
        return nonfinite_error("train/loss", self._rows[row][0], first_step + row)

    def _nonfinite_rows(self) -> list[int]:
        return [number for number, row in enumerate(self._rows) if not math.isfinite(row[0])]

    def _means(self, rows: Sequence[int]) -> dict[str, float]:
        return {name: mean(*pair) for name, pair in self._totals(rows).items()}

    def _totals(self, rows: Sequence[int]) -> dict[str, tuple[float, float]]:
        names = ["loss", *self._metric_names()]
        columns = zip(*(self._rows[row] for row in rows), strict=True)
        totals = [sum(column) for column in columns] or [0.0] * (2 * len(names))
        return dict(zip(names, zip(totals[::2], totals[1::2], strict=True), strict=True))

    def _reduce(self, flag: bool = False, digest: int = 0, own: Callable[[], Sequence[float]] | None = None) -> bool:
        """Reduce the steps added since the last call into `_rows`; return whether any rank passed `flag`.

        Ranks: all; communicates.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return flag
        names = self._agreed_names([sums for step in steps for sums in step])
        rows: list[list[list[Any]]] = [
            [[loss, count, *(value for name in names for value in metrics[name])] for loss, count, metrics in step]
            for step in steps
        ]
        if self._keep is not _to_numbers:
            rows = _on_host(rows, self._world.device)
        if own is not None:
            self.of_ranks = [list(own())]  # now that the device has done what came before
        if self._world.world_size > 1:
            table, flag = self._over_ranks(torch.tensor(rows, dtype=torch.float64), flag, digest)
            if self._equal_counts is not None:
                self._check_counts(table[self._has_number][:, :, 1])
                for name in self._equal_counts:
                    self._check_counts(table[:, :, 3 + 2 * names.index(name)])
            rows = table.tolist()
        self._has_number.clear()
        self._rows += map(_sum_slots, rows)
        return flag

    def _over_ranks(self, table: Tensor, flag: bool, digest: int) -> tuple[Tensor, bool]:
        """Return the sums in all slots, and whether any rank passed `flag`.

        Shapes: `table` is (num_steps, micro-batches of this rank, columns) fp64; returns (num_steps, num_slots,
        columns) fp64 on the host.
        Ranks: all; communicates once.
        """
        num_steps, num_micro_batches, num_columns = table.shape
        size = self._world.world_size
        own = self.of_ranks[0] if self.of_ranks else []
        packed = torch.zeros(num_steps * self._num_slots * num_columns + size * len(own) + 2, dtype=torch.float64)
        end = num_steps * self._num_slots * num_columns
        slots = self._slots[:num_micro_batches]
        if self._data.reports:
            rows = packed[:end].view(num_steps, self._num_slots, num_columns)
            rows[:, slots[0] : slots[-1] + 1 : _stride(slots)] = table
        if own:
            packed[end:-2].view(size, -1)[self._world.rank] = torch.tensor(own, dtype=torch.float64)
        packed[-2:] = torch.tensor([digest, flag], dtype=torch.float64)
        summed = self._world.sum(packed.to(self._world.device)).cpu()
        if summed[-2] != digest * size:
            raise DdpexpError(
                f"returned other metrics on rank {self._world.rank} than on another rank, or in other types "
                "or shapes, but the metrics of all ranks are added up",
                suggestion="Return the same on every rank.",
                place=self._named_source(),
            )
        if own:
            self.of_ranks = summed[end:-2].view(size, -1).tolist()
        return summed[:end].view(num_steps, self._num_slots, num_columns), bool(summed[-1])

    def _check_counts(self, counts: Tensor) -> None:
        """Check that counts agree in each step. Shapes: (num_steps, num_slots), of all ranks.

        Each rank has divided its gradient by its own.
        """
        for row in counts.tolist():
            other = next((count for count in row if count != row[0]), None)
            if other is not None:
                raise DdpexpError(
                    f"returned the counts {row[0]:.15g} and {other:.15g} for micro-batches of one step on "
                    "different ranks: a number must be the same for every micro-batch of a step, and each "
                    "rank has divided by its own",
                    suggestion="Return a tensor if the count depends on the data.",
                    place=self._named_source(),
                )

    def _metric_names(self) -> list[str]:
        return self._restored_names if self._names is None else self._names

    def _agreed_names(self, sums: Sequence[Sums]) -> list[str]:
        """Return the names of the metrics, which are those of the first sums.

        Raises:
            DdpexpError: later ones differ.
        """
        if self._names is None:
            self._names = sorted(sums[0][2])
            self._rows = self._with_columns_of(self._names)
        expected = set(self._names)
        for _, _, metrics in sums:
            if metrics.keys() != expected:
                now, before = (", ".join(names) or "none" for names in (sorted(metrics), self._names))
                raise DdpexpError(
                    f"returned the metrics {now} after {before}, but the metrics of several steps are added up by name",
                    suggestion="Return the same names every time, with a count of 0 where there is nothing.",
                    place=self._named_source(),
                )
        return self._names

    def _named_source(self) -> str:
        return "the task" if self._source is None else named(self._source)

    def _with_columns_of(self, names: Sequence[str]) -> list[list[float]]:
        """Return the restored rows with the columns of `names`: the recipe may have changed since they were saved."""
        columns = {name: 2 * number for number, name in enumerate(self._restored_names, start=1)}
        sources = [columns.get(name) for name in names]
        return [
            row[:2] + [value for at in sources for value in ((0.0, 0.0) if at is None else row[at : at + 2])]
            for row in self._rows
        ]


class Clock:
    """Training time: evaluations and saving are excluded with `paused`. Units: seconds."""

    def __init__(self) -> None:
        """Start without earlier starts of the run."""
        self._before = {"train_seconds": 0.0, "elapsed_seconds": 0.0, "since_record": 0.0}
        self.start()

    def start(self) -> None:
        """Start from the times of earlier starts, and begin a lap that has lasted since the last record."""
        self._start = self._saved = time.perf_counter()
        self._began = self._start - self._before["elapsed_seconds"]
        self._lap = self._start - self._before["since_record"]
        self._away = -self._before["train_seconds"]

    def state(self) -> dict[str, float]:
        """Return the times of all starts, and the time since the last record."""
        since_record = time.perf_counter() - self._lap
        return {"train_seconds": self.total(), "elapsed_seconds": self.elapsed(), "since_record": since_record}

    def restore(self, saved: Mapping[str, float]) -> None:
        """Take the times of earlier starts, from which `start` starts."""
        self._before = {name: float(saved[name]) for name in self._before}

    def lap(self) -> float:
        """Return the time since the last call, and start the next lap."""
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds

    def total(self) -> float:
        """Return the training time of the run, earlier starts included."""
        return time.perf_counter() - self._start - self._away

    def elapsed(self) -> float:
        """Return the time of the run with evaluations and saving, earlier starts included."""
        return time.perf_counter() - self._began

    @property
    def elapsed_before(self) -> float:
        """Return the time of the earlier starts alone, with evaluations and saving."""
        return self._before["elapsed_seconds"]

    def saved(self) -> None:
        """Note that a checkpoint was saved now."""
        self._saved = time.perf_counter()

    def since_save(self) -> float:
        """Return the time since the last checkpoint, or since the start."""
        return time.perf_counter() - self._saved

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the enclosed code from the training time."""
        begin = time.perf_counter()
        yield
        away = time.perf_counter() - begin
        self._away += away
        self._lap += away

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the enclosed code from all times."""
        begin = time.perf_counter()
        with self.paused():
            yield
        self._began += time.perf_counter() - begin


def _stride(slots: Sequence[int]) -> int:
    return slots[1] - slots[0] if len(slots) > 1 else 1


def _without_graph(value: float | Tensor) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _copy(value: float | Tensor) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _to_numbers(sums: Sums) -> Any:
    """Return the sums as Python numbers: on the host this is faster than detaching and stacking tensors."""
    loss, count, metrics = sums
    return (
        loss.item() if isinstance(loss, Tensor) else loss,
        count.item() if isinstance(count, Tensor) else count,
        {name: (_number(total), _number(n)) for name, (total, n) in metrics.items()} if metrics else metrics,
    )


def _number(value: float | Tensor) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def mean(total: float, count: float) -> float:
    """Divide; the mean over nothing is NaN."""
    return total / count if count else math.nan


def _on_host(steps: list[list[list[Any]]], device: torch.device) -> list[list[list[float]]]:
    """Return sums as numbers, with one copy from the device.

    Shapes: steps, micro-batches of this rank, loss, count, then sum and count of each metric.
    """
    columns = zip(*(row for step in steps for row in step), strict=True)
    table = torch.stack([_stack(column, device) for column in columns], dim=1)
    found: list[list[list[float]]] = table.view(len(steps), -1, table.shape[1]).tolist()
    return found


def _sum_slots(slots: Sequence[Sequence[float]]) -> list[float]:
    """Add up the slots of a step in order. Not with `sum`, which Python 3.12 and later round differently.

    Shapes: (num_slots, columns) to (columns,).
    """
    if len(slots) == 1:
        return list(slots[0])
    return [reduce(add, column) for column in zip(*slots, strict=True)]


def _stack(values: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """Return scalars as one fp64 tensor. Shapes: (len(values),)."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        return torch.stack(tensors).to(device, torch.float64)  # one conversion for all
    if tensors:
        return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    return torch.tensor(values, dtype=torch.float64, device=device)
