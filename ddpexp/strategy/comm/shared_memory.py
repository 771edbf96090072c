"""Shared memory of the workers on one host: two slots and a barrier counter for each of them."""

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
_TOKEN = 64  # offset of the token by which the other ranks recognise rank zero's memory
_PAGE = 4096
_TEXT = 256  # bytes of a message during setup
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # x86_64
_YIELDS = 1000  # about a millisecond: most peers arrive sooner than waking up would take
_WATCH_SECONDS = 0.005  # how often a sleeping rank checks that the others are alive


@dataclass(frozen=True)
class Peer:
    """Another rank on this host."""

    pid: int
    descriptor: int  # a pidfd: readable once the process has ended, and never of another process


class SharedMemory:
    """This rank's view of the memory: `slots[half][rank]`, each `slot_bytes` long.

    In each round every rank writes into its slot of the current half, waits at a barrier, and reads the slots of the
    others. One barrier per round is enough: a rank writes into the same half again two rounds later, after the barrier
    of the round in between, which its peers reach only after they have read the slots of the first round.

    The memory has no name, so that nothing is left behind however the processes end: the kernel frees it with the last.
    """

    def __init__(self, memory: mmap.mmap, world: World, slot_bytes: int, peers: Mapping[int, Peer]) -> None:
        """Use memory created by `share`. Shapes: slots are (slot_bytes,) uint8."""
        size = world.world_size
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.slots = [list(half) for half in everything[_first_slot(size) :].view(2, size, slot_bytes)]
        self.slot_bytes = slot_bytes
        self.half = 0  # the current one
        # For each rank: the number of barriers it has reached, and the bytes it has written to each half.
        self._words = memoryview(memory)[: size * _LINE].cast("Q")
        self._address = everything.data_ptr()
        self._rank = world.rank
        self._peers = peers
        self._exits = select.poll()
        for peer in peers.values():
            self._exits.register(peer.descriptor, select.POLLIN)
        self._timeout = world.timeout_seconds
        self._times = world.times
        self._barriers = 0
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        pointer, word = ctypes.c_void_p, ctypes.c_uint32
        self._call.argtypes = [ctypes.c_long, pointer, ctypes.c_int, word, pointer, pointer, word]
        self._nap = (ctypes.c_long * 2)(0, int(_WATCH_SECONDS * 1e9))  # a struct timespec

    def barrier(self) -> None:
        """Wait for all ranks; afterwards every rank sees what each has written before.

        Storing the counter publishes the stores before it, and later loads come after the load that saw it: x86_64
        guarantees that order. Ranks: all.

        Raises:
            PeerError: a rank has died, or did not arrive in time.
        """
        self._barriers += 1
        self._words[self._rank * _WORDS] = self._barriers
        self._call(_FUTEX, self._address + self._rank * _LINE, _WAKE, 1 << 30, None, None, 0)
        with self._times.collective:
            for rank in self._peers:
                self._wait_for(rank)

    def end_round(self, num_bytes: int) -> None:
        """Wait for all ranks, check that all have written the same number of bytes, and switch to the other half.

        Ranks: all.

        Raises:
            PeerError: as in `barrier`. DdpexpError: the ranks do not reduce the same gradients.
        """
        word = 1 + self.half
        self._words[self._rank * _WORDS + word] = num_bytes
        self.barrier()
        self.half = 1 - self.half
        for rank in self._peers:
            peer_bytes = self._words[rank * _WORDS + word]
            if peer_bytes != num_bytes:
                raise DdpexpError(
                    f"rank {rank} brought {peer_bytes} bytes of gradients where rank {self._rank} brought "
                    f"{num_bytes}: the sum would be of different parameters",
                    suggestion="Let the task train the same models on every rank, in the same order.",
                )

    def sum(self, tensor: Tensor) -> None:
        """Sum over all ranks in their order, in place. Not between `add` and `finish` of a reducer. Ranks: all.

        Raises:
            PeerError, DdpexpError: as in `end_round`.
        """
        for piece in torch.split(tensor.view(-1), self.slot_bytes // tensor.element_size()):
            num_bytes = piece.numel() * piece.element_size()
            parts = [slot[:num_bytes].view(piece.dtype) for slot in self.slots[self.half]]
            parts[self._rank].copy_(piece)
            self.end_round(num_bytes)
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece += part

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the values of `source`, in place. Not between `add` and `finish` of a reducer. Ranks: all.

        Raises:
            PeerError, DdpexpError: as in `end_round`.
        """
        for piece in torch.split(tensor.view(-1), self.slot_bytes // tensor.element_size()):
            num_bytes = piece.numel() * piece.element_size()
            part = self.slots[self.half][source][:num_bytes].view(piece.dtype)
            if self._rank == source:
                part.copy_(piece)
            self.end_round(num_bytes)
            if self._rank != source:
                piece.copy_(part)

    def _wait_for(self, rank: int) -> None:
        words, index = self._words, rank * _WORDS
        for _ in range(_YIELDS):
            if words[index] >= self._barriers:
                return
            os.sched_yield()
        begin = time.monotonic()
        while (seen := words[index]) < self._barriers:
            # Sleep until the counter changes; the kernel compares its low half. A signal ends the sleep, and Python
            # then runs its handler.
            slept = self._call(_FUTEX, self._address + rank * _LINE, _WAIT, seen & 0xFFFFFFFF, self._nap, None, 0)
            if slept == -1 and ctypes.get_errno() == errno.ETIMEDOUT:
                self._check_peers(time.monotonic() - begin)

    def _check_peers(self, waited_seconds: float) -> None:
        exited = {descriptor for descriptor, _ in self._exits.poll(0)}
        if exited:
            gone = _listed({rank: peer for rank, peer in self._peers.items() if peer.descriptor in exited})
            raise PeerError(
                f"{gone} ended in the middle of the training, so there is no sum over all ranks",
                suggestion="See its log.",
            )
        if waited_seconds > self._timeout:
            late = _listed(
                {rank: peer for rank, peer in self._peers.items() if self._words[rank * _WORDS] < self._barriers}
            )
            raise PeerError(
                f"{late} did not come to where ranks add up within {self._timeout:g} s, for which rank "
                f"{self._rank} waited: it is stopped or busy with something else",
                suggestion="See where it is, for example with py-spy dump --pid PROCESS.",
            )


def share(world: World, slot_bytes: int) -> SharedMemory | str:
    """Map shared memory into all workers; returns the reason instead if any of them cannot.

    Ranks: all; communicates.
    """
    slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
    size = size_of(world.world_size, slot_bytes)
    token = secrets.token_hex(8)
    descriptor = -1
    address = ""
    problem = ""
    try:
        if world.is_rank_zero:
            descriptor = _make(size, token)
        address = f"{_host()} {os.getpid()} {descriptor} {token}"
    except (OSError, AttributeError) as error:  # the kernel, or this build of Python, lacks a system call
        problem = str(error)
    addresses = [text.split() for text in _gather_texts(world, address)]
    shared = None
    if all(addresses):
        try:
            shared = _map(world, size, slot_bytes, addresses)
        except OSError as error:
            problem = str(error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(_gather_texts(world, problem)) if text]
    if descriptor >= 0:
        os.close(descriptor)  # all ranks have mapped the memory
    return problems[0] if problems or shared is None else shared


def size_of(world_size: int, slot_bytes: int) -> int:
    """Return the size of the shared memory of a host for slots of this size. Units: bytes."""
    return _first_slot(world_size) + 2 * world_size * (-(-slot_bytes // _PAGE) * _PAGE)


def _first_slot(world_size: int) -> int:
    return -(-world_size * _LINE // _PAGE) * _PAGE


def _host() -> str:
    """Identify the kernel and PID namespace: two ranks with the same ones see each other under /proc."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OSError(f"shared memory is for Linux on x86_64, and this is {sys.platform} on {platform.machine()}")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def _make(size: int, token: str) -> int:
    descriptor = os.memfd_create("ddpexp-gradients")  # sparse: pages are allocated on first use
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, token.encode(), _TOKEN)
    return descriptor


