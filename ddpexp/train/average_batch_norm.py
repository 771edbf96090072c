"""Statistics of BatchNorm for averaged weights, whose activations are not those of any step of the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import getstate, setstate

import numpy as np
import torch
from torch import Tensor

from ddpexp.train.average import WeightAverage
from ddpexp.train.run import TrainingRun


@dataclass(frozen=True)
class BatchNormEstimate:
    """Estimates the statistics over the first global batches of the first epoch.

    Only the BatchNorm layers are in training mode, so that nothing is drawn at random. Each takes the mean over the
    micro-batches of their mean and variance, added up in one order: for the same size of the micro-batches the result
    is the same at every number of workers. Source: torch.optim.swa_utils.update_bn, which gives the same for a model
    without dropout.
    """

    run: TrainingRun
    num_batches: int

    def refresh(self, average: WeightAverage) -> None:
        """Estimate the statistics for the average, if it has changed. Ranks: all; communicates once for each batch."""
        if not (average.is_stale and average.has_begun and average.layers):
            return
        with _host_random_restored(), torch.no_grad(), average.in_place_of_weights(), self._only_layers_train(average):
            mean = self._mean_over_batches(average)
        for layer, kept in zip(average.layers, average.statistics, strict=True):
            for target, value in zip(layer.buffers(), kept, strict=True):
                if target is layer.num_batches_tracked:
                    value.fill_(self.num_batches * self._num_slots)
                else:
                    part, mean = mean[: value.numel()], mean[value.numel() :]
                    value.copy_(part.view_as(value))
        average.is_stale = False

    @property
    def _num_slots(self) -> int:
        return self.run.train.plan.gradient_accumulation_steps * self.run.strategy.data.size

    def _mean_over_batches(self, average: WeightAverage) -> Tensor:
        """Return the statistics of all layers, one after the other, as fp64."""
        data, num_micro_batches = self.run.strategy.data, self.run.train.plan.gradient_accumulation_steps
        total: Tensor | None = None
        for micro_batches in self.run.train.steps(0, self.num_batches):
            found = []
            for batch in micro_batches:
                self.run.control.status.heartbeat()
                with self.run.precision.autocast():
                    self.run.task_step(self.run.strategy.eval_model, batch)
                found.append(_statistics(average))
            table = found[0].new_zeros(self._num_slots, len(found[0]))
            if data.reports:
                first = data.rank * num_micro_batches
                table[first : first + num_micro_batches] = torch.stack(found)
            for row in self.run.world.sum(table):
                total = row.clone() if total is None else total.add_(row)
        assert total is not None
        return total / (self.num_batches * self._num_slots)

    @contextmanager
    def _only_layers_train(self, average: WeightAverage) -> Iterator[None]:
        """Have the layers take over the statistics of each batch, and everything else evaluate."""
        momentums = [layer.momentum for layer in average.layers]
        self.run.strategy.train(False)
        try:
            for layer in average.layers:
                layer.momentum = 1.0
                layer.train(True)
            yield
        finally:
            for layer, momentum in zip(average.layers, momentums, strict=True):
                layer.momentum = momentum
            self.run.strategy.train(True)


def _statistics(average: WeightAverage) -> Tensor:
    return torch.cat(
        [
            buffer.detach().reshape(-1).double()
            for layer in average.layers
            for buffer in layer.buffers()
            if buffer is not layer.num_batches_tracked
        ]
    )


@contextmanager
def _host_random_restored() -> Iterator[None]:
    """Leave the generators of numpy and Python as they were: a data set may draw from them."""
    of_numpy, of_python = np.random.get_state(legacy=True), getstate()
    try:
        yield
    finally:
        np.random.set_state(of_numpy)
        setstate(of_python)
