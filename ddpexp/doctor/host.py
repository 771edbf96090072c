"""The clock, the name, the network interface and the job scheduler of this host."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from ddpexp.doctor.gather import Facts
from ddpexp.doctor.report import Finding, bad, doubtful, good
from ddpexp.doctor.setting import Setting
from ddpexp.system.job_schedulers.slurm import SLURM, show_job
from ddpexp.system.network import LOOPBACK, interface_of, own_address
from ddpexp.system.programs import find

_WATCHED_SECONDS = 1.0
_JUMP_SECONDS = 0.05  # of the wall clock against the monotonic one, while it is watched
_TIME_ERROR = 5  # Source: adjtimex(2)
_BEGIN_OF_2024 = 1_704_067_200
_SLOW_NAME_SECONDS = 1.0
_SCHEDULER_SECONDS = 4.0
_SHORT_SECONDS = 600  # of a job: one that ends so soon does little
_VIRTUAL = re.compile(r"(docker|br-|virbr|veth|cni|flannel|tailscale|tun|wg)")
_NAMED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def gather_clock() -> Facts:
    """Watch the wall clock for a second; files and logs carry its time, and a certificate counts by it."""
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(_WATCHED_SECONDS)
    moved = (time.time() - wall) - (time.monotonic() - monotonic)
    return {"time": round(time.time(), 3), "moved_seconds": round(moved, 4), "synchronized": _is_synchronized()}


def judge_clock(facts: Facts, setting: Setting) -> list[Finding]:
    """Judge the wall clock."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts["time"]))
    if facts["time"] < _BEGIN_OF_2024:
        return [bad("clock", "the clock is years behind", "set it (timedatectl): downloads would fail", shown, **facts)]
    if abs(facts["moved_seconds"]) > _JUMP_SECONDS:
        text = f"the wall clock moved {facts['moved_seconds']:+.2f} s against the monotonic one within a second"
        advice = "let one service keep the time (chrony): the times of logs and records jump"
        return [doubtful("clock", text, advice, shown, **facts)]
    text = "the clock runs evenly"
    if facts["synchronized"] is False:
        text += ", but nothing synchronizes it"
        if setting.nodes > 1:
            advice = "run chrony or ntpd on every host: their logs and records would disagree"
            return [doubtful("clock", text, advice, shown, **facts)]
    return [good("clock", text, shown, **facts)]


def _is_synchronized() -> bool | None:
    """Return whether the kernel's clock is synchronized; None if that is not known."""
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != _TIME_ERROR


def gather_network(environ: Mapping[str, str] = os.environ) -> Facts:
    """Return the name of this host, and the interface that several hosts would use."""
    name, began = socket.gethostname(), time.monotonic()
    reason: str | None = None
    try:
        resolved = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError as error:
        resolved, reason = [], str(error.strerror or error)
    seconds = round(time.monotonic() - began, 3)
    address = own_address()
    interface = interface_of(address)
    return {
        "hostname": name,
        "resolves_to": resolved,
        "resolve_error": reason,
        "resolve_seconds": seconds,
        "address": address,
        "interface": interface,
        "speed_mbit": _speed(interface),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "named": {name: environ[name] for name in _NAMED if environ.get(name)},
    }


def _speed(interface: str | None) -> int | None:
    """Return the speed that an interface reports, which virtual ones do not. Units: megabits a second."""
    try:
        speed = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def judge_network(facts: Facts, setting: Setting) -> list[Finding]:
    """Judge the interface, and whether the host name resolves."""
    return [_interface(facts, setting), _host_name(facts)]


def _interface(facts: Facts, setting: Setting) -> Finding:
    for variable, value in facts["named"].items():
        prefixes = [name.strip().lstrip("=") for name in value.split(",")]
        if not value.startswith("^") and not any(
            interface.startswith(prefix) for interface in facts["interfaces"] for prefix in prefixes
        ):
            there = ", ".join(facts["interfaces"])
            advice = f"unset {variable}, or name one of {there}"
            return bad("network", f"{variable}={value} names no interface of this host", advice, **facts)
    interface, address = facts["interface"], facts["address"]
    speed = f", {facts['speed_mbit'] / 1000:g} Gbit/s" if facts["speed_mbit"] else ""
    text = f"{interface or 'no interface'}{speed} would be used between hosts"
    if address == LOOPBACK:
        text = "only the loopback interface: other hosts cannot reach this one"
        if setting.nodes > 1:
            return bad("network", text, "connect this host, or use trainer.nodes=1", **facts)
        return good("network", text, **facts)
    if _VIRTUAL.match(interface or ""):
        advice = "export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with the interface that other hosts reach"
        if setting.nodes > 1:
            return doubtful("network", f"{text}, which looks virtual", advice, address, **facts)
    return good("network", text, address, **facts)


