"""Refuses collectives that a callback calls: ranks that are elsewhere would take them for their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from ddpexp.errors import DdpexpError

_COLLECTIVE = re.compile(r"_?(all|barrier|broadcast|gather|monitored_barrier|recv|reduce|scatter|send)\w*")
"""The methods of a process group by which ranks communicate, under the names that any version of torch gives them."""


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
            for name in filter(_COLLECTIVE.fullmatch, dir(dist.ProcessGroup)):
                method = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, guard._guarded(name.strip("_"), method))
        return cls._only

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            if self.forbids:
                raise DdpexpError(
                    f"it calls the collective {name}, which the other ranks do not call: ranks would wait for one "
                    "another or mix up their collectives. A callback must not communicate unless its class sets "
                    "communicates = True and "
                    "every rank calls it"
                )
            return method(*arguments, **named)

        return call
