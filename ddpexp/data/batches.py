"""One rank's part of the samples, in order, as batches on its device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.data.base import IndexData
from ddpexp.data.batch_plan import BatchPlan
from ddpexp.data.loader import Key, load
from ddpexp.data.order import TrainingOrder
from ddpexp.data.prefetch import ahead, num_ahead
from ddpexp.data.samples import describe_samples, user_code_error
from ddpexp.data.token_batches import ByTokens
from ddpexp.distributed.rng import AUGMENT, DATA, EVAL, MicroBatchSeeds, seed_of, seeder
from ddpexp.distributed.transfers import moved, to_device
from ddpexp.errors import RefusedError

# Indices computed at a time: few at first, for a fast start, and then more; enough to amortise numpy's calls, but few
# enough that their arrays fit into memory that the process reuses (with twice as many, the kernel clears new pages
# each time).
_FIRST_BLOCK = 512
_BLOCK = 32768
_GROWTH = 4


@dataclass(frozen=True)
class TrainBatches:
    """The training batches of this rank: step k has the same samples at every world size.

    The global batch of step k is positions k * G .. (k + 1) * G - 1 of its epoch's order; rank r of w computes
    the r-th of w equal contiguous parts, in micro-batches. The incomplete last global batch of an epoch is dropped.
    """

    data: IndexData
    plan: BatchPlan
    rank: int
    seed: int
    device: torch.device
    num_workers: int = 0
    timeout_seconds: float = 0.0  # for DataLoader workers to produce a batch; 0: no timeout
    on_device: bool = False  # the samples are on the device, and so are the indices
    order: TrainingOrder | None = None  # None: that of the data

    def __post_init__(self) -> None:
        """Check that the data has at least one global batch."""
        if self.steps_per_epoch == 0:
            of_an_epoch = " of an epoch" if self.samples_per_epoch != len(self.data) else ""
            things = "training samples" if self._by_tokens is None else "batches by tokens"
            raise RefusedError(
                f"is more than the {self.samples_per_epoch} {things}{of_an_epoch}",
                key="trainer.global_batch_size",
                value=self.plan.global_batch_size,
                suggestion=f"Use at most {self.samples_per_epoch}.",
            )

    @cached_property
    def steps_per_epoch(self) -> int:
        """Return the number of complete global batches in an epoch."""
        return self.samples_per_epoch // self.plan.global_batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Return how many samples (by tokens: batches) an epoch draws, with the incomplete last global batch."""
        return self._order.samples_per_epoch

    @property
    def samples_per_step(self) -> float:
        """Return the number of samples of a global batch; by tokens the mean."""
        return self.plan.global_batch_size * (1 if self._by_tokens is None else self._by_tokens.mean_size)

    def num_samples(self, steps: int) -> int:
        """Return the number of samples of so many steps, the first ones."""
        total = self.plan.global_batch_size
        order = self._by_tokens
        if order is None:
            return steps * total
        epochs, rest = divmod(steps, self.steps_per_epoch)
        # A whole epoch has each sample once, without the samples of the incomplete last global batch.
        dropped = np.arange(self.steps_per_epoch * total, self.samples_per_epoch)
        left_out = sum(order.num_samples(self.seed, epoch, dropped) for epoch in range(epochs)) if len(dropped) else 0
        last = order.num_samples(self.seed, epochs, np.arange(rest * total))
        return epochs * len(order.lengths) - left_out + last

    @cached_property
    def _order(self) -> TrainingOrder:
        return self.data if self.order is None else self.order

    @property
    def _by_tokens(self) -> ByTokens | None:
        return self.order if isinstance(self.order, ByTokens) else None

    def steps(self, from_step: int, to_step: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches for each optimizer step, in order; starts at any step in O(1).

        Random numbers drawn by the data set are a function of seed, step and micro-batch. The augmentation by a data
        set with `of_epoch` is a function of seed, epoch and sample, however the batch is split.
        """
        if self.data.is_loaded:
            keys = self._keys(from_step, to_step)
            micro_batches = load(self.data, "train", keys, self.num_workers, self.device, self.timeout_seconds)
            for _ in range(from_step, to_step):
                yield [
                    to_device(next(micro_batches), self.device) for _ in range(self.plan.gradient_accumulation_steps)
                ]
        elif self._is_fetched:
            for staged, fetched in ahead(self._fetches(from_step, to_step), num_ahead(self.device), self.device):
                yield [staged.stage(batch, self.device) for batch in fetched]
        else:
            yield from self._gathered(from_step, to_step)

    def _gathered(self, from_step: int, to_step: int) -> Iterator[list[Any]]:
        """Yield the micro-batches of each step, each made when it is asked for."""
        begun, seed_torch = -1, seeder(self.device)
        for first, block in self._blocks(from_step, to_step):
            if (epoch := first // self.steps_per_epoch) != begun:
                data, begun = self.data.of_epoch(self.seed, epoch), epoch
            indices = torch.from_numpy(block).view(-1, self.plan.micro_batch_size)
            parts = iter((moved(indices, self.device) if self.on_device else indices).unbind())
            for seeds in self._seeds.of_steps(first, len(block)):
                micro_batches = []
                for seed in seeds:
                    seed_torch(seed)
                    micro_batches.append(_gather(data, "train", next(parts), self.device))
                yield micro_batches

    @cached_property
    def _has_partners(self) -> bool:
        return not self.on_device and self.data.of_epoch(self.seed, 0).has_partners

    @property
    def _is_fetched(self) -> bool:
        """Return whether batches are fetched ahead, or with the partners of their samples."""
        ahead_of_steps = self.data.fetches_ahead and not self.on_device and num_ahead(self.device) > 0
        return ahead_of_steps or self._has_partners

    def _fetches(self, from_step: int, to_step: int) -> Iterator[Callable[[], tuple[IndexData, list[Any]]]]:
        """Yield for each step a function that fetches its micro-batches, on the host."""
        begun, share = -1, (-1, self.plan.micro_batch_size)
        blocks, partner_blocks = itertools.tee(self._blocks(from_step, to_step))  # each sample is its own partner
        if self._has_partners:
            partner_blocks = self._blocks(from_step, to_step, partners=True)
        for (first, block), (_, partner_block) in zip(blocks, partner_blocks, strict=True):
            if (epoch := first // self.steps_per_epoch) != begun:
                data, begun = self.data.of_epoch(self.seed, epoch), epoch
            for indices, partners in zip(torch.from_numpy(block), torch.from_numpy(partner_block), strict=True):
                pairs = list(zip(indices.view(share), partners.view(share), strict=True))
                yield partial(_fetch_step, data, pairs, self.device.type == "cuda")

    def indices(self, from_step: int, to_step: int) -> Iterator[NDArray[np.int64]]:
        """Yield for each step the indices of this rank's samples, micro-batch by micro-batch. Shapes: (samples,)."""
        for first, block in self._blocks(from_step, to_step):
            yield from (
                block
                if self._by_tokens is None
                else (np.concatenate(self._micro_batches(step, row)) for step, row in enumerate(block, start=first))
            )

    def _micro_batches(self, step: int, row: NDArray[np.int64]) -> Sequence[NDArray[np.int64]]:
        """Divide what a row of `_blocks` holds into the indices of each micro-batch."""
        if self._by_tokens is not None:
            return self._by_tokens.members(self.seed, step // self.steps_per_epoch, row)
        return list(row.reshape(-1, self.plan.micro_batch_size))

    @property
    def description(self) -> str:
        """Return what is reported of the data."""
        return f"{len(self.data):,} samples to train"

    def describe(self, step: int, number: int, rows: Sequence[int]) -> str:
        """Describe rows of one of this rank's micro-batches by their indices in the data set."""
        _, block = next(self._blocks(step, step + 1))
        indices = self._micro_batches(step, block[0])[number].tolist()
        return describe_samples(self.data, [indices[row] for row in rows], "train")

    def _blocks(self, from_step: int, to_step: int, partners: bool = False) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield blocks of steps of one epoch: the number of the first step, and the indices of all.

        By tokens they are indices of batches. With `partners` they are those of the other half of each pair of
        neighboring positions in the global batch.

        Shapes: (num_steps, accumulation * micro_batch_size).
        """
        total, share = self.plan.global_batch_size, self.plan.gradient_accumulation_steps * self.plan.micro_batch_size
        offsets = np.arange(self.rank * share, (self.rank + 1) * share)
        if partners:
            offsets = np.where(offsets ^ 1 < total, offsets ^ 1, offsets)
        step, block = from_step, _FIRST_BLOCK
        begun = -1
        while step < to_step:
            epoch, first = divmod(step, self.steps_per_epoch)
            if epoch != begun:
                order, begun = self._order.order(self.seed, epoch), epoch  # computing its keys takes time
            count = min(max(1, block // share), self.steps_per_epoch - first, to_step - step)
            yield step, order(np.arange(first, first + count)[:, None] * total + offsets)
            step, block = step + count, min(_GROWTH * block, _BLOCK)

    @cached_property
    def _seeds(self) -> MicroBatchSeeds:
        count = self.plan.gradient_accumulation_steps
        return MicroBatchSeeds(self.seed, DATA, range(self.rank * count, (self.rank + 1) * count))

    def _keys(self, from_step: int, to_step: int) -> Iterator[Key]:
        for first, block in self._blocks(from_step, to_step):
            epoch_seed = seed_of(self.seed, AUGMENT, first // self.steps_per_epoch, 0)
            for step, row, seeds in zip(count(first), block, self._seeds.of_steps(first, len(block)), strict=False):
                for seed, part in zip(seeds, self._micro_batches(step, row), strict=True):
                    yield Key(seed, part.tolist(), epoch_seed)


@dataclass(frozen=True)
class EvalBatches:
    """An evaluation set in batches that the ranks take in turn: each sample once, at every world size."""

    data: IndexData
    batch_size: int
    rank: int
    world_size: int
    device: torch.device
    num_workers: int = 0
    timeout_seconds: float = 0.0  # as in TrainBatches
    name: str = "eval"
    on_device: bool = False  # as in TrainBatches
    limit: int | None = None  # only this many samples, the first ones

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches; another rank may have one more."""
        if self.data.is_loaded:
            keys = (Key(seed_of(0, EVAL, 0, start), list(range(start, stop))) for start, stop in self._ranges())
            for batch in load(self.data, self.name, keys, self.num_workers, self.device, self.timeout_seconds):
                yield to_device(batch, self.device)
        elif self.data.fetches_ahead and not self.on_device:
            pinned = self.device.type == "cuda"
            tasks = (
                partial(_fetch, self.data, self.name, torch.arange(start, stop), None, pinned)
                for start, stop in self._ranges()
            )
            for batch in ahead(tasks, num_ahead(self.device), self.device):
                yield self.data.stage(batch, self.device)
        else:
            for start, stop in self._ranges():
                seeder(self.device)(seed_of(0, EVAL, 0, start))
                indices = torch.arange(start, stop, device=self.device if self.on_device else "cpu")
                yield _gather(self.data, self.name, indices, self.device)

    @property
    def num_batches(self) -> int:
        """Return the number of batches over all ranks."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_samples(self) -> int:
        """Return the number of samples over all ranks."""
        return len(self.data) if self.limit is None else min(self.limit, len(self.data))

    def first(self) -> Any:
        """Return the first batch of the whole set, on any rank."""
        return next(iter(replace(self, rank=0, world_size=1, num_workers=0)))

    def _ranges(self) -> Iterator[tuple[int, int]]:
        stride = self.batch_size * self.world_size
        for start in range(self.rank * self.batch_size, self.num_samples, stride):
            yield start, min(start + self.batch_size, self.num_samples)


def units_per_sample(data: Any, order: TrainingOrder | None = None) -> dict[str, float]:
    """Return what the speed is recorded in, with the number in a sample: samples and, of sequences, tokens.

    In batches by tokens it is the mean, without padding.
    """
    own = getattr(data, "tokens_per_sample", None)
    tokens = float(order.lengths.mean()) if isinstance(order, ByTokens) else own
    return {"samples": 1, **({"tokens": tokens} if tokens else {})}


def _gather(data: IndexData, name: str, indices: Tensor, device: torch.device) -> Any:
    try:
        return data.gather(indices, device)
    except Exception as error:
        raise user_code_error(error, describe_samples(data, indices.tolist(), name)) from error


def _fetch_step(data: IndexData, pairs: list[tuple[Tensor, Tensor]], pinned: bool) -> tuple[IndexData, list[Any]]:
    return data, [_fetch(data, "train", indices, partners, pinned) for indices, partners in pairs]


def _fetch(data: IndexData, name: str, indices: Tensor, partners: Tensor | None, pinned: bool) -> Any:
    try:
        return data.fetch(indices, pinned) if partners is None else data.fetch_pairs(indices, partners, pinned)
    except Exception as error:
        raise user_code_error(error, describe_samples(data, indices.tolist(), name)) from error