def _host_name(facts: Facts) -> Finding:
    name, seconds = facts["hostname"], facts["resolve_seconds"]
    if facts["resolve_error"] is not None:
        advice = f"add it to /etc/hosts: some libraries look it up. ddpexp uses {facts['address']} instead"
        return doubtful("hostname", f"the host name does not resolve ({facts['resolve_error']})", advice, name, **facts)
    if seconds > _SLOW_NAME_SECONDS:
        advice = "add it to /etc/hosts: each process that looks it up waits so long"
        return doubtful("hostname", "the host name resolves slowly", advice, f"{name} in {seconds:.1f} s", **facts)
    return good("hostname", "the host name resolves", f"{name} to {', '.join(facts['resolves_to'])}", **facts)


def gather_scheduler(environ: Mapping[str, str] = os.environ) -> Facts:
    """Return what Slurm says about the job of this process."""
    job_id = SLURM.unique_job_id(environ)
    text = show_job(job_id, _SCHEDULER_SECONDS) if job_id else None
    return {
        "installed": find("srun", environ) is not None,
        "job_id": job_id,
        "in_step": "SLURM_STEP_ID" in environ,
        "job": parse_job(text) if text is not None else None,
        "restarts": SLURM.restart_count(),
    }


_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")


def parse_job(text: str) -> dict[str, object]:
    """Return what `scontrol show job` prints: state, partition, requeue, and the seconds that are left."""
    fields = dict(re.findall(r"\b(JobState|Partition|Requeue|RunTime|TimeLimit|NumNodes)=(\S+)", text))
    limit, run = _seconds(fields.get("TimeLimit", "")), _seconds(fields.get("RunTime", ""))
    return {
        "state": fields.get("JobState"),
        "partition": fields.get("Partition"),
        "nodes": fields.get("NumNodes"),
        "requeue": fields.get("Requeue") == "1" if "Requeue" in fields else None,
        "limit_seconds": limit,
        "left_seconds": limit - run if limit is not None and run is not None else None,
    }


def _seconds(text: str) -> int | None:
    match = _DURATION.fullmatch(text)
    if match is None:  # UNLIMITED, or not known
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def judge_scheduler(facts: Facts, setting: Setting) -> list[Finding]:
    """Judge the job of the scheduler, if there is one."""
    if facts["job_id"] is None:
        if setting.launcher == "slurm" and not facts["installed"]:
            advice = "use launcher=spawn, or load Slurm's module"
            return [bad("scheduler", "launcher=slurm needs srun, which this machine does not have", advice, **facts)]
        text = "Slurm is installed, and this is no job of it" if facts["installed"] else "no scheduler"
        return [good("scheduler", text, **facts)]
    job, text = facts["job"], f"Slurm job {facts['job_id']}"
    if job is None:
        advice = "wait until the controller answers (scontrol ping): requeueing and submitting need it"
        return [doubtful("scheduler", f"{text}, and scontrol does not answer about it", advice, **facts)]
    text += (
        f" in partition {job['partition']}, " + ("requeued" if job["requeue"] else "not requeued") + " when preempted"
    )
    left = job["left_seconds"]
    measured = "no time limit" if left is None else f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
    if left is not None and left < _SHORT_SECONDS:
        advice = "submit a longer job (launcher.time=... or sbatch --time): this one ends before much is trained"
        return [doubtful("scheduler", f"{text}, and it ends soon", advice, measured, **facts)]
    if job["requeue"] is False and setting.launcher == "slurm":
        advice = "submit with sbatch --requeue: a preempted run has to be resumed by hand"
        return [doubtful("scheduler", text, advice, measured, **facts)]
    return [good("scheduler", text, measured, **facts)]
