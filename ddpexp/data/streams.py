"""Training data without a length: streams, read in shards that each keep a position of their own.

The number of shards is that of the micro-batches in a global batch, so it does not depend on the number of workers:
micro-batch j of every step comes from shard j, whichever rank reads it. A checkpoint holds the position of each shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch.utils.data import default_collate

from ddpexp.compat.datasets import shuffles_in_buffer
from ddpexp.data.batch_plan import BatchPlan
from ddpexp.data.batches import TrainBatches
from ddpexp.data.samples import first_mismatch, form, user_code_error
from ddpexp.distributed.rng import DATA, HOST, seed_everything, seed_of
from ddpexp.distributed.transfers import to_device
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.system.text import counted


@runtime_checkable
class Restorable(Protocol):
    """What an iterable needs for its position to be saved and restored: the methods of torchdata's convention."""

    def state_dict(self) -> Any:
        """Return the position of the last iterator: plain values and tensors."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Make the next iterator start at this position."""
        ...


@runtime_checkable
class _HasEpochs(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


@dataclass(frozen=True)
class Stream:
    """Iterable data without a known length, for `Splits`.

    `open(index, count)` returns a new iterable over the samples of one of `count` disjoint shards. Its position is
    saved and restored if it has `state_dict` and `load_state_dict`. With `replay` a position is restored by reading
    the samples so far again, which is exact for every iterable that yields the same samples each time.

    A shard that ends ends the run, or starts over with `repeat`, after `set_epoch(epoch)` if it has that method. As an
    evaluation set a stream is its first `num_samples` samples, which every rank reads once and keeps in memory.
    """

    open: Callable[[int, int], Iterable[Any]]
    repeat: bool = False
    replay: bool = False
    num_samples: int | None = None


def as_stream(data: Any) -> Any:
    """Return a streaming data set of Hugging Face as a `Stream`, and everything else as it is.

    Its `state_dict` leaves out the samples in a buffer for shuffling, so that one with a buffer is replayed.
    """
    names = {kind.__name__ for kind in type(data).__mro__ if kind.__module__.partition(".")[0] == "datasets"}
    if "IterableDataset" not in names:
        return data
    return Stream(partial(_part_of_hub_data, data), replay=shuffles_in_buffer(data))


def _part_of_hub_data(data: Any, index: int, count: int) -> Iterable[Any]:
    part: Iterable[Any] = import_module("datasets.distributed").split_dataset_by_node(data, index, count)
    return part


def first_samples(stream: Stream, count: int) -> list[Any]:
    """Return the first samples of the whole stream, fewer if it ends before."""
    try:
        return list(islice(stream.open(0, 1), count))
    except Exception as error:
        raise user_code_error(error, f"one of the first {count:,} samples of a stream") from None


class _Shard:
    """One shard of a stream, and its position."""

    def __init__(self, stream: Stream, index: int, count: int, seed: int) -> None:
        self.stream = stream
        self.index = index
        self.count = count
        self.seed = seed
        self.samples, self.epoch = 0, 0  # samples read in this epoch
        self.source: Any = stream.open(index, count)
        self._iterator: Iterator[Any] | None = None
        self._restored: Any = None  # the state that the next iterator starts from

    def take(self, count: int, seed: int) -> list[Any]:
        """Return the next samples, which may draw random numbers from this seed; fewer if the shard ends."""
        samples: list[Any] = []
        try:
            self.begin()
        except Exception as error:
            raise user_code_error(error, self.description(self.samples, 1)) from None
        seed_everything(seed)
        while len(samples) < count:
            try:
                samples.append(next(self.begin()))
            except StopIteration:
                if not self.stream.repeat or not self.samples:
                    return samples
                self.samples, self.epoch = 0, self.epoch + 1
                self.source, self._iterator = self.stream.open(self.index, self.count), None
                continue
            except Exception as error:
                raise user_code_error(error, self.description(self.samples, 1)) from None
            self.samples += 1
        return samples

    def state(self) -> dict[str, Any]:
        """Return the position."""
        source = self._restored
        if self._iterator is not None and not self.stream.replay:
            source = self.source.state_dict()
        return {"samples": self.samples, "epoch": self.epoch, "source": source}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that `state` returned."""
        self.samples = int(state["samples"])
        self.epoch = int(state["epoch"])
        self._restored = state["source"]

    def description(self, first: int, count: int) -> str:
        """Describe samples of this epoch in a message."""
        samples = f"sample {first:,}" if count == 1 else f"samples {first:,} to {first + count - 1:,}"
        epoch = f" in its epoch {self.epoch}" if self.epoch else ""
        return f"{samples} of shard {self.index} of {self.count} of the stream `train`{epoch}"

    def begin(self) -> Iterator[Any]:
        """Return the iterator; one that is new is made with random numbers of this epoch."""
        if self._iterator is None:
            seed_everything(seed_of(self.seed, HOST, self.epoch + 1, self.index))
            self._iterator = self._start()
        return self._iterator

    def _start(self) -> Iterator[Any]:
        if self.stream.repeat and isinstance(self.source, _HasEpochs):
            self.source.set_epoch(self.epoch)
        if self._restored is not None:
            self.source.load_state_dict(self._restored)
            self._restored = None
        iterator: Iterator[Any] = iter(self.source)
        if self.stream.replay:
            next(islice(iterator, self.samples, self.samples), None)  # reads so many
        return iterator


@dataclass(frozen=True)
class StreamBatches:
    """This rank's training batches from a stream: step k has the same samples at every number of workers.

    The counterpart of `TrainBatches`. Of the shards, one for each micro-batch of the global batch, rank r of w reads
    the r-th of w equal contiguous parts. An epoch is the whole run.
    """

    data: Stream
    plan: BatchPlan
    rank: int
    seed: int
    device: torch.device
    steps_per_epoch: int
    check: Callable[[Any], object] = field(default=lambda state: None)  # raises if a checkpoint cannot hold a state
    num_workers: int = 0
    on_device: bool = False
    _shards: list[_Shard] = field(init=False, default_factory=list)

    @property
    def num_shards(self) -> int:
        """Return the number of shards over all ranks."""
        return self.plan.gradient_accumulation_steps * self.plan.data_size

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples of a global batch."""
        return self.plan.global_batch_size

    def num_samples(self, steps: int) -> int:
        """Return the number of samples of so many steps, the first ones."""
        return steps * self.plan.global_batch_size

    @property
    def own(self) -> range:
        """Return which shards this rank reads."""
        first = self.rank * self.plan.gradient_accumulation_steps
        return range(first, first + self.plan.gradient_accumulation_steps)

    @property
    def shards(self) -> Sequence[_Shard]:
        """Return the shards that this rank reads, opened when they are first needed."""
        if not self._shards:
            try:
                self._shards.extend(_Shard(self.data, index, self.num_shards, self.seed) for index in self.own)
            except Exception as error:
                raise user_code_error(error, f"opening one of {self.num_shards} shards of the stream `train`") from None
        return self._shards

    @property
    def is_restorable(self) -> bool:
        """Return whether the positions can be saved and restored."""
        return self.data.replay or all(isinstance(shard.source, Restorable) for shard in self.shards)

    def steps(self, from_step: int, to_step: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches for each optimizer step, in order, from the position restored.

        Random numbers that the stream draws are a function of seed, step and micro-batch, unless it reads ahead.

        Raises:
            DdpexpError: a shard has ended before the run.
        """
        for step in range(from_step, to_step):
            batches = [to_device(self._read(shard, step, to_step), self.device) for shard in self.shards]
            if step == from_step and self.is_restorable:
                self.check(self.state())
            yield batches

    def _read(self, shard: _Shard, step: int, num_steps: int) -> Any:
        first = shard.samples
        samples = shard.take(self.plan.micro_batch_size, seed_of(self.seed, DATA, step, shard.index))
        if len(samples) < self.plan.micro_batch_size:
            raise self._ended(shard, step, num_steps)
        try:
            return default_collate(samples)
        except Exception as error:
            other = first_mismatch(samples)
            place = shard.description(first, len(samples))
            if other is not None:
                place += f" do not fit into one batch: {form(samples[0])} and {form(samples[other])}"
            raise user_code_error(error, place) from None

    def _ended(self, shard: _Shard, step: int, num_steps: int) -> DdpexpError:
        if not shard.samples:
            return DdpexpError(
                f"shard {shard.index} of {shard.count} of the stream `train` has no samples: there is a shard "
                "for each micro-batch of the global batch",
                suggestion="Use a larger trainer.micro_batch_size, or split the data into more parts.",
            )
        whole = f"Use trainer.max_steps={step}, or start its shards over" if step else "Start its shards over"
        return DdpexpError(
            f"the stream `train` has ended before step {step + 1:,} of {num_steps:,}: its shard {shard.index} of "
            f"{shard.count} has {shard.samples:,} samples",
            suggestion=f"{whole} with Stream(..., repeat=True).",
        )

    def state(self) -> dict[str, Any]:
        """Return the positions of the shards that this rank reads: of the samples that the steps so far have used."""
        if not self.is_restorable:
            return {}
        shards = {str(shard.index): shard.state() for shard in self.shards}
        return {"num_shards": self.num_shards, "micro_batch_size": self.plan.micro_batch_size, "shards": shards}

    def restore(self, states: Iterable[Any]) -> None:
        """Continue at positions that `state` returned on all ranks, perhaps of another number of them.

        Raises:
            RefusedError: they are of another number of shards, or incomplete.
        """
        if not self.is_restorable:
            raise RefusedError(
                f"cannot be resumed from: the stream `train` cannot restore its position ({self._kind()} has "
                "no state_dict and load_state_dict), and would begin again with its first sample",
                suggestion="Start a new run with another run.dir.",
            )
        missing = {str(index): shard for index, shard in zip(self.own, self.shards, strict=True)}
        for state in states:
            found = state.get("shards") if isinstance(state, Mapping) else None
            if not isinstance(found, Mapping):
                continue
            if state.get("num_shards") != self.num_shards:
                raise self._other_shards(state)
            for index in [index for index in missing if index in found]:
                missing.pop(index).restore(found[index])
            if not missing:
                return
        raise RefusedError(
            f"holds no position of {_shards_text(list(map(int, missing)))} of the stream `train`",
            suggestion="Start a new run with another run.dir.",
        )

    def _other_shards(self, state: Mapping[str, Any]) -> RefusedError:
        micro = state.get("micro_batch_size")
        return RefusedError(
            f"holds the positions of {state.get('num_shards')} shards of the stream `train`, one for each "
            f"micro-batch of {micro}, and this start reads {self.num_shards}, in micro-batches of "
            f"{self.plan.micro_batch_size}",
            suggestion=f"Type trainer.micro_batch_size={micro} to resume.",
        )

    def warning(self) -> str | None:
        """Return a warning if a stopped run could not be resumed, else None."""
        if self.is_restorable:
            return None
        return (
            f"the stream `train` cannot restore its position ({self._kind()} has no state_dict and load_state_dict): "
            "this run cannot be resumed. If it yields the same samples each time, give it Stream(..., replay=True)."
        )

    def _kind(self) -> str:
        return next(type(shard.source).__name__ for shard in self.shards if not isinstance(shard.source, Restorable))

    @property
    def description(self) -> str:
        """Return what is reported of the data."""
        return f"a stream in {counted(self.num_shards, 'shard')}"

    def describe(self, step: int, number: int, rows: Sequence[int]) -> str:
        """Describe rows of one of this rank's micro-batches, that of the step being done."""
        shard = self.shards[number]
        first = shard.samples - self.plan.micro_batch_size
        places = ", ".join(f"{first + row:,}" for row in rows)
        return (
            f"{'sample' if len(rows) == 1 else 'samples'} {places} of shard {shard.index} of {shard.count} of `train`"
        )


def _shards_text(indices: Sequence[int]) -> str:
    return f"shard{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


Batches: TypeAlias = TrainBatches | StreamBatches
"""The training batches of a rank."""
