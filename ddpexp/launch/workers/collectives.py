"""What a rank has called collectively: a compact form of torch's flight recorder, which fits into its shared page.

The rank makes it from the recorder's JSON (`ddpexp.distributed.flight_recorder`); the supervisor's watchdog reads it.
Knows nothing of torch. Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.10 of the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NEWEST_CALLS = 24  # of a group, beside those that are not completed
_PENDING_CALLS = 8  # the oldest that are not completed


@dataclass(frozen=True)
class Call:
    """One collective operation of a process group."""

    operation: str  # such as all_reduce
    sizes: str  # of its inputs with their types, such as Float[1000]
    elements: int
    state: str  # scheduled (on the host), started (only with TORCH_NCCL_ENABLE_TIMING=1) or completed

    def __str__(self) -> str:
        return f"{self.operation} ({self.sizes})" if self.sizes else self.operation


@dataclass(frozen=True)
class Group:
    """The collectives that one rank has called in one process group, numbered from 1 by torch."""

    name: str
    description: str
    ranks: tuple[int, ...]  # its members, if torch recorded them
    enqueued: int  # the number of the newest call; 0: none
    completed: int  # this call and all before it are completed
    calls: Mapping[int, Call]  # the newest ones, and the oldest that are not completed


@dataclass(frozen=True)
class Record:
    """What one rank has called."""

    groups: Sequence[Group]
    is_whole: bool = True  # it starts with the rank's first call; the recorder forgets old ones


def summarize(dump: Mapping[str, Any]) -> Record:
    """Return the collectives of the recorder's JSON; sends and receives between two ranks are left out."""
    entries = dump.get("entries") or []
    calls: dict[tuple[str, str], dict[int, Call]] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        name, description = entry["process_group"]
        # The operations of a coalesced call share a number: the first one stands for all.
        calls.setdefault((name, description), {}).setdefault(int(entry["collective_seq_id"]), _call(entry))
    groups = []
    for (name, description), by_number in calls.items():
        ranks = json.loads((dump.get("pg_config") or {}).get(name, {}).get("ranks") or "[]")
        pending = sorted(number for number, call in by_number.items() if call.state != "completed")
        enqueued = max(by_number)
        kept = {*sorted(by_number)[-_NEWEST_CALLS:], *pending[:_PENDING_CALLS]}
        completed = pending[0] - 1 if pending else enqueued
        kept_calls = {number: by_number[number] for number in sorted(kept)}
        groups.append(Group(name, description, tuple(ranks), enqueued, completed, kept_calls))
    return Record(groups, is_whole=not entries or entries[0]["record_id"] == 0)


def _call(entry: Mapping[str, Any]) -> Call:
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    shown = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in list(zip(types, sizes, strict=False))[:2])
    more = f" and {len(sizes) - 2} more" if len(sizes) > 2 else ""
    elements = sum(math.prod(shape) for shape in sizes)
    return Call(entry["profiling_name"].partition(":")[2], shown + more, elements, entry["state"])


def pack(record: Record, max_bytes: int) -> bytes:
    """Return the record as JSON of at most `max_bytes`; calls that do not fit are left out, the oldest first."""
    groups = list(record.groups)
    while True:
        content = [
            [
                group.name, group.description, group.ranks, group.enqueued, group.completed,
                [[number, call.operation, call.sizes, call.elements, call.state]
                 for number, call in group.calls.items()],
            ]
            for group in groups
        ]  # fmt: skip
        text = json.dumps([record.is_whole, content], separators=(",", ":")).encode()
        longest = max(groups, key=lambda group: len(group.calls), default=None)
        if len(text) <= max_bytes:
            return text
        if longest is None or not longest.calls:
            return b"[false,[]]"
        rest = dict(list(longest.calls.items())[(len(longest.calls) + 1) // 2 :])
        groups = [
            Group(group.name, group.description, group.ranks, group.enqueued, group.completed, rest)
            if group is longest
            else group
            for group in groups
        ]


def unpack(text: bytes | str) -> Record:
    """Return what `pack` has packed."""
    is_whole, content = json.loads(text)
    groups = [
        Group(name, description, tuple(ranks), enqueued, completed, {call[0]: Call(*call[1:]) for call in calls})
        for name, description, ranks, enqueued, completed, calls in content
    ]
    return Record(groups, is_whole)
