"""The workers of `ddpexp doctor`: what torch finds on each device, and an all-reduce between all of them."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpexp.distributed import flight_recorder
from ddpexp.distributed.world import World
from ddpexp.doctor.request import Request
from ddpexp.errors import DdpexpError
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.system.hardware import usable_core_numbers
from ddpexp.train.process import run_rank

_BYTES = {"cuda": 256_000_000, "cpu": 8_000_000}  # of the measured all-reduce: large enough that latency does not count
_SMALL_BYTES = 1024
_MEASURED_SECONDS = {"cuda": 1.0, "cpu": 0.2}
_REPEATS = {"cuda": 30, "cpu": 10}  # at most
_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.01
_LOG_BYTES, _LOG_LINES = 4 << 20, 500
_MOST_HOSTS = 32  # whose own ranks are measured apart: each needs a group, which all ranks make


def measure(request: str, control: Control | None = None) -> int:
    """Examine the devices and measure the links; `request` is JSON of a `Request`. Like `run_rank`."""
    return run_rank(lambda control: _measure(Request.of(request), control), control)


def _measure(request: Request, control: Control) -> None:
    layout = request.layout
    torch.set_num_threads(layout.threads)
    control.status.set_phase("join")
    log = None
    if layout.backend == "nccl":
        flight_recorder.enable(os.environ)
        log = _record_nccl()
    world = World.join(layout, request.timeout_seconds)
    control.status.set_phase("evaluate")
    world.barrier()
    now = time.time()
    here: dict[str, Any] = {
        "host": platform.node(),
        "rank": world.rank,
        "node_rank": world.node_rank,
        "time": now,
        "cores": usable_core_numbers(),
        **describe_torch(world.device),
    }
    if world.local_rank == 0:
        if request.facts:
            with open(request.facts) as file:
                here["facts"] = json.load(file)
        if layout.device == "cuda":
            here["peers"] = _peers()
    ranks = _to_rank_zero(world, "ddpexp-doctor", here)
    answers = _Answers(request.answer if world.is_rank_zero else None)
    for rank in ranks:
        answers.add("rank", rank)
    torch.ones(8, device=world.device).sum().item()  # fails where torch has no code for the device
    control.status.heartbeat()
    for node_rank, result in measurements(world, layout, control.status.heartbeat):
        answers.add("all_reduce", {"node_rank": node_rank, **result})
    if log is not None:
        for text in _logs(world, log):
            answers.add("nccl", text)
    world.barrier()


@dataclass(frozen=True)
class _Answers:
    """The file of rank zero's answers, which the command reads even if later ones are missing."""

    path: str | None  # None in other ranks, which write nothing

    def add(self, kind: str, answer: Mapping[str, Any]) -> None:
        """Append an answer."""
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps({"kind": kind, **answer}) + "\n")


def describe_torch(device: torch.device) -> dict[str, Any]:
    """Return what torch is, and the device of this rank."""
    described: dict[str, Any] = {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "device": None}
    if device.type != "cuda":
        return described
    properties = torch.cuda.get_device_properties(device)
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {
        **described,
        "nccl": ".".join(map(str, version)) if isinstance(version, tuple) else str(version),
        "architectures": torch.cuda.get_arch_list(),
        "device": {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "num_bytes": properties.total_memory,
        },
    }


def _peers() -> list[list[bool]]:
    """Return which of the GPUs that this rank sees reach each other's memory."""
    count = range(torch.cuda.device_count())
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in count] for a in count]


