"""Rows that each rank has changed, given to all ranks: through shared memory on one host, else through the backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpexp.compat import operators
from ddpexp.distributed.world import World
from ddpexp.strategy.comm.reduce import as_bytes
from ddpexp.strategy.comm.shared_memory import SharedMemory

_BUFFER_BYTES = 32 << 20  # of each rank in a message to the backend: bounds the memory that the messages take


class RowGather:
    """Gives every rank the current values of tensors that one rank each has changed.

    The tensors of each rank are sent one after the other, in pieces of the size of a slot of the shared memory, or of
    a message.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]], world: World) -> None:
        """Take the tensors by the rank that changes them; every rank has memory for all of them.

        Shapes: each tensor is (num_elements,), contiguous.
        """
        self._world = world
        self._memory = world.memory if isinstance(world.memory, SharedMemory) else None
        self._rows = [[as_bytes(tensor) for tensor in rows if tensor.numel()] for rows in tensors]
        most = max((sum(map(len, rows)) for rows in self._rows), default=0)
        self._slot_bytes = min(_BUFFER_BYTES if self._memory is None else self._memory.slot_bytes, most)
        self._num_rounds = -(-most // self._slot_bytes) if most else 0
        self._pieces = [_cut(rows, self._slot_bytes, self._num_rounds) for rows in self._rows]
        self._slots: list[Tensor] = []
        if self._memory is None and self._num_rounds:
            self._slots = list(torch.empty(len(tensors), self._slot_bytes, dtype=torch.uint8, device=world.device))

    @torch.no_grad()
    def gather(self) -> None:
        """Send this rank's tensors and receive those of the others, in place. Ranks: all; communicates."""
        for number in range(self._num_rounds):
            slots = self._slots if self._memory is None else self._memory.slots[self._memory.half]
            _copy(self._pieces[self._world.rank][number], slots[self._world.rank], into_slot=True)
            self._exchange(slots)
            for rank, pieces in enumerate(self._pieces):
                if rank != self._world.rank:
                    _copy(pieces[number], slots[rank], into_slot=False)

    def _exchange(self, slots: Sequence[Tensor]) -> None:
        if self._memory is not None:
            self._memory.end_round(self._slot_bytes)
        else:
            self._world.all_gather(slots, slots[self._world.rank].clone())


def _cut(rows: Sequence[Tensor], slot_bytes: int, num_rounds: int) -> list[list[Tensor]]:
    """Return the parts of the rows that are sent in each round."""
    rounds: list[list[Tensor]] = [[] for _ in range(num_rounds)]
    position = 0
    for row in rows:
        while len(row):
            number, filled = divmod(position, slot_bytes)
            piece, row = row[: slot_bytes - filled], row[slot_bytes - filled :]
            rounds[number].append(piece)
            position += len(piece)
    return rounds


def _copy(pieces: Sequence[Tensor], slot: Tensor, into_slot: bool) -> None:
    if not pieces:
        return
    parts = list(torch.split(slot[: sum(map(len, pieces))], [len(piece) for piece in pieces]))
    operators.foreach_copy_(*((parts, list(pieces)) if into_slot else (list(pieces), parts)))
