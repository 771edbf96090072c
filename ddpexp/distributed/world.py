"""This process's rank among the workers, and their collectives: the only module that sets up torch.distributed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddpexp.compat.process_groups import clone_of_store, is_forked_from_cuda
from ddpexp.distributed.times import Times
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import STORE_FD
from ddpexp.system.gpus import NUMBER, VISIBLE
from ddpexp.system.network import interface_variables, is_loopback
from ddpexp.system.text import counted


class StoreMailbox:
    """Named messages in the ranks' store: for what must not wait for a training step."""

    def __init__(self, store: Any) -> None:
        """Use a connection to the ranks' store that no other thread uses; None for a single process."""
        self._store = store
        self._messages: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        """Store a message."""
        if self._store is None:
            self._messages[name] = text
        else:
            self._store.set(name, text)

    def take(self, name: str) -> str | None:
        """Remove and return a message, or None if it is not there (yet). Does not wait."""
        if self._store is None:
            return self._messages.pop(name, None)
        if not self._store.check([name]):
            return None
        text: str = self._store.get(name).decode()
        self._store.delete_key(name)
        return text


class Memory(Protocol):
    """Collectives through the shared memory of one host, which are faster than the backend's."""

    def sum(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place. Ranks: all; communicates."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the values of `source`, in place. Ranks: all; communicates."""
        ...


@dataclass(frozen=True)
class World:
    """A worker's rank and its collectives, which do nothing at world size 1."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    timeout_seconds: float = 1800.0  # of collectives and of joining
    memory: Memory | None = None  # carries sums and broadcasts; None: the backend
    group: Any = None  # the process group, of some of the ranks; None: all of them
    times: Times = field(default_factory=Times, compare=False)  # where this process's time goes

    @classmethod
    def join(cls, layout: Layout, timeout_seconds: float = 1800.0, environ: Mapping[str, str] = os.environ) -> World:
        """Read the rank from the environment variables and join the other ranks.

        Ranks: all; returns when all have joined.
        """
        rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
        size, local_size = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        if layout.device == "cuda":
            device = _own_gpu(rank, int(environ.get(NUMBER, local_rank)))
        else:
            device = torch.device("cpu")
        available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
        if not available[layout.backend]():
            raise RefusedError(
                f"This torch was built without {layout.backend}",
                key="trainer.backend",
                value=layout.backend,
                suggestion="Use trainer.backend=auto.",
            )
        if size > 1:
            if is_loopback(environ["MASTER_ADDR"]):
                os.environ.update(interface_variables("lo"))
            timeout = timedelta(seconds=timeout_seconds)
            dist.init_process_group(
                layout.backend,
                timeout=timeout,
                store=_store(rank, timeout, environ),
                rank=rank,
                world_size=size,
                device_id=device if layout.backend == "nccl" else None,
            )
        node_rank = int(environ.get("GROUP_RANK", rank // local_size))
        return cls(rank, local_rank, node_rank, size, local_size, device, timeout_seconds)

    @classmethod
    def alone(cls, device: torch.device | None = None) -> World:
        """Return the world of a process that is no worker, on the CPU if no device is given."""
        return cls(0, 0, 0, 1, 1, torch.device("cpu") if device is None else device)

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this is the rank that writes files and logs."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place. Ranks: all; communicates."""
        self._check_device("sum", tensor)
        if self.memory is not None:
            self.memory.sum(tensor)
        elif self.world_size > 1:
            with self.times.collective:
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Take the largest values over all ranks, in place. Ranks: all; communicates."""
        self._check_device("max", tensor)
        if self.world_size > 1:
            with self.times.collective:
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, tensor: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Return the rows of all ranks, in the order of the ranks.

        Ranks may have differently many rows; a caller that knows how many, `rows`, saves asking for them. Gradients
        pass through it: in backward, each rank's rows get the sum of the gradients of all ranks' losses, which is right
        where the losses of the ranks are added up, as `backward` of a micro-batch adds them up.

        Shapes: (rows of this rank, ...) to (rows of all ranks, ...). Ranks: all; communicates, also in backward.
        """
        self._check_device("gather", tensor)
        if not tensor.dim():
            raise DdpexpError("World.gather was given a single number", suggestion="Give it rows: tensor.reshape(1).")
        if self.world_size == 1:
            return tensor
        known = self.rows_of_ranks([len(tensor)])[0] if rows is None else rows
        return _Gather.apply(tensor, self, known)  # type: ignore[no-any-return, no-untyped-call]

    def rows_of_ranks(self, own: Sequence[int]) -> list[list[int]]:
        """Return how many rows each rank has of each of some tensors, given this rank's. Ranks: all; communicates."""
        if self.world_size == 1:
            return [[number] for number in own]
        rows = torch.zeros(len(own), self.world_size, dtype=torch.int64, device=self.device)
        rows[:, self.rank] = torch.tensor(own, device=self.device)
        numbers: list[list[int]] = self.sum(rows).tolist()
        return numbers

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Give every rank the values of `source`, in place. Ranks: all; communicates."""
        self._check_device("broadcast", tensor)
        if self.memory is not None:
            self.memory.broadcast(tensor, source)
        elif self.world_size > 1:
            with self.times.collective:
                dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def all_gather(self, received: Sequence[Tensor], sent: Tensor, async_op: bool = False) -> Any:
        """Receive what each rank sends; return None, or what to wait for if `async_op`.

        Shapes: one tensor of the shape of `sent` for each rank. Ranks: all of two or more; communicates.
        """
        self._check_device("all_gather", sent, *received)
        with nullcontext() if async_op else self.times.collective:
            return dist.all_gather(list(received), sent, group=self.group, async_op=async_op)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send each rank its part of a tensor; return None, or what to wait for if `async_op`.

        Shapes: (n,), cut in the order of the ranks into parts of these sizes, which are equal if they are None.
        Ranks: all of two or more; communicates.
        """
        self._check_device("all_to_all", received, sent)
        with nullcontext() if async_op else self.times.collective:
            return dist.all_to_all_single(received, sent, received_sizes, sent_sizes, self.group, async_op)

    def send(self, tensor: Tensor, to: int) -> dist.Work:
        """Send a tensor to a rank, which receives it; return what to wait for."""
        self._check_device("send", tensor)
        work = dist.isend(tensor, group=self.group, group_dst=to)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int) -> None:
        """Wait for what a rank sends, and write it into a tensor."""
        self._check_device("receive", tensor)
        work = dist.irecv(tensor, group=self.group, group_src=source)
        assert work is not None
        with self.times.collective:
            work.wait()

    def _check_device(self, operation: str, *tensors: Tensor) -> None:
        """Check that a collective gets what its backend can carry; NCCL's own error does not say where from.

        Raises:
            DdpexpError: a tensor is on another device.
        """
        for tensor in tensors:
            if tensor.device != self.device:
                raise DdpexpError(
                    f"World.{operation} was given a tensor on {tensor.device}, but the workers communicate tensors on "
                    f"their own device, {self.device} on rank {self.rank}",
                    suggestion="Move it there first, with tensor.to(world.device).",
                )

    def gather_values(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order. Shapes: what JSON can hold. Ranks: all; communicates."""
        data = json.dumps(value).encode()
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(data)
        ends = self.sum(sizes).cumsum(0).tolist()
        texts = torch.zeros(ends[-1], dtype=torch.uint8)
        texts[ends[self.rank] - len(data) : ends[self.rank]] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everything = bytes(self.sum(texts.to(self.device)).tolist())
        return [json.loads(everything[end - size : end]) for end, size in zip(ends, sizes.tolist(), strict=True)]

    def mailbox(self) -> StoreMailbox:
        """Return a mailbox shared by all ranks, with a connection that a thread of its own may use. Ranks: any."""
        if self.world_size == 1:
            return StoreMailbox(None)
        return StoreMailbox(clone_of_store())

    def barrier(self) -> None:
        """Wait until all ranks are here. Ranks: all; communicates."""
        if self.world_size > 1:
            with self.times.collective:
                dist.barrier(group=self.group)


class _Gather(torch.autograd.Function):
    """Rows of all ranks; in backward each rank gets the sum of all ranks' gradients of its own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World, rows: Sequence[int]) -> Tensor:
        """Receive the rows of each rank, of which there may be differently many. Ranks: all; communicates."""
        ctx.world, ctx.rows = world, rows
        sent = tensor.new_zeros(max(rows), *tensor.shape[1:])
        sent[: len(tensor)] = tensor
        received = [torch.empty_like(sent) for _ in rows]
        # As bytes, since backends do not carry every dtype.
        world.all_gather([one.reshape(-1).view(torch.uint8) for one in received], sent.reshape(-1).view(torch.uint8))
        return torch.cat([one[:number] for one, number in zip(received, rows, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Add up what the ranks' losses give. Ranks: all; communicates."""
        total = ctx.world.sum(gradient.contiguous().clone())
        first = sum(ctx.rows[: ctx.world.rank])
        return total[first : first + ctx.rows[ctx.world.rank]], None, None


def _own_gpu(rank: int, number: int) -> torch.device:
    """Make a GPU this process's current one and return it.

    Raises:
        RefusedError: CUDA does not show it, or was initialised before the process was forked.
    """
    if is_forked_from_cuda():
        raise RefusedError(
            f"rank {rank} was forked from a process that had initialised CUDA, and cannot use it",
            suggestion="Do not call CUDA while a module is imported, or start each worker as a new "
            "interpreter with launcher=spawn launcher.start_method=spawn.",
        )
    count = torch.cuda.device_count()
    if number >= count:
        visible = os.environ.get(VISIBLE)
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise RefusedError(
            f"rank {rank} uses GPU {number}, counted from 0, but CUDA shows it {counted(count, 'GPU')}{shown}",
            suggestion="Use a smaller trainer.gpus, or make more GPUs visible; `nvidia-smi -L` lists the GPUs.",
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _store(rank: int, timeout: timedelta, environ: Mapping[str, str]) -> TCPStore:
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    listening = environ.get(STORE_FD)
    if rank == 0 and listening:
        # torch takes ownership of the socket and closes it, so it gets a descriptor of its own.
        descriptor = socket.socket(fileno=int(listening)).detach()
        return TCPStore(
            host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
        )
    return TCPStore(host, port, is_master=rank == 0 and not listening, timeout=timeout, wait_for_workers=False)
