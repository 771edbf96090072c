"""Memory that the workers of one host share: two slots for each of them, and a counter each by which they meet."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import secrets
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, PeerError

_LINE = 128  # bytes: each rank's words lie in cache lines of their own, which the processor fetches in pairs
_WORDS = _LINE // 8
_TOKEN = 64  # where rank zero's line holds the mark by which the others know that they have opened the right memory
_PAGE = 4096
_TEXT = 256  # bytes of what a rank tells the others while they agree
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # x86_64
_YIELDS = 1000  # about a millisecond: a peer is mostly nearer than the time that waking up takes
_WATCH_SECONDS = 0.005  # a sleeping rank looks this often whether the others live


@dataclass(frozen=True)
class Peer:
    """Another rank of this host."""

    pid: int
    descriptor: int  # of its process: readable when it has ended, and never another process's


class SharedMemory:
    """This rank's view of the memory: `slots[half][rank]`, each `slot_bytes` long.

    Every rank writes into its slot of the half whose turn it is, meets the others, and reads theirs. One meeting a
    round is enough: a rank writes into a half again two rounds later, after the meeting of the round between, and to
    that one a peer comes only when it has read the first round's slots.

    The memory has no name anywhere, so nothing is left behind by whatever end: the kernel frees it with the last
    process.
    """

    def __init__(self, memory: mmap.mmap, world: World, slot_bytes: int, peers: Mapping[int, Peer]) -> None:
        """Take over the memory; `share` makes it. Shapes: slots are (slot_bytes,) uint8."""
        size = world.world_size
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.slots = [list(half) for half in everything[_first_slot(size) :].view(2, size, slot_bytes)]
        self.slot_bytes = slot_bytes
        self.half = 0  # whose turn it is
        self._words = memoryview(memory)[: size * _LINE].cast(
            "Q"
        )  # of each rank: its meetings, and its bytes in each half
        self._address = everything.data_ptr()
        self._rank = world.rank
        self._peers = peers
        self._ends = select.poll()
        for peer in peers.values():
            self._ends.register(peer.descriptor, select.POLLIN)
        self._timeout = world.timeout_seconds
        self._meetings = 0
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        pointer, word = ctypes.c_void_p, ctypes.c_uint32
        self._call.argtypes = [ctypes.c_long, pointer, ctypes.c_int, word, pointer, pointer, word]
        self._nap = (ctypes.c_long * 2)(0, int(_WATCH_SECONDS * 1e9))  # a struct timespec

    def meet(self) -> None:
        """Wait until all ranks are here; what each has written before is seen by all after.

        Storing the counter publishes the stores before it, and later loads come after the load that saw it: x86_64
        keeps that order by itself. Ranks: all.

        Raises:
            PeerError: a rank has died, or did not come in time.
        """
        self._meetings += 1
        self._words[self._rank * _WORDS] = self._meetings
        self._call(_FUTEX, self._address + self._rank * _LINE, _WAKE, 1 << 30, None, None, 0)
        for rank in self._peers:
            self._wait_for(rank)

    def end_round(self, num_bytes: int) -> None:
        """Meet, check that all have brought as much into their slots of this half, and turn to the other one. Ranks.

        All.

        Raises:
            PeerError: as in `meet`. DdpexpError: the ranks do not reduce the same gradients.
        """
        word = 1 + self.half
        self._words[self._rank * _WORDS + word] = num_bytes
        self.meet()
        self.half = 1 - self.half
        for rank in self._peers:
            theirs = self._words[rank * _WORDS + word]
            if theirs != num_bytes:
                raise DdpexpError(
                    f"rank {rank} brought {theirs} bytes of gradients where rank {self._rank} brought {num_bytes}: "
                    "the sum would be of different parameters. Let the task train the same models on every rank, in "
                    "the same order."
                )

    def sum(self, tensor: Tensor) -> None:
        """Add up over all ranks in their order, in place, between gradients. Shapes: any, contiguous. Ranks: all.

        Raises:
            PeerError, DdpexpError: as in `end_round`.
        """
        for piece in torch.split(tensor.view(-1), self.slot_bytes // tensor.element_size()):
            num_bytes = piece.numel() * piece.element_size()
            places = [slot[:num_bytes].view(piece.dtype) for slot in self.slots[self.half]]
            places[self._rank].copy_(piece)
            self.end_round(num_bytes)
            torch.add(places[0], places[1], out=piece)
            for place in places[2:]:
                piece += place

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the values of `source`, in place, between gradients. Shapes: any, contiguous. Ranks: all.

        Raises:
            PeerError, DdpexpError: as in `end_round`.
        """
        for piece in torch.split(tensor.view(-1), self.slot_bytes // tensor.element_size()):
            num_bytes = piece.numel() * piece.element_size()
            place = self.slots[self.half][source][:num_bytes].view(piece.dtype)
            if self._rank == source:
                place.copy_(piece)
            self.end_round(num_bytes)
            if self._rank != source:
                piece.copy_(place)

    def _wait_for(self, rank: int) -> None:
        words, place = self._words, rank * _WORDS
        for _ in range(_YIELDS):
            if words[place] >= self._meetings:
                return
            os.sched_yield()
        begin = time.monotonic()
        while (seen := words[place]) < self._meetings:
            # Sleep until the counter moves from what was seen, which is its low half for the kernel. A signal ends the
            # sleep, and Python then runs its handler.
            slept = self._call(_FUTEX, self._address + rank * _LINE, _WAIT, seen & 0xFFFFFFFF, self._nap, None, 0)
            if slept == -1 and ctypes.get_errno() == errno.ETIMEDOUT:
                self._look_around(time.monotonic() - begin)

    def _look_around(self, waited_seconds: float) -> None:
        ended = {descriptor for descriptor, _ in self._ends.poll(0)}
        if ended:
            gone = _listed({rank: peer for rank, peer in self._peers.items() if peer.descriptor in ended})
            raise PeerError(
                f"{gone} ended in the middle of the training, so there is no sum over all ranks: see its log."
            )
        if waited_seconds > self._timeout:
            late = _listed(
                {rank: peer for rank, peer in self._peers.items() if self._words[rank * _WORDS] < self._meetings}
            )
            raise PeerError(
                f"{late} did not come to where ranks add up within {self._timeout:g} s, for which rank {self._rank} "
                "waited: it is stopped or busy with something else. See where it is, for example with py-spy dump "
                "--pid PROCESS."
            )


def share(world: World, slot_bytes: int) -> SharedMemory | str:
    """Map one memory into all workers; when one of them cannot, none does, and the reason is returned instead.

    Ranks: all; communicates.
    """
    slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
    size = size_of(world.world_size, slot_bytes)
    token, descriptor, told, problem = secrets.token_hex(8), -1, "", ""
    try:
        if world.is_rank_zero:
            descriptor = _make(size, token)
        told = f"{_host()} {os.getpid()} {descriptor} {token}"
    except (OSError, AttributeError) as error:  # a kernel, or a Python on it, that does not offer all of this
        problem = str(error)
    places = [text.split() for text in _tell(world, told)]
    shared = None
    if all(places):
        try:
            shared = _map(world, size, slot_bytes, places)
        except OSError as error:
            problem = str(error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(_tell(world, problem)) if text]
    if descriptor >= 0:
        os.close(descriptor)  # all have the memory itself now
    return problems[0] if problems or shared is None else shared


def size_of(world_size: int, slot_bytes: int) -> int:
    """Return the size of the memory of all ranks of a host with slots of so many bytes. Units: bytes."""
    return _first_slot(world_size) + 2 * world_size * (-(-slot_bytes // _PAGE) * _PAGE)


def _first_slot(world_size: int) -> int:
    return -(-world_size * _LINE // _PAGE) * _PAGE


def _host() -> str:
    """Name the kernel and the numbering of processes: two ranks with the same see one another under /proc."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OSError(f"shared memory is for Linux on x86_64, and this is {sys.platform} on {platform.machine()}")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def _make(size: int, token: str) -> int:
    descriptor = os.memfd_create("ddpexp-gradients")  # sparse: a page costs memory from its first use
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, token.encode(), _TOKEN)
    return descriptor


def _map(world: World, size: int, slot_bytes: int, places: Sequence[Sequence[str]]) -> SharedMemory:
    if len({host for host, *_ in places}) > 1:
        raise OSError("the workers are not all on one host, or do not see one another's processes")
    _, pid, number, token = places[0]
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    if memory[_TOKEN : _TOKEN + len(token)] != token.encode():
        raise OSError(f"/proc/{pid}/fd/{number} is not rank zero's memory")
    # Every peer takes part in the next collective, so it lives: its number cannot have become another process's.
    numbers = {rank: int(place[1]) for rank, place in enumerate(places) if rank != world.rank}
    peers = {rank: Peer(number, os.pidfd_open(number)) for rank, number in numbers.items()}
    return SharedMemory(memory, world, slot_bytes, peers)


def _tell(world: World, text: str) -> list[str]:
    """Return every rank's text, cut off where it is long. Ranks: all; communicates, in bytes and never in pickles."""
    rows = torch.zeros(world.world_size, _TEXT, dtype=torch.uint8)
    data = text.encode()[:_TEXT]
    rows[world.rank, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in world.sum(rows).tolist()]


def _listed(peers: Mapping[int, Peer]) -> str:
    return " and ".join(f"rank {rank} (process {peer.pid})" for rank, peer in peers.items())
