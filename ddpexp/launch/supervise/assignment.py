"""Assign ranks to the commands of a job, from the handshakes in which each describes itself.

Used by the coordinator of the leading command, once all commands are connected.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import accumulate
from typing import Any

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of one command."""

    first_rank: int
    workers: int
    local_rank: int  # of the first worker
    local_world_size: int
    node_rank: int
    own_gpus: bool  # no other command of the host sees the GPUs of this one: its workers use them from number 0 on
    first_on_host: bool


def assign_ranks(
    handshakes: Sequence[Mapping[str, Any]], threads: str | int, unit: str
) -> tuple[Layout, list[RankAssignment]]:
    """Assign ranks to all commands; `handshakes` and the result are ordered by the commands' indices.

    `unit` is what a command stands for in messages: node or rank.

    Raises:
        RefusedError: versions, configurations or devices differ, or a host has fewer GPUs than workers.
    """
    first = handshakes[0]
    for handshake in handshakes[1:]:
        _check_consistent(first, handshake, unit)
    hosts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for handshake in handshakes:
        hosts.setdefault((handshake["host"], handshake["boot"]), []).append(handshake)
    *ranks_before, world_size = accumulate((handshake["workers"] for handshake in handshakes), initial=0)
    assignments: dict[int, RankAssignment] = {}
    for node_rank, members in enumerate(hosts.values()):
        *local_ranks, local_size = accumulate((member["workers"] for member in members), initial=0)
        own_gpus = _own_gpus(members, local_size)
        if _has_local_ranks(members):
            local_ranks = [member["local_rank"] for member in members]
        for position, member in enumerate(members):
            assignments[member["index"]] = RankAssignment(
                ranks_before[member["index"]], member["workers"], local_ranks[position], local_size, node_rank,
                own_gpus,
                position == 0,
            )  # fmt: skip
    num_threads = min(_threads(members) for members in hosts.values()) if threads == "auto" else int(threads)
    layout = replace(Layout(**first["layout"]), nodes=len(hosts), world_size=world_size, threads=num_threads)
    return layout, [assignments[index] for index in range(len(handshakes))]


def _check_consistent(first: Mapping[str, Any], other: Mapping[str, Any], unit: str) -> None:
    first_name = f"{unit} 0 ({first['host']})"
    other_name = f"{unit} {other['index']} ({other['host']})"
    for name, version in first["versions"].items():
        if (other_version := other.get("versions", {}).get(name)) != version:
            raise RefusedError(
                f"{name} is {version or 'of unknown version'} on {first_name} and "
                f"{other_version or 'of unknown version'} on {other_name}",
                suggestion="Install the same version on all of them.",
            )
    difference = first_difference(first["identity"], other["identity"])
    if difference:
        key, value, other_value = difference
        raise RefusedError(
            f"is {value} on {first_name} and {other_value} on {other_name}",
            key=key,
            suggestion="Start all of them with the same overrides.",
        )
    for name in ("device", "backend"):
        if other["layout"][name] != first["layout"][name]:
            raise RefusedError(
                f"{first_name} would run on {name} {first['layout'][name]} and {other_name} on {other['layout'][name]}",
                suggestion=f"Set trainer.{name}=... to make them equal.",
            )


def _has_local_ranks(members: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the launcher of a host's workers has given each its own local rank, from 0 on."""
    local_ranks = [-1 if member["local_rank"] is None else member["local_rank"] for member in members]
    return all(member["externally_launched"] for member in members) and sorted(local_ranks) == list(
        range(len(local_ranks))
    )


def _threads(members: Sequence[Mapping[str, Any]]) -> int:
    """Divide a host's cores among its workers, whether all see the same cores or each its own."""
    workers: int = sum(member["workers"] for member in members)
    shares = [len({core for member in members for core in member["cores"]}) // workers]
    shares += [len(member["cores"]) // member["workers"] for member in members]
    shares += [member["quota"] // workers for member in members if member["quota"]]
    return max(1, min(shares))


def _own_gpus(members: Sequence[Mapping[str, Any]], workers: int) -> bool:
    """Return whether each command of a host sees only its own GPUs (Slurm's per-task binding), or all see the same.

    Raises:
        RefusedError: there are fewer GPUs than workers.
    """
    visible = [list(member["gpus"]) for member in members]
    if not any(visible):
        return False
    distinct = {gpu for gpus in visible for gpu in gpus}
    enough = all(len(gpus) >= member["workers"] for gpus, member in zip(visible, members, strict=True))
    if enough and len(distinct) == sum(map(len, visible)):
        return True
    if all(len(gpus) >= workers for gpus in visible):
        return False
    raise RefusedError(
        f"{members[0]['host']} runs {workers} workers, but they see {len(distinct)} "
        f"GPU{'s' if len(distinct) > 1 else ''}",
        suggestion="Start one worker for each GPU, or use trainer.device=cpu.",
    )


def first_difference(one: Any, other: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """Return the first key at which two nested mappings differ, with both values, or None."""
    if one == other:
        return None
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in [*one, *(name for name in other if name not in one)]:
            difference = first_difference(one.get(name), other.get(name), f"{key}.{name}" if key else str(name))
            if difference:
                return difference
        return None
    return key, one, other


def versions() -> dict[str, str | None]:
    """Return the versions that must be the same in all commands of a job, without importing the packages."""
    installed: dict[str, str | None] = {}
    for name in ("ddpexp", "torch"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None  # run from a checkout that is not installed
    return {**installed, "Python": "{}.{}".format(*sys.version_info)}
