"""Cores, memory, shared memory and the limits of the shell and the container."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpexp.doctor.gather import Facts
from ddpexp.doctor.report import Finding, bad, doubtful, good
from ddpexp.doctor.setting import Setting
from ddpexp.system.containers import enlarge_shared_memory, runtime
from ddpexp.system.hardware import cores_quota, usable_core_numbers, usable_cores
from ddpexp.system.limits import process_limits, required_open_files
from ddpexp.system.oom import tightest_limit
from ddpexp.system.text import counted, size_text

GIB = 1 << 30
_SHARED = "/dev/shm"
_LITTLE_SHARED = 1 << 30  # the size that torch's documentation recommends for DataLoader workers
_LEAST_SHARED = 16 << 20  # for each DataLoader worker, or each rank of NCCL; a container's default is 64 MiB in all
_WORKER_BYTES = {"cpu": 1 * GIB, "cuda": 4 * GIB}  # of a small run's worker with torch loaded: with less it is tight
_LEAST_BYTES = {"cpu": 400 << 20, "cuda": 1 * GIB}
_THREADS_OF_A_WORKER = 40  # beside its compute threads: gloo's or NCCL's, autograd's, the driver's
_PROCESSES_OF_A_RUN = 20
_OPEN_FILES = 4096  # with less, data sets of many files and DataLoader workers are limited


def gather_cores(environ: Mapping[str, str] = os.environ) -> Facts:
    """Return how many cores this process may use, and what else is on them."""
    return {
        "usable": usable_cores(),
        "affinity": len(usable_core_numbers()),
        "quota": cores_quota(environ),
        "machine": os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 1),
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
    }


def with_cores_of(facts: Facts, ranks: Sequence[Sequence[int]]) -> Facts:
    """Return the facts with the cores of all ranks of the host, where each was started with cores of its own.

    `ranks` holds the numbers of each one's cores.
    """
    together = {number for cores in ranks for number in cores}
    if len(together) <= facts.get("affinity", len(together)):
        return facts
    return {**facts, "usable": len(together), "affinity": len(together), "quota": None}


def judge_cores(facts: Facts, setting: Setting) -> list[Finding]:
    """Compare the cores with the workers and their threads."""
    usable, machine = facts["usable"], facts["machine"]
    threads = setting.workers * setting.threads
    text = f"{usable} of {machine} cores usable" if usable < machine else counted(usable, "core")
    if facts["quota"] is not None and facts["quota"] < facts["affinity"]:
        text += " (a control group's quota)"
    text += f" for {counted(setting.workers, 'worker')} x {counted(setting.threads, 'thread')}"
    measured = f"load average {facts['load']}"
    if threads > usable:
        remedy = "fewer workers, fewer trainer.threads" if setting.device == "cpu" else "fewer trainer.threads"
        under = "launcher.cpus_per_task" if setting.launcher == "slurm" else "docker run --cpus, srun --cpus-per-task"
        advice = f"use {remedy} or more cores ({under}): the workers take turns"
        return [doubtful("cores", text, advice, measured, **facts)]
    if facts["load"] > machine:
        advice = "other programs use the cores: a run is slower beside them, and its measurements say little"
        return [doubtful("cores", text, advice, measured, **facts)]
    return [good("cores", text, measured, **facts)]


def gather_memory(root: Path = Path("/")) -> Facts:
    """Return the memory that is free here. Units: bytes."""
    text = (root / "proc/meminfo").read_text()
    total, available = (
        int(match[1]) * 1024 if (match := re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)) else 0
        for name in ("MemTotal", "MemAvailable")
    )
    group, limit, used = tightest_limit(root) or (None, None, None)
    return {"total": total, "available": available, "group": group, "limit": limit, "used": used}


def judge_memory(facts: Facts, setting: Setting) -> list[Finding]:
    """Compare the free memory with what workers take before any data and model."""
    free, text = facts["available"], f"memory of {facts['total'] / GIB:.0f} GiB"
    if facts["limit"] is not None and facts["limit"] < facts["total"]:
        text += f", of which the control group {facts['group']} may use {facts['limit'] / GIB:.3g} GiB"
        free = min(free, facts["limit"] - facts["used"])
    measured = f"{max(0, free) / GIB:.1f} GiB free"
    share = free / max(1, setting.workers)
    more = "launcher.mem=... under Slurm, docker run --memory" if facts["limit"] is not None else "end other programs"
    per_worker = f"{max(0, share) / GIB:.1f} GiB a worker"
    if share < _LEAST_BYTES[setting.device]:
        advice = f"use fewer workers or more memory ({more}): {per_worker} is less than torch alone takes"
        return [bad("memory", text, advice, measured, **facts)]
    if share < _WORKER_BYTES[setting.device]:
        advice = f"use fewer workers or more memory ({more}): {per_worker} leaves little for model and data"
        return [doubtful("memory", text, advice, measured, **facts)]
    return [good("memory", text, measured, **facts)]


def gather_shared_memory(folder: str = _SHARED) -> Facts:
    """Return the size of the shared memory. Units: bytes."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return {"size": None, "free": None, "reason": error.strerror, "writable": False, "container": runtime()}
    return {
        "size": status.f_blocks * status.f_frsize,
        "free": status.f_bavail * status.f_frsize,
        "writable": os.access(folder, os.W_OK),
        "container": runtime(),
    }


