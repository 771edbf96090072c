"""One rank's share of the order of samples, as batches on its device."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from ddpexp.data.batch_plan import BatchPlan
from ddpexp.data.datasets import IndexData
from ddpexp.data.order import Permutation
from ddpexp.errors import RefusedError
from ddpexp.launch.process import die_with_parent
from ddpexp.seeds import DATA, EVAL, seed_everything, seed_of, seed_torch

_Key = tuple[int, list[int]]  # a micro-batch: its seed and its indices

_sockets: Any = connection
_python_address = _sockets.arbitrary_address
_BLOCK = 8192  # indices computed at once: large enough to amortise numpy's calls, small enough to stay in the cache


@dataclass(frozen=True)
class TrainBatches:
    """The training data as this rank sees it: step k is the same samples at every world size.

    The global batch of step k is positions k * G .. (k + 1) * G - 1 of its epoch's permutation; rank r of w computes the
    r-th of w equal contiguous parts, in micro-batches. The rest of an epoch that fills no global batch is dropped.
    """

    data: Any
    plan: BatchPlan
    rank: int
    seed: int
    device: torch.device
    num_workers: int = 0

    def __post_init__(self) -> None:
        """Refuse a batch larger than the data."""
        if self.steps_per_epoch == 0:
            raise RefusedError(
                f"trainer.global_batch_size={self.plan.global_batch_size} is more than the {len(self.data)} training samples. "
                f"Use at most {len(self.data)}."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of whole global batches in an epoch."""
        return len(self.data) // self.plan.global_batch_size

    def steps(self, from_step: int, to_step: int) -> Iterator[list[Any]]:
        """Yield for each optimizer step this rank's micro-batches, in order; starts anywhere in O(1).

        Random numbers that the data set draws are a function of seed, step and micro-batch.
        """
        if isinstance(self.data, IndexData):
            for step, indices in enumerate(self.indices(from_step, to_step), start=from_step):
                parts = torch.split(torch.from_numpy(indices), self.plan.micro_batch_size)
                yield [self._gather(step, number, part) for number, part in enumerate(parts)]
            return
        micro_batches = iter(_loader(self.data, self._keys(from_step, to_step), self.num_workers, self.device))
        for _ in range(from_step, to_step):
            yield [to_device(next(micro_batches), self.device) for _ in range(self.plan.gradient_accumulation_steps)]

    def indices(self, from_step: int, to_step: int) -> Iterator[NDArray[np.int64]]:
        """Yield for each step the indices of this rank's samples. Shapes: (accumulation * micro_batch_size,)."""
        total, share = self.plan.global_batch_size, self.plan.gradient_accumulation_steps * self.plan.micro_batch_size
        offsets = np.arange(self.rank * share, (self.rank + 1) * share)
        step = from_step
        while step < to_step:
            epoch, first = divmod(step, self.steps_per_epoch)
            count = min(max(1, _BLOCK // share), self.steps_per_epoch - first, to_step - step)
            order = Permutation(len(self.data), self.seed, epoch)
            positions = np.arange(first, first + count)[:, None] * total + offsets
            yield from order(positions)
            step += count

    def _gather(self, step: int, number: int, indices: Tensor) -> Any:
        seed_torch(self._seed(step, number), self.device)
        return self.data.gather(indices, self.device)

    def _seed(self, step: int, number: int) -> int:
        return seed_of(self.seed, DATA, step, self.rank * self.plan.gradient_accumulation_steps + number)

    def _keys(self, from_step: int, to_step: int) -> Iterator[_Key]:
        micro = self.plan.micro_batch_size
        for step, indices in enumerate(self.indices(from_step, to_step), start=from_step):
            for number in range(self.plan.gradient_accumulation_steps):
                yield self._seed(step, number), indices[number * micro : (number + 1) * micro].tolist()


@dataclass(frozen=True)
class EvalBatches:
    """An evaluation set cut into batches that the ranks take in turn: each sample once, at every world size."""

    data: Any
    batch_size: int
    rank: int
    world_size: int
    device: torch.device
    num_workers: int = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches; another rank may have one more."""
        if isinstance(self.data, IndexData):
            for start, stop in self._ranges():
                seed_torch(seed_of(0, EVAL, 0, start), self.device)
                yield self.data.gather(torch.arange(start, stop), self.device)
        else:
            keys = ((seed_of(0, EVAL, 0, start), list(range(start, stop))) for start, stop in self._ranges())
            for batch in _loader(self.data, keys, self.num_workers, self.device):
                yield to_device(batch, self.device)

    @property
    def num_batches(self) -> int:
        """Return the number of batches over all ranks."""
        return -(-len(self.data) // self.batch_size)

    def first(self) -> Any:
        """Return the first batch of the whole set, on whatever rank."""
        return next(iter(EvalBatches(self.data, self.batch_size, 0, 1, self.device)))

    def _ranges(self) -> Iterator[tuple[int, int]]:
        stride = self.batch_size * self.world_size
        for start in range(self.rank * self.batch_size, len(self.data), stride):
            yield start, min(start + self.batch_size, len(self.data))


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nest of tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def _loader(data: Any, keys: Iterator[_Key], num_workers: int, device: torch.device) -> DataLoader[Any]:
    """Adapt a map-style torch data set: one loader for the whole way, so its workers live across epochs."""
    return DataLoader(
        _Seeded(data),  # type: ignore[arg-type]
        batch_sampler=_Once(keys),  # type: ignore[arg-type]
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=partial(_start_worker, os.getpid()) if num_workers else None,
        generator=torch.Generator().manual_seed(0),  # its own draw must not move the global generator
    )


@dataclass(frozen=True)
class _Seeded:
    """A data set that seeds every generator before it fetches a batch, in whatever process."""

    data: Any

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, key: _Key) -> Any:
        seed, indices = key
        seed_everything(seed)
        fetch = getattr(self.data, "__getitems__", None)  # torch's own optional protocol
        return fetch(indices) if fetch else [self.data[index] for index in indices]


@dataclass(frozen=True)
class _Once:
    """A batch sampler that is an iterator: it knows its place and has no state to save."""

    keys: Iterator[_Key]

    def __iter__(self) -> Iterator[_Key]:
        return self.keys


def _start_worker(parent: int, _worker: int) -> None:
    """Live as long as the rank, whatever schedulers send to all processes of a job: it is the rank that is asked to stop."""
    die_with_parent(parent)
    _sockets.arbitrary_address = _address
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _address(family: str) -> Any:
    """Name a socket of multiprocessing, where tensors' memory is handed on, in the kernel's own namespace.

    It is gone with its process. A name in a temporary folder, as Python chooses, stays behind when that is killed. A secret of
    the rank keeps strangers out of both.
    """
    return f"\0ddpexp-{os.getpid()}-{secrets.token_hex(8)}" if family == "AF_UNIX" else _python_address(family)
