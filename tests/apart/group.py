"""What stands for NCCL: a process group for tensors of the device alone, whose messages gloo carries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.apart.device import NAME, install

LIBRARY = "DDPEXP_TESTS_APART"  # the variable with the path of the compiled device
_DEVICE_METHODS = {
    "allgather": "allgather", "_allgather_base": "_allgather_base", "all_gather_single": "_allgather_base",
    "allgather_coalesced": "allgather_coalesced", "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "alltoall": "alltoall", "alltoall_base": "alltoall_base", "all_to_all_single": "alltoall_base",
    "barrier": "barrier", "broadcast": "broadcast", "gather": "gather", "recv": "recv", "reduce": "reduce",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base", "scatter": "scatter", "send": "send",
}  # fmt: skip
"""What torch calls of a group (also by the names of torch 2.13), and gloo's name of it."""


class Group(dist.ProcessGroup):
    """A process group that refuses tensors of the CPU, as NCCL's does."""

    native: Any  # the module of the device's library

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return dist.distributed_c10d._world.pg_names[self]

    def carry(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Call gloo with the memory of the tensors. It has no means, so these are sums that are divided."""
        options = [one for one in arguments if getattr(one, "reduceOp", None) == dist.ReduceOp.AVG]
        for one in options:
            one.reduceOp = dist.ReduceOp.SUM
        work = getattr(self._gloo, operation)(*(self._on_cpu(operation, one) for one in arguments), **named)
        if options:
            work.wait()
            for tensor in _tensors(arguments[0]):
                tensor.div_(self.size())
        return work

    def _on_cpu(self, operation: str, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            if argument.device.type != NAME:
                raise RuntimeError(f"{operation}: no backend type associated with device type {argument.device}")
            return self.native.on_cpu(argument)
        return [self._on_cpu(operation, one) for one in argument] if isinstance(argument, list) else argument


def _tensors(argument: Any) -> list[Tensor]:
    return [argument] if isinstance(argument, Tensor) else [tensor for one in argument for tensor in _tensors(one)]


def _method(operation: str) -> Callable[..., Any]:
    return lambda group, *arguments, **named: group.carry(operation, *arguments, **named)


for _name, _operation in _DEVICE_METHODS.items():
    setattr(Group, _name, _method(_operation))


def join_by_nccl(world: Any) -> None:
    """Change the module `ddpexp.distributed.world`: GPU workers get the device, and this group for NCCL's."""
    Group.native = install(Path(os.environ[LIBRARY]))
    register: Any = dist.Backend.register_backend
    register(NAME, Group, devices=[NAME])
    init = dist.init_process_group

    def init_process_group(backend: str, device_id: Any, **named: Any) -> None:
        assert (backend, device_id) == ("nccl", torch.device(NAME, 0))
        init(NAME, **named)

    world.dist.is_nccl_available = lambda: True
    world.dist.init_process_group = init_process_group
    world._own_gpu = lambda rank, number: torch.device(NAME, 0)
