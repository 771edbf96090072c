"""Compare what ranks hold in common: parameters that have drifted apart, buffers in which a rank keeps state alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64_intdigest

from ddpexp.compat.modules import NormBase, buffers_of, parameters_of
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.base import Shard, Strategy
from ddpexp.system.text import first_few

_CHUNK = 1 << 22  # bytes that are hashed together on a GPU
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class ReplicaError(DdpexpError):
    """Ranks that should hold the same tensors do not."""


@dataclass(frozen=True)
class _Held:
    """A tensor that this rank holds, whole or in part."""

    kind: str  # parameter or buffer
    module: str  # its path, with the name of the model
    name: str
    shard: Shard
    is_own: bool  # this rank keeps and saves it for itself

    @property
    def group(self) -> str:
        """Return one of `_GROUPS`."""
        if self.is_own:
            return "own"
        shard = self.shard
        return "whole" if shard.first_row is None and shard.rows is None and shard.columns is None else "part"

    @property
    def place(self) -> str:
        """Return which part of which tensor it is: ranks for which this is the same hold replicas."""
        shard = self.shard
        part = (tuple(shard.tensor.shape), shard.first_row, shard.rows, shard.columns)
        return repr((self.kind, self.module, self.name, shard.shape, part))


@dataclass
class ReplicaComparison:
    """Compares parameters and buffers over the ranks that hold replicas of them, by their hashes.

    Running statistics of normalization layers are left out: a rule of their own makes them rank zero's. Buffers that
    each rank keeps and saves for itself (`Strategy.local_buffers`) may differ, which is said once.
    """

    strategy: Strategy
    world: World
    _step: int | None = None  # the last one that was compared
    _has_noted: bool = False

    def compare(self, step: int) -> None:
        """Compare the ranks after so many steps, once.

        Ranks: all; communicates 48 bytes for each rank, more only where they differ.

        Raises:
            ReplicaError: they differ; with names and two of the ranks. On all ranks alike.
        """
        if self.world.world_size == 1 or step == self._step:
            return
        self._step = step
        held = [one for one in _held(self.strategy) if not (one.is_own and self._has_noted)]
        numbers = _digests([one.shard.tensor for one in held])
        if self._agree(held, numbers):
            return
        rows = {one.place: [one.group, one.kind, f"{one.module}.{one.name}", number]
                for one, number in zip(held, numbers, strict=True)}  # fmt: skip
        found = _differing(self.world.gather_values(rows))
        for wanted, end in (("parameter", _PARAMETERS), ("buffer", _BUFFERS)):
            names = [name for group, kind, name in found if group != "own" and kind == wanted]
            if names:
                raise ReplicaError(_sentence(names, found, f"after step {step:,} the {wanted}", end))
        if not self._has_noted and self.world.is_rank_zero:
            logging.getLogger("ddpexp").info(_sentence([name for *_, name in found], found, "the buffer", _OWN))
        self._has_noted = True

    def _agree(self, held: Sequence[_Held], numbers: Sequence[int]) -> bool:
        """Return whether all ranks that hold the same tensors of a group have the same values. Ranks: all."""
        own = torch.zeros(self.world.world_size, len(_GROUPS), 2, dtype=torch.int64)
        for row, group in enumerate(_GROUPS):
            chosen = [(one.place, number) for one, number in zip(held, numbers, strict=True) if one.group == group]
            own[self.world.rank, row] = torch.tensor([_number([pair[column] for pair in chosen]) for column in (0, 1)])
        by_rank = self.world.sum(own.to(self.world.device)).tolist()
        return all(
            len({(place, value) for place, value in pairs}) == len({place for place, _ in pairs})
            for pairs in zip(*by_rank, strict=True)
        )


_GROUPS = ("whole", "part", "own")
"""Replicas of whole tensors, of parts of them, which fewer ranks hold, and what each rank has for itself."""
_PARAMETERS = (
    "every rank must have the same: this step is not saved, and the checkpoints before it stay. Code that changes "
    "parameters, gradients or settings of an optimizer has to do so on every rank alike."
)
_BUFFERS = (
    "a checkpoint would hold the values of one rank alone. Combine them over the ranks in the task, such as with "
    "torch.distributed.all_reduce, keep what is not state as a plain attribute of the module, or use "
    "strategy.broadcast_buffers=false, with which each rank keeps and saves its own."
)
_OWN = (
    "with this strategy each rank keeps and saves its own; evaluations, and a resume with another number of workers, "
    "take those of rank zero."
)


def _held(strategy: Strategy) -> Iterator[_Held]:
    own = strategy.local_buffers().keys()
    for model, root in strategy.modules.items():
        for path, module in root.named_modules():
            place = f"{model}.{path}" if path else model
            kept: Mapping[str, Tensor | None] = {} if isinstance(module, NormBase) else buffers_of(module)
            for kind, tensors in (("parameter", parameters_of(module)), ("buffer", kept)):
                for name, tensor in tensors.items():
                    if tensor is not None and not is_lazy(tensor) and tensor.numel():
                        is_own = f"{place}.{name}" in own
                        if is_own and kind == "parameter":  # averaged over the ranks before it is saved
                            continue
                        yield _Held(kind, place, name, strategy.shard(f"{place}.{name}", tensor.detach()), is_own)


def _differing(by_rank: Sequence[Mapping[str, Sequence[Any]]]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return what differs, by group, kind and name: the first two ranks that hold other values."""
    first: dict[str, tuple[int, int]] = {}  # by place: a rank, and its hash
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for rank, tensors in enumerate(by_rank):
        for place, (group, kind, name, number) in tensors.items():
            earlier, known = first.setdefault(place, (rank, number))
            if known != number:
                found.setdefault((group, kind, name), (earlier, rank))
    return found


def _sentence(names: Sequence[str], found: Mapping[Any, tuple[int, int]], begin: str, end: str) -> str:
    several = len(names) > 1
    earlier, rank = next(ranks for (_, _, name), ranks in found.items() if name == names[0])
    return (
        f"{begin}{'s' if several else ''} {first_few(names)} differ{'' if several else 's'} between rank {earlier} and "
        f"rank {rank}, and {end}"
    )


def _number(values: Sequence[Any]) -> int:
    return int.from_bytes(sha256(repr(values).encode()).digest()[:7], "little")


def _digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for the bytes of each tensor. The host waits once for the device."""
    on_host = {number: _of_host(tensor) for number, tensor in enumerate(tensors) if tensor.device.type == "cpu"}
    others = [number for number in range(len(tensors)) if number not in on_host]
    sums = torch.stack([_of_device(tensors[number]) for number in others]).tolist() if others else []
    found = on_host | dict(zip(others, sums, strict=True))
    return [found[number] for number in range(len(tensors))]


def _of_host(tensor: Tensor) -> int:
    return xxh3_64_intdigest(_bytes(tensor).numpy().data)


def _of_device(tensor: Tensor) -> Tensor:
    """Return the sum of all bytes, each times an odd number of its position, modulo 2 ** 64: a copy would take longer.

    Two tensors that differ in one byte differ in it.
    """
    values = _bytes(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(min(_CHUNK, len(values)), device=tensor.device) * _ODD | 1
    for part in torch.split(values, _CHUNK):
        total = (total * _ODD) + (part.long() * weights[: len(part)]).sum()
    return total


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor. Shapes: (num_bytes,), uint8."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return values.contiguous().view(-1).view(torch.uint8)
