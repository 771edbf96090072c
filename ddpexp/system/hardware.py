"""Detect the GPUs and CPU cores of this machine without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from ddpexp.system import amd, gpus, nvml
from ddpexp.system.control_groups import control_groups
from ddpexp.system.gpus import VISIBLE, Device

CORES = "DDPEXP_CORES"  # the variable with which a sweep gives each of its jobs a share of the cores


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Count the GPUs, or MIG instances, for workers of this machine."""
    return len(visible_devices(environ))


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs for workers of this machine, as CUDA_VISIBLE_DEVICES names them."""
    return [device.entry for device in visible_devices(environ)]


def visible_devices(environ: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Return the GPUs, or MIG instances, for workers of this machine.

    Asks the driver's library, never CUDA: initialising CUDA here would break every forked worker.
    """
    build = _torch_build()
    if build == "hip":
        return tuple(amd.visible(amd.gpus(), environ))
    if build == "cpu" or environ.get(VISIBLE) in ("", "-1"):
        return ()
    answer = nvml.driver()
    return () if gpus.is_too_old(answer, torch_cuda()) else gpus.visible(answer.gpus, environ).devices


def restricted_to(entries: Iterable[str]) -> dict[str, str]:
    """Return the environment variable that shows a process only these GPUs, which `visible_gpus` has named."""
    return {amd.VISIBLE if _torch_build() == "hip" else VISIBLE: ",".join(entries)}


def why_hidden(environ: Mapping[str, str] = os.environ) -> str:
    """Return why GPUs of this machine cannot be used, to follow a sentence; empty if all can or there are none."""
    build = _torch_build()
    cuda = (torch_cuda() or "") if build == "cuda" else None
    return "" if build == "hip" else gpus.why_hidden(nvml.driver(), cuda, environ)


def why_no_gpu(environ: Mapping[str, str] = os.environ) -> str:
    """Return why workers are on CPUs although torch could use GPUs; empty if it could not and there are none."""
    reason = why_hidden(environ)
    if reason:
        return f"none used{reason}"
    return "none found; the installed torch can use NVIDIA's" if _torch_build() == "cuda" else ""


def torch_cuda() -> str | None:
    """Return the version of CUDA that torch was built for, from its version file; None for other builds."""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", _torch_version_file() or "", re.MULTILINE)
    return match[1] if match else None


def usable_cores() -> int:
    """Count the CPU cores that this process may use: its affinity, bounded by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cores_quota()
    return max(1, min(cores, quota) if quota else cores)


def usable_core_numbers() -> list[int]:
    """Return the numbers of the CPU cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cores_quota(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the smaller of the control group's quota in whole cores and `CORES`; None without a limit."""
    share = environ.get(CORES, "")
    limits = [limit for limit in (_cgroup_quota(), int(share) if share.isdecimal() else None) if limit]
    return min(limits, default=None)


def threads_per_worker(workers: int) -> int:
    """Divide the usable cores among the workers of this node, at least one thread each."""
    return max(1, usable_cores() // workers)


def _torch_build() -> Literal["cuda", "hip", "cpu"]:
    """Return what the installed torch computes on, from its version file, without importing it."""
    text = _torch_version_file()
    if text is None:
        return "cuda"  # an unusual build: assume that it can
    if re.search(r"^hip\b[^=]*=\s*['\"]", text, re.MULTILINE):
        return "hip"
    return "cpu" if re.search(r"^cuda\b[^=]*=\s*None", text, re.MULTILINE) else "cuda"


def _torch_version_file() -> str | None:
    """Return the text of torch's version file, or None; without torch it is the text of a CPU-only build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "cuda = None"
    try:
        return Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None


def _cgroup_quota(root: Path = Path("/")) -> int | None:
    """Return the whole cores that the control group and those above it allow, or None without a limit."""
    quotas = (_quota_of(folder, version) for folder, version in control_groups("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(folder: Path, version: int) -> int | None:
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None
