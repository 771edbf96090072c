"""Tries micro-batches one after the other, each in a short real run with workers of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from ddpexp.check.job import temporary_folder
from ddpexp.check.short_run import short_tree
from ddpexp.config.schema import Experiment
from ddpexp.errors import DdpexpError, RefusedError, WorkerError
from ddpexp.find.micro_batch import Tried, divisors, next_size, predicted_bytes
from ddpexp.find.trial import KEPT, Observed, Trial, is_out_of_memory, workers_here
from ddpexp.launch import Layout
from ddpexp.launch.workers.client import Server
from ddpexp.plan.calibrate import step_ms
from ddpexp.system.hardware import count_gpus
from ddpexp.system.text import one_line

_FEWEST_STEPS, _MOST_STEPS = 3, 600  # the optimizer has its state from the second step on
_SECONDS = 2.0  # of training in which a speed is measured
_WINDOWS = 12  # records of a trial


@dataclass(frozen=True)
class Search:
    """A search for the micro-batches of an experiment that fit."""

    experiment: Experiment
    text: str  # its configuration, as YAML
    layout: Layout  # of a run
    server: Server
    report: Callable[[str], None]  # prints progress
    measures_speed: bool = True
    margin: float = 1.0  # the part of the memory that a trial may fill
    observed: list[Observed] = field(default_factory=list)  # of the trials that have come to their end

    @property
    def workers(self) -> int:
        """Return the number of workers of a trial: those of one machine, as far as this command sees their GPUs."""
        local = self.layout.world_size // self.layout.nodes
        return local if self.layout.device == "cpu" else min(local, count_gpus())

    @property
    def samples_of_rank(self) -> int:
        """Return how many samples of a global batch a rank of the run computes."""
        return self.experiment.trainer.global_batch_size // self._data_size(self.layout.world_size)

    def _data_size(self, world_size: int) -> int:
        return self.experiment.strategy.data_rank(0, world_size).size

    def run(self) -> list[Tried]:
        """Try sizes until it is known which ones fit; return all of them, in ascending order.

        Raises:
            RefusedError, WorkerError: the experiment cannot be trained at all, for another reason than its memory.
        """
        sizes = divisors(self.samples_of_rank)
        tried: list[Tried] = []
        ms: float | None = None  # of a step
        with temporary_folder() as folder:
            while (size := next_size(sizes, tried)) is not None:
                one, ms_of_size = self._try(size, ms, tried, folder)
                if ms is None and ms_of_size is not None and self._num_steps(ms_of_size) > 2 * _FEWEST_STEPS:
                    one, ms_of_size = self._try(size, ms_of_size, tried, folder)  # its speed is known by few steps
                ms = ms_of_size or ms
                tried.append(one)
        return sorted(tried, key=lambda one: one.micro_batch_size)

    def _try(self, size: int, ms: float | None, tried: list[Tried], folder: Path) -> tuple[Tried, float | None]:
        """Return what a micro-batch shows, and the time of a step; `ms` is that of smaller ones."""
        result = Tried(size, self.samples_of_rank // size, "fits")
        expected = predicted_bytes(tried, size)
        if expected is not None and self._is_too_large(expected, self.observed[-1]):
            return replace(result, outcome="too large", peak_bytes=expected), None
        passes = result.gradient_accumulation_steps
        self.report(f"trying trainer.micro_batch_size={size} ({passes} pass{'es' if passes > 1 else ''} a step)")
        steps = self._num_steps(ms)
        place = folder / "trial"
        try:
            seen = Trial(self._text(size, steps, place), place).observe(self.server)
        except (RefusedError, WorkerError) as error:
            if isinstance(error, WorkerError) and is_out_of_memory(error):
                return replace(result, outcome="out of memory"), None
            if not any(one.fits for one in tried) and size > 1:
                raise
            return replace(result, outcome="fails", why=failure_text(error)), None
        finally:
            shutil.rmtree(place, ignore_errors=True)
        self.observed.append(seen)
        result = replace(result, peak_bytes=seen.peak_bytes)
        if self._is_too_large(seen.peak_bytes, seen):
            return replace(result, outcome="too large"), None
        samples = self.samples_of_rank * self._data_size(self.workers)
        taken = step_ms(seen.records, samples)
        return replace(result, samples_per_second=1e3 * samples / taken), taken

    def _num_steps(self, ms: float | None) -> int:
        """Return how many steps a trial takes, where a step takes about as long as that of another size."""
        if ms is None or not self.measures_speed:
            return _FEWEST_STEPS
        return max(_FEWEST_STEPS, min(_MOST_STEPS, int(_SECONDS * 1e3 / ms)))

    def _is_too_large(self, num_bytes: int, seen: Observed) -> bool:
        """Return whether that is more than a worker may take; a GPU tells by itself, and survives it."""
        return not seen.is_on_gpu and num_bytes > self.margin * seen.limit_bytes

    def _text(self, size: int, steps: int, place: Path) -> str:
        """Return the configuration of a trial, as YAML: a rank has as many passes of the micro-batch as in the run."""
        tree = short_tree(self.text, self.experiment, str(place), unchanged=KEPT)
        trainer = self.experiment.trainer
        tree["trainer"] |= {
            **workers_here(self.layout, self.workers),
            "max_steps": steps,
            "global_batch_size": self.samples_of_rank * self._data_size(self.workers),
            "micro_batch_size": size,
            "log_every": max(1, steps // _WINDOWS),
            "eval_every": steps if trainer.eval_every or trainer.eval_at_start else 0,
            "limit_eval_batches": 1,
            "checkpoint_every": 0,
            "swa_every": "epoch" if trainer.swa_start is None else 1,
        }
        return yaml.safe_dump(tree, sort_keys=False)


def failure_text(error: DdpexpError) -> str:
    """Return in one line why a trial has failed."""
    if isinstance(error, WorkerError):
        return one_line(f"{error.failure.kind}: {error.failure.message}")
    return one_line(str(error))
