"""All checks of a host: which probes run, and how their facts are judged together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ddpexp.doctor import allreduce, gpus, host, links, resources, software, storage
from ddpexp.doctor.gather import Facts, Probe
from ddpexp.doctor.report import Finding, bad, doubtful, good
from ddpexp.doctor.setting import Setting
from ddpexp.system.text import first_few


class Judge(Protocol):
    """Judges the facts of a probe."""

    def __call__(self, facts: Facts, setting: Setting) -> list[Finding]:
        """Return the findings."""
        ...


# In the order of the report.
_JUDGES: Mapping[str, Judge] = {
    "software": software.judge_software,
    "gpus": gpus.judge_gpus,
    "cores": resources.judge_cores,
    "memory": resources.judge_memory,
    "shared_memory": resources.judge_shared_memory,
    "limits": resources.judge_limits,
    "files": storage.judge_files,
    "temporary": storage.judge_temporary,
    "data": storage.judge_data,
    "network": host.judge_network,
    "clock": host.judge_clock,
    "scheduler": host.judge_scheduler,
}
# The check that stands for a probe without an answer, where it has another name.
_CHECKS = {
    "software": "versions",
    "gpus": "gpu",
    "shared_memory": "shm",
    "limits": "open_files",
    "files": "file_system",
    "temporary": "tmp",
}
# What a run needs as well, so that it would hang there, with what to look at.
_NEEDED = {
    "files": "is the file server reachable? Choose another place with run.dir=... .",
    "temporary": "export TMPDIR=... to a folder of this host",
    "gpus": "the driver does not answer: see dmesg, and reset the GPU or reboot",
    "memory": "/proc does not answer: reboot",
    "data": "is the file server of the data reachable?",
}
_COMPARED = ("versions", "code", "torch_build", "driver", "gpu", "cores")  # checks in which hosts of a job should agree


def probes(setting: Setting, code: str | None) -> dict[str, Probe]:
    """Return the probes of this host. `code`: the folder of the recipe's code."""
    return {
        "software": partial(software.gather_software, code),
        "gpus": gpus.gather_gpus,
        "infiniband": links.gather_infiniband,
        "cores": resources.gather_cores,
        "memory": resources.gather_memory,
        "shared_memory": resources.gather_shared_memory,
        "limits": resources.gather_limits,
        "files": partial(storage.gather_files, setting.folder),
        "temporary": storage.gather_temporary,
        "data": partial(storage.gather_data, setting.data),
        "network": host.gather_network,
        "clock": host.gather_clock,
        "scheduler": host.gather_scheduler,
    }


def judge_host(
    facts: Mapping[str, Facts], setting: Setting, ranks: Sequence[Mapping[str, Any]] = (), log: str | None = None
) -> list[Finding]:
    """Judge one host: the facts of its probes, what its ranks found, and NCCL's log there."""
    findings: list[Finding] = []
    facts = {**facts, "cores": resources.with_cores_of(facts["cores"], [rank["cores"] for rank in ranks])}
    for name, judge in _JUDGES.items():
        findings += _answered(name, facts[name], partial(judge, setting=setting))
        if name == "gpus":
            findings += _of_devices(facts, setting, ranks, log)
    memlock = facts["limits"].get("memlock")
    return findings + _answered(
        "infiniband", facts["infiniband"], lambda probe: links.judge_infiniband(probe, memlock, setting)
    )


def _answered(name: str, facts: Facts, judge: Callable[[Facts], list[Finding]]) -> list[Finding]:
    """Judge the facts of a probe, or report that it failed or gave no answer."""
    if "hung" in facts:
        text, advice = f"no answer within {facts['hung']:g} s", "a run may hang there"
    elif "error" in facts:
        text, advice = f"it cannot be found out: {facts['error']}", "look at it yourself"
    else:
        return judge(facts)
    report = bad if name in _NEEDED else doubtful
    return [report(_CHECKS.get(name, name), text, _NEEDED.get(name, advice), **facts)]


def links_of(facts: Mapping[str, Facts], workers: int) -> tuple[str, float] | None:
    """Return by what the GPUs of a host's workers are connected, and its gigabytes a second; None: not known."""
    probe = facts["gpus"]
    return links.expected(probe, gpus.visible(probe)[:workers]) if probe.get("gpus") else None


def _of_devices(
    facts: Mapping[str, Facts], setting: Setting, ranks: Sequence[Mapping[str, Any]], log: str | None
) -> list[Finding]:
    probe, findings = facts["gpus"], []
    if probe.get("gpus"):
        findings += gpus.judge_driver(probe, facts["software"].get("torch_cuda"))
        findings += links.judge_links(probe, gpus.visible(probe)[: setting.workers], setting)
    if ranks:
        findings += allreduce.judge_devices(ranks)
        findings += allreduce.judge_peers(ranks[0].get("peers") or [], links_of(facts, setting.workers))
    if log is not None:
        findings += links.judge_nccl(links.parse_nccl_log(log), links_of(facts, setting.workers), facts["infiniband"])
    return findings


def judge_together(
    by_host: Mapping[str, Mapping[str, Facts]],
    findings: Mapping[str, Sequence[Finding]],
    times: Mapping[str, float],
    measured: Sequence[tuple[str | None, Mapping[str, Any]]],
) -> list[Finding]:
    """Judge what concerns all hosts: the all-reduce, of single hosts (by name) and of all, and how they differ."""
    together = []
    for name, result in measured:
        hosts = list(by_host) if name is None else [name]
        if name is not None:
            where = f"on {name}"
        elif len(hosts) > 1:
            where = f"of {len(hosts)} hosts"
        else:
            where = "on this host"
        speed = _carried([by_host[host] for host in hosts], result)
        together.append(allreduce.judge_all_reduce(result, speed, where))
    if len(by_host) < 2:
        return together
    different = [
        check
        for check in _COMPARED
        if len({tuple(found.text for found in of_host if found.check == check) for of_host in findings.values()}) > 1
    ]
    together += _shared_folder(by_host)
    if different:
        text = f"the hosts differ in {', '.join(different)}, see there"
        together.append(doubtful("hosts", text, "use equal hosts: the slowest sets the pace, and results may differ"))
    else:
        together.append(good("hosts", f"{len(by_host)} hosts agree in {', '.join(_COMPARED)}"))
    return [*together, *allreduce.judge_skew(times)]


def _shared_folder(by_host: Mapping[str, Mapping[str, Facts]]) -> list[Finding]:
    """Report whether the other hosts see the folder of run directories of the first one."""
    looked = {name: facts["shared_folder"] for name, facts in by_host.items() if "shared_folder" in facts}
    blind = [name for name, answer in looked.items() if answer["visible"] is False]
    if blind:
        text = f"{looked[blind[0]]['folder']} of the first host is not visible on {first_few(blind)}"
        return [bad("shared_folder", text, "put run directories where all hosts see them: run.dir=... .", blind=blind)]
    if any(answer["visible"] for answer in looked.values()):
        return [good("shared_folder", "all hosts see the folder of run directories")]
    return []


def _carried(hosts: Sequence[Mapping[str, Facts]], result: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return what the links of an all-reduce carry: of one host, or the slowest network of several.

    None where that is not known.
    """
    if len(hosts) == 1:
        return links_of(hosts[0], result["ranks"]) if result["backend"] == "nccl" else None
    speeds = [
        links.host_speed(facts["infiniband"] if result["backend"] == "nccl" else {}, facts["network"].get("speed_mbit"))
        for facts in hosts
    ]
    known = [speed for speed in speeds if speed is not None]
    return ("the network", min(known)) if len(known) == len(hosts) else None
