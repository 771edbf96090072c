"""Who this worker is among the others, and how they reduce: the only room that asks torch.distributed."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import STORE_FD
from ddpexp.system.network import is_loopback


class StoreMailbox:
    """Texts by name, which any rank puts up and any takes down: for what must not wait for a step of the training."""

    def __init__(self, store: Any) -> None:
        """Use a connection to the ranks' store that nobody else waits on; None: this process alone."""
        self._store = store
        self._own: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        """Put a text up."""
        if self._store is None:
            self._own[name] = text
        else:
            self._store.set(name, text)

    def take(self, name: str) -> str | None:
        """Take a text down; None when it is not up (yet). Does not wait."""
        if self._store is None:
            return self._own.pop(name, None)
        if not self._store.check([name]):
            return None
        text: str = self._store.get(name).decode()
        self._store.delete_key(name)
        return text


class Memory(Protocol):
    """What is faster than the backend: the memory that the workers of one host share."""

    def sum(self, tensor: Tensor) -> None:
        """Add up over all ranks, in place. Ranks: all; communicates."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the values of `source`, in place. Ranks: all; communicates."""
        ...


@dataclass(frozen=True)
class World:
    """A worker's place: every method is harmless at world size 1."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    patience_seconds: float = 1800.0  # for a rank that does not come to where this one waits for it
    memory: Memory | None = None  # what sums and broadcasts go through; None: the backend

    @classmethod
    def join(cls, layout: Layout, patience_seconds: float = 1800.0, environ: Mapping[str, str] = os.environ) -> World:
        """Read the place from the six variables and meet the others.

        Ranks: all; returns when all have joined.
        """
        rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
        size, local_size = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        if layout.device == "cuda":
            number = int(environ.get("DDPEXP_GPU", local_rank))
            if number >= torch.cuda.device_count():
                raise RefusedError(
                    f"rank {rank} wants GPU {number}, but it sees {torch.cuda.device_count()}. Is trainer.gpus too "
                    "large?"
                )
            torch.cuda.set_device(number)
            device = torch.device("cuda", number)
        else:
            device = torch.device("cpu")
        available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
        if not available[layout.backend]():
            raise RefusedError(
                f"trainer.backend={layout.backend}: this torch was built without {layout.backend}. Use auto."
            )
        if size > 1:
            if is_loopback(environ["MASTER_ADDR"]):
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
            patience = timedelta(seconds=patience_seconds)
            dist.init_process_group(
                layout.backend,
                timeout=patience,
                store=_store(rank, patience, environ),
                rank=rank,
                world_size=size,
                device_id=device if layout.backend == "nccl" else None,
            )
        node_rank = int(environ.get("GROUP_RANK", rank // local_size))
        return cls(rank, local_rank, node_rank, size, local_size, device, patience_seconds)

    @property
    def is_rank_zero(self) -> bool:
        """Tell whether this worker writes for all."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over all ranks, in place. Ranks: all; communicates."""
        if self.memory is not None:
            self.memory.sum(tensor)
        elif self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Give every rank the values of `source`, in place. Ranks: all; communicates."""
        if self.memory is not None:
            self.memory.broadcast(tensor, source)
        elif self.world_size > 1:
            dist.broadcast(tensor, source)
        return tensor

    def board(self) -> StoreMailbox:
        """Return a board of texts that all ranks see, for a thread of its own. Ranks: any."""
        if self.world_size == 1:
            return StoreMailbox(None)
        store: Any = dist.distributed_c10d._get_default_store()
        return StoreMailbox(store.clone())

    def barrier(self) -> None:
        """Wait until all ranks are here. Ranks: all; communicates."""
        if self.world_size > 1:
            dist.barrier()


def _store(rank: int, patience: timedelta, environ: Mapping[str, str]) -> TCPStore:
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    listening = environ.get(STORE_FD)
    if rank == 0 and listening:
        # torch takes the socket over and closes it, so it gets a descriptor of its own.
        own = socket.socket(fileno=int(listening)).detach()
        return TCPStore(host, port, is_master=True, timeout=patience, wait_for_workers=False, master_listen_fd=own)
    return TCPStore(host, port, is_master=rank == 0 and not listening, timeout=patience, wait_for_workers=False)
