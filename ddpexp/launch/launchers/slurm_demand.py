"""What a job asks of each of its nodes, and whether a cluster has nodes that could ever run it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpexp.errors import RefusedError
from ddpexp.system.job_schedulers.slurm import Nodes, nodes_of
from ddpexp.system.text import counted

_CHOOSE_NODES = ("-p", "--partition", "-M", "--cluster")
_CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


@dataclass(frozen=True)
class Demand:
    """What a job asks for; None and no GPUs where the cluster's default counts."""

    nodes: int
    workers: Literal["auto"] | int  # of each node
    device: str  # as in trainer.device
    gpus: Mapping[str, int]  # of each node, by type; "" for any
    gpus_key: str  # the override that asks for them
    cores: int | None  # of each node
    memory: str | None  # of each node, as in launcher.mem
    seconds: int | None
    time: str | None  # the same as in launcher.time
    has_limits_of_its_own: bool  # a quality of service may lift the limits of partitions

    @property
    def num_gpus(self) -> int:
        """Return how many GPUs of a node are asked for."""
        return sum(self.gpus.values())

    def __str__(self) -> str:
        """Return the same in words, with the keys by which to change it."""
        many = self.workers if isinstance(self.workers, int) else 1
        gpus, cores = counted(self.num_gpus, "GPU"), f"{counted(self.cores or 0, 'core')} (launcher.cpus_per_task)"
        if not self.gpus:
            gpus = "no GPUs" if self.device == "cpu" else f"no GPUs (launcher.gpus_per_node={many} asks for them)"
        if self.cores is None:
            cores = "cores by Slurm's default, often 1 for all workers (launcher.cpus_per_task counts for each)"
        memory = f"{self.memory} of memory" if self.memory else "memory by the cluster's default (launcher.mem)"
        each = "asks for 1 node" if self.nodes == 1 else f"asks for {self.nodes} nodes, each"
        return f"{each} with {gpus}, {cores}, and {memory}"


def gpus_by_type(request: str) -> dict[str, int]:
    """Return the GPUs that `gpus_per_node` or a part of `gres` asks for: `4`, `a100:4`, `a100:2,v100:2`."""
    found: dict[str, int] = {}
    for part in filter(None, request.split(",")):
        *kind, count = part.removeprefix("gpu:").split(":") if part != "gpu" else ["1"]
        if not count.isdecimal():
            kind, count = [count], "1"
        found[":".join(kind)] = found.get(":".join(kind), 0) + int(count)
    return found


def idle_gpus(key: str, request: str, workers: Literal["auto"] | int) -> Iterator[str]:
    """Yield a sentence if a request asks for more GPUs of a node than as many workers use."""
    gpus = sum(gpus_by_type(request).values())
    if workers == "auto" or workers >= gpus:
        return
    text = f"{key}={request} asks for {counted(gpus, 'GPU')} of each node"
    if workers == 0:
        yield f"{text}, and with trainer.device=cpu none is used: leave one of the two out"
    else:
        uses = f"trainer.gpus={workers} uses {workers}, so {gpus - workers} would be idle"
        yield f"{text}, and {uses}: type trainer.gpus={gpus}, or ask for {workers}"


