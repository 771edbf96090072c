"""Detect the GPUs and CPU cores of this machine without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ddpexp.system.control_groups import control_groups

CORES = "DDPEXP_CORES"  # the variable with which a sweep gives each of its jobs a share of the cores


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Count the NVIDIA GPUs that a worker would see."""
    return len(visible_gpus(environ))


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the NVIDIA GPUs that a worker would see, as CUDA_VISIBLE_DEVICES names them.

    Uses NVML, never CUDA: initialising CUDA here would break every forked worker.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    present = _nvml_device_count() if _torch_has_cuda() else 0
    if visible is None or present == 0:
        return [str(number) for number in range(present)]
    # CUDA stops at the first invalid entry, so `0,1,-1,2` gives two devices and Slurm's `NoDevFiles` none; a duplicate
    # entry hides all.
    devices: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in devices:
            return []
        if not (entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < present)):
            break
        devices.append(entry)
    return devices


def why_none(environ: Mapping[str, str] = os.environ) -> str:
    """Return why no GPU can be used although this machine has some; an empty text if it has none."""
    present = _nvml_device_count()
    if not present:
        return ""
    if not _torch_has_cuda():
        return f" ({present} here, but the installed torch is a CPU-only build)"
    return f" ({present} here, but CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')} hides all)"


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


def gpu_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a name for each GPU that a worker would see; the same name in every process of the host."""
    present = _nvml_names()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    entries = [entry.strip() for entry in visible.split(",")][: count_gpus(environ)]
    return [present[int(entry)] if entry.isdigit() and int(entry) < len(present) else entry for entry in entries]


def threads_per_worker(workers: int) -> int:
    """Divide the usable cores among the workers of this node, at least one thread each."""
    return max(1, usable_cores() // workers)


def _torch_has_cuda() -> bool:
    """Return whether the installed torch can use GPUs, from its version file, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return True  # an unusual build: assume that it can
    return re.search(r"^cuda\b[^=]*=\s*None", text, re.MULTILINE) is None


def _nvml_device_count() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint(0)
        return int(count.value) if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def _nvml_names() -> list[str]:
    """Return the UUIDs of the GPUs that the driver reports. Source: NVML's reference, nvmlDeviceGetUUID."""
    count = _nvml_device_count()
    if count == 0:
        return []
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2() != 0:
        return []
    names = []
    try:
        for index in range(count):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            opened = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            has_uuid = opened and nvml.nvmlDeviceGetUUID(handle, text, len(text)) == 0
            names.append(text.value.decode() if has_uuid else f"GPU {index}")
    finally:
        nvml.nvmlShutdown()
    return names


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
