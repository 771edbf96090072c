"""What torch.distributed and torch.cuda know of this process and do not offer in public."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, only in builds with it; of the other backends


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
