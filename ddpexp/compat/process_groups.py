"""What torch.distributed and torch.cuda know of this process and do not offer in public."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, only in builds with it; of the other backends


FUNCTIONAL = "torch.distributed._functional_collectives"
"""The module of collectives that return new tensors.

Private: `torch.distributed._functional_collectives`; torch 2.10 to 2.13.
Why: torch recommends it from 2.13 on, in place of `torch.distributed.nn.functional`.
When it goes: nothing fails: such a collective in a task's `step` is not noticed.
"""
_RESOLVERS = ("_resolve_group", "_resolve_group_name")  # of a group; from torch 2.13 on, and before it


def clone_of_store() -> Any:
    """Return a connection to the store of the default process group, which another thread may use.

    Private: `torch.distributed.distributed_c10d._get_default_store`; torch 2.10 to 2.13.
    Why: the store of a process group cannot be asked for.
    When it goes: keep the store that `World.join` makes.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def is_forked_from_cuda() -> bool:
    """Return whether this process was forked from one that had initialised CUDA, which it therefore cannot use.

    Private: `torch.cuda._is_in_bad_fork`; torch 2.10 to 2.13.
    Why: `torch.cuda.is_initialized` does not distinguish it, and `torch.cuda.init` raises a RuntimeError.
    When it goes: call `torch.cuda.init` and look for "forked" in its error.
    """
    return torch.cuda._is_in_bad_fork()


def flight_records() -> list[str]:
    """Return what the flight recorders of this torch hold, each as JSON; none if it has no recorder.

    Private: `torch._C._distributed_c10d._dump_nccl_trace_json` and `_dump_fr_trace_json`; torch 2.10 to 2.13.
    Why: torch writes records to a file when NCCL has timed out, and nobody can ask for them before.
    When it goes: nothing fails: the supervisor decides without them, and its messages name no collectives.
    """
    module = torch._C._distributed_c10d
    return [getattr(module, name)() for name in _DUMPS if name in dir(module)]


@contextmanager
def functional_collectives_told(on_call: Callable[[str], None]) -> Iterator[None]:
    """Call `on_call` with the name of each collective of that module, before it is called inside of the block.

    Private: `torch.distributed._functional_collectives._resolve_group` and `_resolve_group_name`; torch 2.10 to 2.13.
    Why: these collectives pass by the methods of process groups; each of them looks up its group first.
    When it goes: nothing fails: such a collective in a task's `step` is not noticed.
    """
    module = sys.modules.get(FUNCTIONAL)
    resolvers = {name: vars(module)[name] for name in _RESOLVERS if name in vars(module)} if module is not None else {}

    def told(resolver: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(resolver)
        def resolve(*arguments: Any, **named: Any) -> Any:
            if not torch.compiler.is_compiling():
                on_call(sys._getframe(1).f_code.co_name)
            return resolver(*arguments, **named)

        return resolve

    for name, resolver in resolvers.items():
        setattr(module, name, told(resolver))
    try:
        yield
    finally:
        for name, resolver in resolvers.items():
            setattr(module, name, resolver)
