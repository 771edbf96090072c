"""Judge what the commands and the workers of `ddpexp doctor` found."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from ddpexp.doctor.checks import judge_host, judge_together
from ddpexp.doctor.gather import Facts
from ddpexp.doctor.job import Diagnosis, NoAnswerError
from ddpexp.doctor.report import Finding, bad, doubtful, good, merge
from ddpexp.errors import RefusedError, WorkerError
from ddpexp.launch import NotPortableError
from ddpexp.system.text import counted


def judge(
    job: Diagnosis, here: Mapping[str, Facts], failure: RefusedError | WorkerError | None
) -> tuple[list[str], list[Finding]]:
    """Judge what the commands and the workers found. Returns the hosts and the findings."""
    nodes: dict[int, list[dict[str, Any]]] = {}
    for rank in job.answers("rank"):
        nodes.setdefault(rank["node_rank"], []).append(rank)
    names = _names(nodes) if nodes else {0: platform.node()}
    logs = {answer["node_rank"]: answer["log"] for answer in job.answers("nccl")}
    by_host: dict[str, Mapping[str, Facts]] = {}
    missing = []
    found: dict[str, list[Finding]] = {}
    for node, name in names.items():
        ranks = sorted(nodes.get(node, []), key=lambda rank: "facts" not in rank)
        facts = here if node == next(iter(names)) else ranks[0].get("facts")
        if facts is None:
            missing.append(doubtful("hosts", f"the facts of {name} did not arrive", f"run ddpexp doctor on {name}"))
            continue
        setting = job.setting
        if job.layout is not None:
            setting = setting.with_layout(job.layout, len(ranks) or setting.workers)
        by_host[name], found[name] = facts, judge_host(facts, setting, ranks, logs.get(node))
    times = {name: nodes[node][0]["time"] for node, name in names.items() if node in nodes}
    measured = [(names.get(answer["node_rank"]), answer) for answer in job.answers("all_reduce")]
    together = [_of_workers(job, failure), *judge_together(by_host, found, times, measured)]
    together += missing
    return list(by_host), merge({name: [*together, *found[name]] for name in by_host})


def _names(nodes: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, str]:
    """Return a name for each node: of several with the same one, with the first rank."""
    hosts = [ranks[0]["host"] for ranks in nodes.values()]
    return {
        node: host if hosts.count(host) == 1 else f"{host} (rank {ranks[0]['rank']})"
        for (node, ranks), host in zip(nodes.items(), hosts, strict=True)
    }


def _of_workers(job: Diagnosis, failure: RefusedError | WorkerError | None) -> Finding:
    """Report the workers that a run would have, or why it would have none."""
    setting, layout = job.setting, job.layout
    if isinstance(failure, NotPortableError):
        why = f"launcher={setting.launcher} would start further commands here, on machines that are not looked at"
        advice = f"type srun python -m ddpexp doctor launcher={setting.launcher}, with the options of the job"
        if setting.launcher != "slurm":
            advice = "start the ranks with torchrun and launcher=torchrun-env, or with srun and launcher=slurm"
        return doubtful("workers", f"not measured: {why}", advice)
    if isinstance(failure, NoAnswerError):
        return bad("workers", f"nothing was started: {failure}", "a run would hang: see file_system")
    if isinstance(failure, WorkerError):
        cause = failure.failure
        text = f"rank {cause.rank} on {cause.host} failed ({cause.phase or 'start'}): {cause.kind}: {cause.message}"
        return bad("workers", text, "a run would fail in the same way", traceback=cause.traceback)
    if failure is not None:
        return bad("workers", f"a run would be refused: {failure}", "", message=str(failure))
    assert layout is not None
    text = counted(layout.world_size, f"{layout.device} worker")
    text += f" over {layout.backend}" if layout.world_size > 1 else ", nothing to reduce"
    return good("workers", f"{text}, launcher={setting.launcher}", **vars(layout))


def headline(hosts: Sequence[str]) -> str:
    """Return the title of a report on these hosts."""
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"ddpexp doctor on {shown}"