def judge_shared_memory(facts: Facts, setting: Setting) -> list[Finding]:
    """Compare the shared memory with what NCCL and DataLoader workers put there."""
    uses = [f"data.num_workers={setting.num_workers}"] if setting.num_workers else []
    uses += ["NCCL between GPUs without peer access"] if setting.device == "cuda" and setting.workers > 1 else []
    size, advice = facts["size"], enlarge_shared_memory(facts["container"])
    if size is None or not facts["writable"]:
        text = f"{_SHARED} " + ("cannot be written" if size is not None else f"is missing ({facts['reason']})")
        used = " and ".join(uses) or "data.num_workers above 0"
        report = bad if uses else doubtful
        return [report("shm", text, f"mount a tmpfs there: {used} needs it", **facts)]
    text, measured = f"{_SHARED} of {size_text(size)}", f"{size_text(facts['free'])} free"
    users = setting.workers * max(setting.num_workers, setting.device == "cuda" and setting.workers > 1)
    if facts["free"] < _LEAST_SHARED * users:
        return [bad("shm", f"{text}, too little for {' and '.join(uses)}", advice, measured, **facts)]
    if facts["free"] < _LITTLE_SHARED:
        text += f", little for {' and '.join(uses) or 'DataLoader workers (data.num_workers)'}"
        return [doubtful("shm", text, advice, measured, **facts)]
    return [good("shm", text, measured, **facts)]


_NAMES = {"nofile": "NOFILE", "memlock": "MEMLOCK", "address_space": "AS", "file_size": "FSIZE", "cpu_seconds": "CPU"}


def gather_limits() -> Facts:
    """Return the limits of the shell, None for none, and those on processes and threads."""
    limits: dict[str, int | None] = {}
    for name, constant in _NAMES.items():
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{constant}"))
        value = hard if name == "nofile" else soft  # the command raises the soft limit on open files
        limits[name] = None if value == resource.RLIM_INFINITY else value
    return {**limits, "processes": [list(limit) for limit in process_limits()]}


def judge_limits(facts: Facts, setting: Setting) -> list[Finding]:
    """Compare the limits with what a run takes."""
    return [_open_files(facts, setting), _processes(facts, setting), *_sizes(facts, setting)]


def _open_files(facts: Facts, setting: Setting) -> Finding:
    limit, required = facts["nofile"], required_open_files(setting.workers, setting.world_size)
    if limit is None:
        return good("open_files", "no limit", nofile=limit, required=required)
    text = f"{limit:,} allowed, {required:,} needed for {counted(setting.world_size, 'worker')}"
    if limit < required:
        return bad("open_files", text, f"ulimit -n {required} or more", nofile=limit, required=required)
    if limit < _OPEN_FILES:
        advice = f"ulimit -n {_OPEN_FILES}: data sets of many files and DataLoader workers need more"
        return doubtful("open_files", text, advice, nofile=limit, required=required)
    return good("open_files", text, nofile=limit, required=required)


def _processes(facts: Facts, setting: Setting) -> Finding:
    each = _THREADS_OF_A_WORKER + setting.threads + setting.num_workers * (1 + _THREADS_OF_A_WORKER // 4)
    required = _PROCESSES_OF_A_RUN + setting.workers * each
    limits = sorted(facts["processes"], key=lambda limit: limit[1] - limit[2])
    if not limits:
        return good("processes", "no limit on processes and threads", required=required)
    name, allowed, used = limits[0]
    text, measured = f"{name} allows {allowed:,} processes and threads", f"{used:,} are there"
    values = {"limit": name, "allowed": allowed, "used": used, "required": required}
    if allowed - used < required:
        advice = f"raise that limit or use fewer workers: a run takes about {required:,}"
        return bad("processes", text, advice, measured, **values)
    if allowed - used < 2 * required:
        advice = f"raise that limit: a run takes about {required:,}, which leaves few for anything else"
        return doubtful("processes", text, advice, measured, **values)
    return good("processes", text, measured, **values)


def _sizes(facts: Facts, setting: Setting) -> list[Finding]:
    findings = []
    if (limit := facts["address_space"]) is not None:
        report = bad if setting.device == "cuda" else doubtful
        why = "CUDA reserves the memory of all GPUs there" if setting.device == "cuda" else "torch maps much"
        text = f"this shell allows {size_text(limit)} of address space"
        findings.append(report("address_space", text, f"ulimit -v unlimited: {why}", address_space=limit))
    if (limit := facts["file_size"]) is not None:
        text = f"this shell allows {size_text(limit)} a file"
        advice = "ulimit -f unlimited: no larger checkpoint can be written"
        findings.append(doubtful("file_size", text, advice, file_size=limit))
    if (limit := facts["cpu_seconds"]) is not None:
        text = f"this shell ends a process after {limit:,} s of CPU time"
        findings.append(doubtful("cpu_time", text, "ulimit -t unlimited, or train elsewhere", cpu_seconds=limit))
    return findings