def megabytes(text: str | int | None) -> float | None:
    """Return an amount of memory as sbatch reads it; None for the default, all of a node, or what Slurm reports."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", "" if text is None else str(text), re.IGNORECASE)
    return int(match[1]) * _UNITS[match[2].upper() or "M"] or None if match is not None else None


def known_nodes(
    partition: str | None, sbatch_args: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Sequence[Nodes] | str:
    """Return the nodes that a job may run on, or why they are not known."""
    if any(argument.startswith(_CHOOSE_NODES) for argument in sbatch_args):
        return "launcher.sbatch_args chooses the partition"
    if (name := next((name for name in _CLUSTERS if name in environ), None)) is not None:
        return f"{name} chooses the cluster"
    return nodes_of(partition or environ.get("SBATCH_PARTITION"))


def check(demand: Demand, known: Sequence[Nodes]) -> None:
    """Check that nodes of one partition could run a job once they are free; `known` are all that it may run on.

    Raises:
        RefusedError: the job would wait forever.
    """
    where = f"partition{'s' if len({one.partition for one in known}) > 1 else ''} "
    where += ", ".join(dict.fromkeys(one.partition for one in known))
    _check_gpus(demand, known, where)
    cores, memory, most = demand.cores or 0, megabytes(demand.memory) or 0, max(one.cores for one in known)
    if cores > most:
        each = most // (demand.workers if isinstance(demand.workers, int) else 1)
        fewer = f"Use launcher.cpus_per_task={each} or less" if each else "Use fewer workers on a node (trainer.gpus)"
        raise RefusedError(
            f"asks for {cores} cores of a node, and no node of {where} has more than {most}",
            key="launcher.cpus_per_task",
            value=cores // (demand.workers if isinstance(demand.workers, int) else 1),
            suggestion=f"{fewer}, or more nodes (trainer.nodes).",
        )
    if memory > (largest := max(one.memory for one in known)):
        raise RefusedError(
            f"is more than any node of {where} has",
            key="launcher.mem",
            value=demand.memory,
            suggestion=f"Use launcher.mem={largest}M or less, or launcher.mem=0 for all memory of a node.",
        )
    limits = [one.seconds for one in known]
    if demand.seconds is not None and None not in limits and not demand.has_limits_of_its_own:
        longest = max(limit for limit in limits if limit is not None)
        if demand.seconds > longest:
            raise RefusedError(
                f"is longer than {where} allows",
                key="launcher.time",
                value=demand.time,
                suggestion=f"Use launcher.time={longest // 60} (minutes) or less: a job that ends there is requeued "
                "and resumes.",
            )
    _check_nodes(demand, known, where)


def _check_gpus(demand: Demand, known: Sequence[Nodes], where: str) -> None:
    wanted, most = dict(demand.gpus), max(sum(one.gpus.values()) for one in known)
    key, value = demand.gpus_key.partition("=")[::2]
    implied = not wanted and demand.device != "cpu" and all(one.gpus for one in known)
    if implied and isinstance(demand.workers, int):  # as many workers find no GPUs there
        wanted, key, value = {"": demand.workers}, "trainer.gpus", str(demand.workers)
    for kind, count in wanted.items():
        if kind and not any(kind in one.gpus for one in known):
            kinds = ", ".join(dict.fromkeys(name for one in known for name in one.gpus if name)) or "of no named type"
            raise RefusedError(f"No node of {where} has such GPUs: they are {kinds}", key=key, value=value)
        of_kind = max(one.gpus.get(kind, 0) if kind else sum(one.gpus.values()) for one in known)
        if count <= of_kind:
            continue
        suggestion = "Leave it out, and use trainer.device=cpu, for workers on CPUs."
        total, there = count * demand.nodes, sum(one.count for one in known)
        if of_kind and total % of_kind == 0 and total // of_kind <= there:
            each = f"{kind}:{of_kind}" if kind else of_kind
            suggestion = (
                f"The same {total} are trainer.gpus={of_kind} trainer.nodes={total // of_kind} "
                f"launcher.gpus_per_node={each}."
            )
        elif of_kind:
            suggestion = f"Use trainer.gpus={of_kind} launcher.gpus_per_node={of_kind}, and more nodes (trainer.nodes)."
        if implied:
            suggestion += " For workers on CPUs add trainer.device=cpu."
        has = f"no node of {where} has more than {most}" if most else f"the nodes of {where} have none"
        raise RefusedError(f"is more GPUs than a node has: {has}", key=key, value=value, suggestion=suggestion)


def _check_nodes(demand: Demand, known: Sequence[Nodes], where: str) -> None:
    """Check that there are as many nodes of a partition that fit as are wanted."""
    memory = megabytes(demand.memory) or 0
    fitting: dict[str, int] = {}
    for one in known:
        has_gpus = sum(one.gpus.values()) >= demand.num_gpus
        has_gpus = has_gpus and all(not kind or one.gpus.get(kind, 0) >= count for kind, count in demand.gpus.items())
        if has_gpus and one.cores >= (demand.cores or 0) and one.memory >= memory:
            fitting[one.partition] = fitting.get(one.partition, 0) + one.count
    if not fitting:
        raise RefusedError(
            f"No node of {where} has all that is asked for: {demand}", suggestion="Ask for less of a node."
        )
    if not demand.has_limits_of_its_own:
        most = {one.partition: one.most_nodes for one in known if one.most_nodes is not None}
        fitting = {name: min(count, most.get(name, count)) for name, count in fitting.items()}
    if demand.nodes > (largest := max(fitting.values())):
        raise RefusedError(
            f"is more than the {counted(largest, 'node')} of {where} that have what is asked for",
            key="trainer.nodes",
            value=demand.nodes,
            suggestion=f"Use trainer.nodes={largest} or less, or another launcher.partition.",
        )
