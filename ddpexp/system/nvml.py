"""Ask the NVIDIA driver which GPUs this process may use, once per process and without initialising CUDA."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Return values of NVML. Source: its API reference, nvmlReturn_t
SUCCESS = 0
_NO_PERMISSION = 4
_FUNCTION_NOT_FOUND = 13  # also: this library is older than the function
_TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE, as long as any
_LIBRARY = "libnvidia-ml.so.1"
_REMEDY = ": install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)"


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU in MIG mode, a device of its own for CUDA."""

    uuid: str  # MIG-<uuid>; before driver R470 MIG-GPU-<uuid>/<GPU instance>/<compute instance>
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, as the driver describes it to this process."""

    uuid: str
    obstacle: str = ""  # why this process cannot use it; empty if it can
    mig: tuple[MigInstance, ...] | None = None  # the instances that it can use; None: not in MIG mode
    name: str = ""  # its model, such as NVIDIA H100 80GB HBM3; empty: not known


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver answered."""

    gpus: tuple[Gpu, ...] = ()
    error: str = ""  # why it did not answer although there is a GPU
    cuda: str = ""  # the newest version of CUDA that it supports; empty: not known
    version: str = ""  # its own, likewise


class Nvml:
    """The functions of the driver's library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take the library."""
        self._library = library

    def call(self, name: str, *arguments: object) -> int:
        """Call a function, and return its status."""
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError:
            return _FUNCTION_NOT_FOUND
        return function(*arguments)

    def number(self, name: str, *handle: ctypes.c_void_p) -> int | None:
        """Return the number that a function finds; None if it finds none."""
        value = ctypes.c_uint(0)
        return int(value.value) if self.call(name, *handle, ctypes.byref(value)) == SUCCESS else None

    def text(self, name: str, *handle: ctypes.c_void_p) -> str:
        """Return the text that a function finds; empty if it finds none."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        found = self.call(name, *handle, text, len(text)) == SUCCESS
        return text.value.decode(errors="replace") if found else ""

    def error(self, status: int) -> str:
        """Return the library's text for a status."""
        function = self._library.nvmlErrorString
        function.restype = ctypes.c_char_p
        return (function(status) or b"").decode(errors="replace") or f"error {status}"


def load_nvml() -> Nvml | None:
    """Return the driver's library; None where there is none."""
    try:
        return Nvml(ctypes.CDLL(_LIBRARY))
    except OSError:
        return None


@functools.cache
def driver() -> Driver:
    """Return what the driver answers; no GPUs where there is neither a driver nor a GPU.

    Cached: without persistence mode the driver initialises every GPU for the first question, which takes seconds.
    """
    nvml = load_nvml()
    if nvml is None:
        trace = trace_of_gpus(Path("/"))
        return Driver(error=f"{trace} shows one, but {_LIBRARY} is not found{_REMEDY}" if trace else "")
    status = nvml.call("nvmlInit_v2")
    if status != SUCCESS:
        # The library without a driver is no fault: it is in many container images, and on login nodes.
        return Driver(error=_reported(nvml, status) if os.path.exists("/dev/nvidiactl") else "")
    try:
        count = ctypes.c_uint(0)
        status = nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        if status != SUCCESS:
            return Driver(error=_reported(nvml, status))
        version = nvml.number("nvmlSystemGetCudaDriverVersion_v2") or 0  # 13020 is 13.2
        cuda = f"{version // 1000}.{version % 1000 // 10}" if version else ""
        gpus = tuple(_gpu(nvml, index) for index in range(count.value))
        return Driver(gpus, cuda=cuda, version=nvml.text("nvmlSystemGetDriverVersion"))
    finally:
        nvml.call("nvmlShutdown")


def trace_of_gpus(root: Path) -> str:
    """Return which file of the kernel shows a GPU of NVIDIA's; empty if none does.

    Containers see the devices on the bus of their host, also without its driver. Source: the kernel's documentation,
    sysfs-bus-pci; 0x03 is the class of display controllers, which also has those for computing alone.
    """
    for path in (root / "proc/driver/nvidia/version", *sorted((root / "dev").glob("nvidia[0-9]*"))):
        if path.exists():
            return f"/{path.relative_to(root)}"
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return f"/{device.relative_to(root)}"
    return ""


def obstacle(status: int, text: str, node_error: int | None) -> str:
    """Return why a GPU cannot be used, from opening its handle and its device node; empty if it can.

    A device control group, such as Slurm's with ConstrainDevices, hides a GPU from no list: NVML counts it, but its
    handle does not open (NVML_ERROR_NO_PERMISSION), nor does its node (EPERM, with control groups of either version).
    Source: NVML's API reference, nvmlDeviceGetCount_v2; the kernel's documentation of control groups, devices.
    Where there is no node at all (WSL) the handle decides.
    """
    if status == _NO_PERMISSION or node_error == errno.EPERM:
        return "not in this process's device control group"
    if status != SUCCESS:
        return text
    return "" if node_error in (None, errno.ENOENT) else os.strerror(node_error)


def _reported(nvml: Nvml, status: int) -> str:
    return f"the driver's library reports: {nvml.error(status)}"


def _gpu(nvml: Nvml, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    status = nvml.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
    if status != SUCCESS:
        return Gpu(f"GPU {index}", obstacle(status, nvml.error(status), None))
    minor = nvml.number("nvmlDeviceGetMinorNumber", handle)
    hindrance = obstacle(status, "", None if minor is None else _open_error(f"/dev/nvidia{minor}"))
    uuid, name = nvml.text("nvmlDeviceGetUUID", handle), nvml.text("nvmlDeviceGetName", handle)
    return Gpu(uuid or f"GPU {index}", hindrance, _instances(nvml, handle), name)


def _instances(nvml: Nvml, gpu: ctypes.c_void_p) -> tuple[MigInstance, ...] | None:
    current, pending = ctypes.c_uint(0), ctypes.c_uint(0)
    status = nvml.call("nvmlDeviceGetMigMode", gpu, ctypes.byref(current), ctypes.byref(pending))
    if status != SUCCESS or not current.value:
        return None
    instances = []
    for index in range(nvml.number("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0):
        handle = ctypes.c_void_p()  # instances that do not exist, or that this process may not use, have none
        if nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index, ctypes.byref(handle)) == SUCCESS:
            numbers = [nvml.number(f"nvmlDeviceGet{kind}InstanceId", handle) for kind in ("Gpu", "Compute")]
            uuid = nvml.text("nvmlDeviceGetUUID", handle)
            if uuid:
                instances.append(MigInstance(uuid, *(-1 if number is None else number for number in numbers)))
    return tuple(instances)


def _open_error(path: str) -> int | None:
    """Return the error number with which opening a device node fails; None if it opens."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno
    return None