def _map(world: World, size: int, slot_bytes: int, addresses: Sequence[Sequence[str]]) -> SharedMemory:
    if len({host for host, *_ in addresses}) > 1:
        raise OSError("the workers are not all on one host, or do not see one another's processes")
    _, pid, number, token = addresses[0]
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    if memory[_TOKEN : _TOKEN + len(token)] != token.encode():
        raise OSError(f"/proc/{pid}/fd/{number} is not rank zero's memory")
    # Every peer takes part in the next collective, so it is alive: its PID cannot have been reused.
    pids = {rank: int(address[1]) for rank, address in enumerate(addresses) if rank != world.rank}
    peers = {rank: Peer(pid, os.pidfd_open(pid)) for rank, pid in pids.items()}
    return SharedMemory(memory, world, slot_bytes, peers)


def _gather_texts(world: World, text: str) -> list[str]:
    """Return the texts of all ranks, truncated. Ranks: all; communicates bytes, never pickles."""
    rows = torch.zeros(world.world_size, _TEXT, dtype=torch.uint8)
    data = text.encode()[:_TEXT]
    rows[world.rank, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in world.sum(rows).tolist()]


def _listed(peers: Mapping[int, Peer]) -> str:
    return " and ".join(f"rank {rank} (process {peer.pid})" for rank, peer in peers.items())
