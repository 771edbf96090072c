"""Decide which rank the others wait for, from the collectives that each rank has called; used by the watchdog.

A rank that waits for its GPU spins, so its stack shows neither that it waits nor for whom. The records of all ranks do:
who has not called what the others have, who has called something else, or whose GPU has not finished it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpexp.launch.workers.collectives import Call, Group, Record

# Every rank passes the same number of elements of the same type.
_EQUAL_SIZES = {
    "all_reduce", "allreduce_coalesced", "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "_all_gather_base",
    "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single",
}  # fmt: skip

# missing: it has not called what others wait for. different: it has called something else. device: its GPU has not
# finished, or not begun, what others' have. circle: ranks wait for one another in different groups. silent: it did not
# report what it has called. nobody: all have called it.
Kind = Literal["missing", "different", "device", "circle", "silent", "nobody"]


@dataclass(frozen=True)
class Blocked:
    """Why ranks wait in a collective."""

    kind: Kind
    ranks: Sequence[int]  # that block the others; `nobody`: all that wait
    text: str


@dataclass(frozen=True)
class _Wait:
    """A call of a process group that has not completed everywhere."""

    group: str
    call: str
    waiting: Sequence[int]  # have called it, and it is not completed there
    absent: Sequence[int]  # have not called it
    finished: Sequence[int]
    silent: Sequence[int]  # nothing is known of them
    started: Sequence[int]  # of those that wait: their GPU has begun it; only known with TORCH_NCCL_ENABLE_TIMING=1


def find_blocked(records: Mapping[int, Record | None]) -> Blocked | None:
    """Return who blocks the ranks that wait in a collective; None if nobody waits in one, or nothing is known.

    `records` are those of all ranks by rank; None for a rank that did not report.
    """
    waits: list[_Wait] = []
    for (name, ranks), members in _by_group(records).items():
        label = _label(name, members)
        different = _different(label, members)
        if different is not None:
            return different
        wait = _wait(label, ranks, members, records)
        if wait is not None:
            waits.append(wait)
    return _blocked(waits)


def _by_group(
    records: Mapping[int, Record | None],
) -> Mapping[tuple[str, tuple[int, ...]], Mapping[int, Group]]:
    """Return what each rank has called, by group. Groups of different members may have the same name."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, Group]] = {}
    for rank, record in records.items():
        for group in record.groups if record is not None else ():
            ranks = group.ranks or tuple(sorted(records))
            groups.setdefault((group.name, ranks), {})[rank] = group
    return groups


def _label(name: str, members: Mapping[int, Group]) -> str:
    description = next(iter(members.values())).description
    if description == "default_pg":
        return "the default process group"
    return f"process group {name}" + (f" ({description})" if description not in ("", "undefined") else "")


def _different(label: str, members: Mapping[int, Group]) -> Blocked | None:
    """Return the first call for which ranks have called different operations, unless all have completed it."""
    completed = min(group.completed for group in members.values())
    numbers = sorted({number for group in members.values() for number in group.calls if number > completed})
    for number in numbers:
        calls = {rank: group.calls[number] for rank, group in members.items() if number in group.calls}
        ranks_of: dict[tuple[str, int, str], list[int]] = {}
        for rank, call in calls.items():
            ranks_of.setdefault(_signature(call), []).append(rank)
        if len(ranks_of) < 2:
            continue
        fewest = min(ranks_of.values(), key=lambda ranks: (len(ranks), ranks))
        parts = "; ".join(f"{_ranks(ranks)} {calls[ranks[0]]}" for ranks in ranks_of.values())
        text = f"the ranks called different collective operations as number {number} of {label}: {parts}"
        return Blocked("different", fewest, text)
    return None


def _signature(call: Call) -> tuple[str, int, str]:
    if call.operation not in _EQUAL_SIZES:
        return call.operation, 0, ""
    return call.operation, call.elements, call.sizes.partition("[")[0]


def _wait(
    label: str, ranks: Sequence[int], members: Mapping[int, Group], records: Mapping[int, Record | None]
) -> _Wait | None:
    pending = [group for group in members.values() if group.enqueued > group.completed]
    if not pending:
        return None
    number = min(group.completed for group in pending) + 1
    waiting: list[int] = []
    absent: list[int] = []
    finished: list[int] = []
    silent: list[int] = []
    for rank in ranks:
        group, record = members.get(rank), records.get(rank)
        if group is None:
            # A whole record without the group: its first call is still to come.
            (absent if record is not None and record.is_whole else silent).append(rank)
        elif group.enqueued < number:
            absent.append(rank)
        else:
            (finished if group.completed >= number else waiting).append(rank)
    call = next((group.calls[number] for group in pending if number in group.calls), None)
    if call is None:
        shown = f"collective {number} of {label}"
    else:
        sizes = f" ({call.sizes})" if call.sizes else ""
        shown = f"{call.operation} number {number} of {label}{sizes}"
    calls = {rank: members[rank].calls.get(number) for rank in waiting}
    started = [rank for rank, known in calls.items() if known is not None and known.state == "started"]
    return _Wait(label, shown, waiting, absent, finished, silent, started)


def _blocked(waits: Sequence[_Wait]) -> Blocked | None:
    waiting = {rank for wait in waits for rank in wait.waiting}
    for wait in waits:
        roots = [rank for rank in wait.absent if rank not in waiting]
        if roots:
            text = f"{_ranks(roots)} {_have(roots)} not called {wait.call}, for which {_wait_for(wait.waiting)}"
            return Blocked("missing", roots, text)
    for wait in waits:
        if wait.silent:
            text = (
                f"{_ranks(wait.silent)} did not report what was called there, and {_wait_for(wait.waiting)} in "
                f"{wait.call}"
            )
            return Blocked("silent", wait.silent, text)
    circle = [wait for wait in waits if wait.absent]
    if circle:
        parts = "; ".join(f"{_wait_for(wait.waiting)} for {_ranks(wait.absent)} in {wait.call}" for wait in circle)
        text = f"the ranks use process groups in different orders: {parts}"
        return Blocked("circle", sorted({rank for wait in circle for rank in wait.absent}), text)
    for wait in waits:
        if wait.finished:
            return _behind(wait, wait.waiting, "finished", wait.finished)
    for wait in waits:
        not_started = [rank for rank in wait.waiting if rank not in wait.started]
        if wait.started and not_started:
            return _behind(wait, not_started, "begun", wait.started)
    if waits:
        wait = waits[0]
        return Blocked(
            "nobody", wait.waiting, f"{_ranks(wait.waiting)} have called {wait.call}, and no GPU has finished it"
        )
    return None


def _behind(wait: _Wait, behind: Sequence[int], what: str, ahead: Sequence[int]) -> Blocked:
    subject = f"the GPU{'s' if len(behind) > 1 else ''} of {_ranks(behind)}"
    text = f"{subject} {_have(behind)} not {what} {wait.call}, which {_ranks(ahead)} {_have(ahead)} {what}"
    return Blocked("device", behind, text)


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait_for(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a message: `rank 3`, `ranks 0, 1 and 5`, `ranks 0 to 7`, `ranks 0, 2, 4 and 12 more`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