def _to_rank_zero(world: World, name: str, value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send a value of every rank to rank zero, through the store: the links are yet to be tried.

    Ranks: all; returns the values in rank zero, in the order of ranks, and nothing in the others.
    """
    mailbox = world.mailbox()
    if not world.is_rank_zero:
        mailbox.put(f"{name}/{world.rank}", json.dumps(value))
        return []
    values, deadline = [dict(value)], time.monotonic() + _ANSWER_SECONDS
    for rank in range(1, world.world_size):
        while (text := mailbox.take(f"{name}/{rank}")) is None:
            if time.monotonic() > deadline:
                raise DdpexpError(f"rank {rank} sent nothing within {_ANSWER_SECONDS:g} s of joining.")
            time.sleep(_POLL_SECONDS)
        values.append(json.loads(text))
    return values


def measurements(
    world: World, layout: Layout, heartbeat: Callable[[], None]
) -> list[tuple[int | None, dict[str, Any]]]:
    """Measure the all-reduce on each host by itself, then over all ranks. Ranks: all; communicates.

    Returns the results to rank zero, with the node rank of each; None: all ranks. `heartbeat` is called between them.
    """
    if world.world_size == 1:
        return []
    results: list[tuple[int | None, dict[str, Any]]] = []
    nodes = _nodes(world)
    if 1 < len(nodes) <= _MOST_HOSTS:
        groups = {node: dist.new_group(ranks) for node, ranks in nodes.items() if len(ranks) > 1}
        ranks = nodes[world.node_rank]
        own = _all_reduce(world, layout, ranks, groups[world.node_rank]) if len(ranks) > 1 else {}
        gathered = _to_rank_zero(world, "ddpexp-doctor-node", own)
        results += [(node, gathered[ranks[0]]) for node, ranks in nodes.items() if gathered]
        heartbeat()
    results.append((None, _all_reduce(world, layout, range(world.world_size), None)))
    return [(node, result) for node, result in results if result]


def _nodes(world: World) -> dict[int, list[int]]:
    """Return the ranks of each node. Ranks: all; communicates."""
    mine = torch.tensor([world.node_rank], device=world.device)
    gathered = [torch.zeros_like(mine) for _ in range(world.world_size)]
    dist.all_gather(gathered, mine)
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(gathered):
        nodes.setdefault(int(node), []).append(rank)
    return nodes


def _all_reduce(world: World, layout: Layout, ranks: Sequence[int], group: Any) -> dict[str, Any]:
    """Time a large and a small all-reduce in a group, and check the sum. Ranks: those of the group; communicates."""
    size = len(ranks)
    large = torch.zeros(_BYTES[layout.device] // 4, device=world.device)
    small = torch.zeros(_SMALL_BYTES // 4, device=world.device)
    seconds = _seconds(world, lambda: dist.all_reduce(large, group=group), ranks[0], group)
    latency = _seconds(world, lambda: dist.all_reduce(small, group=group), ranks[0], group)
    large.fill_(world.rank + 1)
    dist.all_reduce(large, group=group)
    is_correct = bool((large == sum(rank + 1 for rank in ranks)).all())
    num_bytes = large.numel() * large.element_size()
    return {
        "ranks": size,
        "backend": layout.backend,
        "num_bytes": num_bytes,
        "seconds": seconds,
        # Each byte passes a ring's links 2 (n - 1) / n times: what NCCL's tests call bus bandwidth.
        "bus_gigabytes_a_second": round(num_bytes / seconds * 2 * (size - 1) / size / 1e9, 4),
        "latency_us": round(latency * 1e6, 1),
        "correct": is_correct,
    }


def _seconds(world: World, work: Callable[[], object], source: int, group: Any) -> float:
    """Return how long some work takes, on average over as many repeats as fit into a moment.

    Ranks: those of the group; communicates.
    """

    def timed(repeats: int) -> float:
        _wait(world.device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        _wait(world.device)
        return (time.perf_counter() - began) / repeats

    timed(2)  # connections are made with the first
    # The ranks must agree on the number.
    first = torch.tensor([timed(1)], dtype=torch.float64, device=world.device)
    dist.broadcast(first, source, group=group)
    fitting = int(_MEASURED_SECONDS[world.device.type] / max(float(first), 1e-9))
    return timed(max(3, min(_REPEATS[world.device.type], fitting)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record_nccl() -> int | None:
    """Have NCCL write its log into memory; None where the user has chosen a log of their own."""
    if "NCCL_DEBUG" in os.environ:
        return None
    descriptor = os.memfd_create("ddpexp-nccl")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"/proc/self/fd/{descriptor}"}
    return descriptor


def _logs(world: World, descriptor: int) -> list[dict[str, Any]]:
    """Return what each node's log has on the ways of the channels. Ranks: all; to rank zero."""
    lines = os.pread(descriptor, _LOG_BYTES, 0).decode(errors="replace").splitlines()
    kept = [line for line in lines if " via " in line or "Using network" in line or "NVLS" in line][:_LOG_LINES]
    sent = {"node_rank": world.node_rank, "log": "\n".join(kept)} if world.local_rank == 0 else {}
    return [log for log in _to_rank_zero(world, "ddpexp-doctor-nccl", sent) if log]
