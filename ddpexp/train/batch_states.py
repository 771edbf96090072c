"""States of evaluation batches, reduced over all ranks in the order of the batches.

Data rank r of n evaluates the batches r, r + n, r + 2 n and so on. Integers are added up exactly in any order. Sums of
floats are folded from the first batch to the last, whichever rank evaluated it, so that they have the same bits at
every number of workers. Rank zero gets the results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ddpexp.distributed.world import World
from ddpexp.strategy.mesh import DataRank

Kind = Literal["sum", "max", "min", "list"]
States = Mapping[str, tuple[Kind, "Tensor | Sequence[Tensor]"]]
"""What a batch adds: by key a tensor to be summed or compared, or a list of tensors to be appended."""

KEPT_BYTES = 16 << 20  # of float sums, which a rank keeps before all ranks fold theirs
PIECE_BYTES = 8 << 20  # that are exchanged at once
_ALIGNED = 16  # bytes
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_EXTREMES: Mapping[Kind, Callable[[Tensor, Tensor], Tensor]] = {"max": torch.maximum, "min": torch.minimum}


@dataclass
class BatchStates:
    """The states of this rank's batches of one evaluation set."""

    world: World
    data: DataRank
    num_batches: int  # of the whole set
    _kinds: str | None = None  # keys, kinds, types and shapes; None before the first batch
    _integers: dict[str, Tensor] = field(default_factory=dict)
    _extremes: dict[str, tuple[Kind, Tensor]] = field(default_factory=dict)  # so far, or of the first batch
    _lists: dict[str, list[list[Tensor]]] = field(default_factory=dict)  # for each batch, on the host
    _floats: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)
    _rows: list[Tensor] = field(default_factory=list)  # float sums of the batches since the last fold, flat
    _num_folded: int = 0  # rounds of batches, one batch of each rank, that are folded
    _total: Tensor | None = None  # of the float sums. Ranks: rank zero
    _num_own: int = 0  # batches added

    def add(self, states: States, counts: bool = True) -> bool:
        """Add the next batch of this rank, or with `counts` false only learn its keys and shapes.

        Returns False if keys, kinds, types or shapes differ from those of the first batch.
        """
        states = {key: states[key] for key in sorted(states)}  # in one order in all batches and on all ranks
        kinds = " ".join(f"{key}:{kind}{_described(value)}" for key, (kind, value) in states.items())
        if self._kinds is None:
            self._kinds = kinds
            self._begin(states)
        elif kinds != self._kinds:
            return False
        if not counts:
            return True
        self._num_own += 1
        row = []
        for key, (kind, value) in states.items():
            if not isinstance(value, Tensor):
                self._lists[key].append([item.detach().cpu() for item in value])
            elif kind in _EXTREMES:
                self._extremes[key] = (kind, _EXTREMES[kind](self._extremes[key][1], value))
            elif key in self._floats:
                row.append(value.to(torch.float64).reshape(-1))
            else:
                self._integers[key] += value
        if row:
            self._rows.append(torch.cat(row))
        return True

    def _begin(self, states: States) -> None:
        for key, (kind, value) in states.items():
            if not isinstance(value, Tensor):
                self._lists[key] = []
            elif kind in _EXTREMES:
                self._extremes[key] = (kind, value)
            elif value.is_floating_point():
                self._floats[key] = (value.dtype, value.shape)
            else:
                self._integers[key] = torch.zeros(value.shape, dtype=torch.int64, device=value.device)

    @property
    def digest(self) -> int:
        """Return a number of 32 bits that is equal on ranks with the same keys, kinds, types and shapes."""
        return int.from_bytes(hashlib.sha256((self._kinds or "").encode()).digest()[:4], "big")

    @property
    def _row_length(self) -> int:
        return sum(shape.numel() for _, shape in self._floats.values())

    @property
    def _rounds_kept(self) -> int:
        """Return after how many rounds the ranks fold; the same on all ranks."""
        return max(1, KEPT_BYTES // max(1, 8 * self._row_length))

    def folds_again(self) -> bool:
        """Return whether the ranks fold once more before the end of the set."""
        if not self._floats:
            return False
        return (self._num_folded + self._rounds_kept) * self.data.size < self.num_batches

    def is_due(self) -> bool:
        """Return whether this rank has to fold now, before its next batch."""
        return self.folds_again() and len(self._rows) == self._rounds_kept

    def fold(self, stopped: bool = False) -> bool:
        """Fold the float sums of the last rounds into the total; return whether any rank passed `stopped`.

        Ranks: all, where `is_due`, or where a stopped rank `folds_again`; communicates.
        """
        flag = torch.tensor(float(stopped), dtype=torch.float64, device=self.world.device)
        if self.world.world_size > 1 and bool(self.world.sum(flag.view(1))):
            return True
        if stopped:
            return True
        self._fold(self._rounds_kept * self.data.size)
        self._num_folded += self._rounds_kept
        return False

    def _fold(self, num_rows: int) -> None:
        rows = {row * self.data.size + self.data.rank: values for row, values in enumerate(self._rows)}
        self._rows = []
        self._total = self._folded(rows, num_rows, self._row_length, torch.float64, torch.add, self._total)

    def reduce(self) -> dict[str, Tensor | list[Tensor]]:
        """Return what all batches of all ranks give, on the host; on other ranks than zero it is empty.

        Ranks: all, after their last batch; communicates.
        """
        if self._floats:
            self._fold(self.num_batches - self._num_folded * self.data.size)
        integers = self._sum_integers()
        extremes = {key: self._extreme(kind, value) for key, (kind, value) in self._extremes.items()}
        lists = self._gather_lists()
        if not self.world.is_rank_zero:
            return {}
        reduced: dict[str, Tensor | list[Tensor]] = {**integers, **extremes, **lists}
        if self._total is not None:
            lengths = [shape.numel() for _, shape in self._floats.values()]
            for (key, (dtype, shape)), values in zip(
                self._floats.items(), torch.split(self._total, lengths), strict=True
            ):
                reduced[key] = values.view(shape).to(dtype)
        return reduced

    def _sum_integers(self) -> dict[str, Tensor]:
        if not self._integers:
            return {}
        parts = [total.reshape(-1) for total in self._integers.values()]
        own = torch.cat(parts).cpu()
        offset = {0: own} if self.data.reports else {}
        pieces = [piece for _, piece in self._exchanged(len(own), torch.int64, offset)]
        summed = torch.split(torch.cat([own[:0], *pieces]), [len(part) for part in parts])
        totals = zip(self._integers.items(), summed, strict=True)
        return {key: values.view(total.shape) for (key, total), values in totals}

    def _extreme(self, kind: Kind, value: Tensor) -> Tensor:
        """Return the extreme over all ranks that have batches. Ranks: all; rank zero gets it."""
        dtype = torch.float64 if value.is_floating_point() else torch.int64
        rows = {self.data.rank: value.to(dtype).reshape(-1)} if self._num_own else {}
        num_rows = min(self.data.size, self.num_batches)
        folded = self._folded(rows, num_rows, value.numel(), dtype, _EXTREMES[kind], None)
        return value.cpu() if folded is None else folded.view(value.shape).to(value.dtype)

    def _folded(
        self,
        rows: Mapping[int, Tensor],
        num_rows: int,
        length: int,
        dtype: torch.dtype,
        operation: Callable[[Tensor, Tensor], Tensor],
        total: Tensor | None,
    ) -> Tensor | None:
        """Fold rows of all ranks in their order, after what `total` holds; every row is of one rank.

        Shapes: rows are (length,). Ranks: all; rank zero gets the result, the others None.
        """
        parts = {row * length: values.cpu() for row, values in rows.items()} if self.data.reports else {}
        begun = length if total is not None else 0  # elements of the total that hold something
        if self.world.is_rank_zero and total is None:
            total = torch.empty(length, dtype=dtype)
        for start, piece in self._exchanged(num_rows * length, dtype, parts):
            if total is None:
                continue
            while len(piece):
                column = start % length
                values = piece[: length - column]
                target = total[column : column + len(values)]
                target.copy_(operation(target, values) if begun >= column + len(values) else values)
                begun = max(begun, column + len(values))
                start, piece = start + len(values), piece[len(values) :]
        return total

    def _gather_lists(self) -> dict[str, list[Tensor]]:
        """Return the lists of all batches in their order. Ranks: all; rank zero gets them."""
        if not self._lists:
            return {}
        keys = sorted(self._lists)
        shape = (len(keys), self.num_batches)
        packed = {
            (place, number * self.data.size + self.data.rank): _pack(items)
            for place, key in enumerate(keys) for number, items in enumerate(self._lists[key])
        }  # fmt: skip
        heads, bodies = ({at: pair[part] for at, pair in packed.items()} for part in (0, 1))
        gathered_heads = self._gather_ragged(heads, shape, torch.int64)
        gathered_bodies = self._gather_ragged(bodies, shape, torch.uint8)
        lists: dict[str, list[Tensor]] = {key: [] for key in keys}
        for (place, _), head in gathered_heads.items():
            lists[keys[place]] += _unpack(head, gathered_bodies[place, _])
        return lists

    def _gather_ragged(
        self, own: Mapping[tuple[int, int], Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[tuple[int, int], Tensor]:
        """Return vectors of different lengths, each of which one rank has, by their places in a table, in its order.

        Ranks: all; rank zero gets them.
        """
        own = own if self.data.reports else {}
        lengths = torch.zeros(shape, dtype=torch.int64)
        for at, vector in own.items():
            lengths[at] = len(vector)
        flat = {0: lengths.view(-1)}
        lengths = torch.cat([piece for _, piece in self._exchanged(lengths.numel(), torch.int64, flat)])
        ends = list(accumulate(lengths.tolist()))
        starts = [0, *ends[:-1]]
        parts = {starts[place * shape[1] + number]: vector for (place, number), vector in own.items() if len(vector)}
        whole = torch.empty(ends[-1] if self.world.is_rank_zero else 0, dtype=dtype)
        for start, piece in self._exchanged(ends[-1], dtype, parts):
            if self.world.is_rank_zero:
                whole[start : start + len(piece)] = piece
        if not self.world.is_rank_zero:
            return {}
        places = ((place, number) for place in range(shape[0]) for number in range(shape[1]))
        return {at: whole[start:end] for at, start, end in zip(places, starts, ends, strict=True)}

    def _exchanged(self, length: int, dtype: torch.dtype, parts: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield a vector that is the sum of what the ranks have, in pieces with their offsets, on the host.

        `parts` are this rank's, by their offsets. Through the backend: shared memory has room for a gradient only.
        Ranks: all, and every one must use up the iterator; communicates.
        """
        world = replace(self.world, memory=None)
        size = PIECE_BYTES // dtype.itemsize
        for start in range(0, length, size):
            piece = torch.zeros(min(size, length - start), dtype=dtype)
            for offset, part in _overlapping(parts, start, len(piece)):
                first = max(start, offset)
                inside = part[first - offset : start + len(piece) - offset]
                piece[first - start : first - start + len(inside)] = inside
            yield start, world.sum(piece.to(world.device)).cpu()


def _overlapping(parts: Mapping[int, Tensor], start: int, length: int) -> Iterable[tuple[int, Tensor]]:
    return [(at, part) for at, part in parts.items() if at < start + length and at + len(part) > start]


def _described(value: Tensor | Sequence[Tensor]) -> str:
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else ""


def _pack(items: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return types and shapes of tensors as int64, and their bytes, each padded to a multiple of 16."""
    head: list[int] = []
    bodies = [torch.empty(0, dtype=torch.uint8)]
    for item in items:
        head += [_DTYPES.index(item.dtype), item.dim(), *item.shape]
        body = item.contiguous().view(-1).view(torch.uint8) if item.numel() else bodies[0]
        bodies += [body, torch.zeros(-len(body) % _ALIGNED, dtype=torch.uint8)]
    return torch.tensor(head, dtype=torch.int64), torch.cat(bodies)


def _unpack(head: Tensor, body: Tensor) -> list[Tensor]:
    """Invert `_pack`."""
    numbers = head.tolist()
    items = []
    start = 0
    while numbers:
        dtype, dim = _DTYPES[numbers[0]], numbers[1]
        shape, numbers = torch.Size(numbers[2 : 2 + dim]), numbers[2 + dim :]
        num_bytes = shape.numel() * dtype.itemsize
        items.append(body[start : start + num_bytes].view(dtype).view(shape).clone())
        start += num_bytes + -num_bytes % _ALIGNED
    return items
