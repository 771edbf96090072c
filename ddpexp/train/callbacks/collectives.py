"""Refuses collectives that a callback calls: ranks that are elsewhere would take them for their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from ddpexp.errors import DdpexpError

_METHODS = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv",
    "recv_anysource", "reduce", "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter",
    "send",
)  # fmt: skip
"""What torch.distributed's functions call of a process group, whichever group that is."""


class CollectiveGuard:
    """Raises an error where Python code calls a collective while `forbids` is set.

    Only then can it be raised before any rank waits. It wraps the methods of torch's class, since a callback may have
    imported any function of torch.distributed by its name; the reduction of gradients does not pass through Python.
    """

    _only: CollectiveGuard | None = None

    def __init__(self) -> None:
        """Forbid nothing yet."""
        self.forbids = False

    @classmethod
    def installed(cls) -> CollectiveGuard:
        """Return the guard of this process, which is installed by the first call."""
        if cls._only is None:
            cls._only = guard = cls()
            for name in _METHODS:
                method = getattr(dist.ProcessGroup, name, None)
                if method is not None:
                    setattr(dist.ProcessGroup, name, guard._guarded(name.strip("_"), method))
        return cls._only

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            if self.forbids:
                raise DdpexpError(
                    f"it calls the collective {name}, for which the other ranks would wait or which they would take "
                    "for their own. A callback must not communicate unless its class sets communicates = True and "
                    "every rank calls it"
                )
            return method(*arguments, **named)

        return call
