"""Decide which rank hangs the job, from what all commands report about theirs, and describe it for the user.

Used by the watchdog of the leading command.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddpexp.errors import Failure
from ddpexp.launch.supervise.collectives import Blocked, find_blocked
from ddpexp.launch.supervise.stacks import Frame, Stack, shown
from ddpexp.launch.workers.collectives import unpack

_BUSY = 0.3  # of a CPU
_WAITS = re.compile(
    r"/torch/distributed/"
    r"|/ddpexp/(strategy/comm/shared_memory|strategy/pipeline/links|distributed/world|launch/workers/control)\.py$"
)
_MAY_WAIT = re.compile(r"/torch/autograd/graph\.py$|/ddpexp/strategy/comm/reduce\.py$")  # unless they are computing
LOADER_SECONDS = 2.0  # extra time in which the DataLoader itself can report its hang, with more detail

How = Literal["absent", "stopped", "mute", "busy", "asleep", "waits", "orphaned"]


@dataclass(frozen=True)
class Account:
    """What a command observes of one of its ranks."""

    rank: int
    host: str
    pid: int | None
    phase: str
    step: int | None
    silent_seconds: float
    limit_seconds: float
    key: str  # of the limit, below trainer.timeout
    # absent: not started. mute: it wrote no stack. waits: for other ranks. orphaned: its fork server is stopped.
    how: How
    where: str | None = None
    stack: str | None = None
    is_ours: bool = True  # it is in ddpexp's code, which all ranks run alike
    record: str | None = None  # with NCCL, the collectives that it has called, packed

    @property
    def overdue(self) -> bool:
        """Return whether it has been silent for longer than its limit."""
        return self.silent_seconds > self.limit_seconds


def verdict(accounts: Sequence[Account], on_gpus: bool = False) -> Failure | None:
    """Return which rank blocks the others, from the accounts of all commands.

    None while it may be a rank that is still within its limit.
    """
    overdue = [account for account in accounts if account.overdue]
    if not overdue:
        return None
    stopped = [account for account in accounts if account.how == "stopped"]  # within its own limit or not
    blocked = find_blocked({account.rank: unpack(account.record) if account.record else None for account in accounts})
    active = [account for account in overdue if account.how != "waits"]
    orphaned = [account for account in overdue if account.how == "orphaned"]
    silent = [account for account in overdue if account.how in ("absent", "mute")]
    if stopped or orphaned:
        cause = min(stopped or orphaned, key=_behind)
    elif silent:
        cause = min(silent, key=_behind)
    elif blocked is not None:
        return _verdict_on_blocked(blocked, accounts, overdue)
    elif len(overdue) < len(accounts) and (on_gpus or not active):
        return None
    else:
        # Where all wait for others, a rank that does so in the recipe's own code is where the others do not arrive.
        cause = min(active or [account for account in overdue if not account.is_ours] or overdue, key=_behind)
    alone = len(accounts) == 1
    everybody = not active and not stopped and not orphaned and not alone
    return Failure(
        rank=cause.rank,
        host=cause.host,
        kind="Hang",
        message=_describe(cause, accounts if everybody else (), alone),
        step=cause.step,
        phase=cause.phase,
        traceback=f"{cause.stack}\n" if cause.stack else None,
    )


def _verdict_on_blocked(blocked: Blocked, accounts: Sequence[Account], overdue: Sequence[Account]) -> Failure | None:
    """Return the failure of the rank for which others wait in a collective of NCCL.

    None while it may be within its limit. Where all have called it, that is as long as any rank is.
    """
    if blocked.kind in ("nobody", "different", "circle") and len(overdue) < len(accounts):
        return None
    causes = [account for account in overdue if account.rank in blocked.ranks]
    if not causes:
        return None
    cause = min(causes, key=_behind)
    return Failure(
        rank=cause.rank,
        host=cause.host,
        kind="Hang",
        message=_describe_blocked(blocked, cause, accounts),
        step=cause.step,
        phase=cause.phase,
        traceback=f"{cause.stack}\n" if cause.stack else None,
    )


def _describe_blocked(blocked: Blocked, cause: Account, accounts: Sequence[Account]) -> str:
    text = f"{_silence(cause)}: {blocked.text}"
    if blocked.kind in ("different", "circle"):
        return f"{text}. Do all take the same path through the recipe? All ranks' stacks are in their logs."
    if blocked.kind == "nobody":
        hosts = sorted({account.host for account in accounts if account.rank in blocked.ranks})
        place = (
            f"on {hosts[0]}" if len(hosts) == 1 else f"on one of {', '.join(hosts[:8])}, or the network between them"
        )
        return (
            f"{text}: no rank is behind, so one of their GPUs hangs, or a link between them, {place}. Rank "
            f"{cause.rank} is only the first of them. NCCL_DEBUG=INFO shows which connections NCCL uses; raise the key "
            "if it only needs longer."
        )
    where = f"; rank {cause.rank} is {cause.where}" if cause.where else ""
    return f"{text}{where}. All ranks' stacks are in their logs; raise the key if it only needs longer."


def _silence(cause: Account) -> str:
    limit = (
        f"trainer.timeout.{cause.key}={cause.limit_seconds - (LOADER_SECONDS if cause.key == 'data_seconds' else 0):g}"
    )
    return f"no progress for {cause.silent_seconds:.0f} s ({limit})"


def _behind(account: Account) -> tuple[int, float, int]:
    """Return a sort key: the rank that is furthest behind comes first."""
    return (-1 if account.step is None else account.step, -account.silent_seconds, account.rank)


def _describe(cause: Account, all_wait: Sequence[Account], alone: bool) -> str:
    text = _silence(cause)
    where = f" {cause.where}" if cause.where else ""
    how = {
        "absent": "its process was not started",
        "stopped": f"its process {cause.pid} is stopped (by SIGSTOP or a debugger)",
        "orphaned": f"the fork server of its host, process {cause.where}, is stopped (by SIGSTOP or a debugger)",
        "mute": f"its process {cause.pid} does not answer at all: it waits for a disk or a device",
        "busy": f"it is busy{where}",
        "asleep": f"it waits{where}",
        "waits": f"it waits for other ranks{where}",
    }[cause.how]
    if all_wait:
        places = "; ".join(
            f"rank {account.rank}{f' {account.where}' if account.where else ''}" for account in all_wait[:8]
        )
        advice = (
            "Can they reach one another over the network? ddpexp doctor measures it."
            if cause.key == "init_seconds"
            else "Do all take the same path through the recipe?"
        )
        return f"{text}: every rank waits for another ({places}). {advice}"
    waiting = "" if alone else ", and the others wait for it"
    return f"{text}: {how}{waiting}. All ranks' stacks are in their logs; raise the key if it only needs longer."


def classify(stacks: Sequence[Stack], used: float) -> tuple[How, Frame | None, str | None]:
    """Return what a rank does, where, and its formatted stack, from the stacks of its threads.

    `used` is the share of a CPU that it uses or waits for.
    """
    if not stacks:
        return "mute", None, None
    main = stacks[-1]
    formatted = "\n".join(f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in main)
    inner = next((frame for frame in main if not frame.file.endswith("/threading.py")), main[0])
    waits = bool(_WAITS.search(inner.file)) or (bool(_MAY_WAIT.search(inner.file)) and used < _BUSY)
    if inner.file.endswith("/ddpexp/checkpoint/writer.py"):  # on rank zero its thread waits for the others' parts
        waits = any(frame.function == "_awaited" for other in stacks[:-1] for frame in other)
    how: How = "busy" if used > _BUSY else "asleep"
    if waits:
        how = "waits"
    return how, shown(main), f"Stack, the innermost call first:\n{formatted}"
