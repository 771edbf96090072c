"""How busy a GPU of NVIDIA is, and what holds its clock back."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from ddpexp.system.nvml import SUCCESS, Nvml, load_nvml

_SM_CLOCK = 1  # NVML_CLOCK_SM
# What holds the clock back, in the order in which it is worth naming. Source: NVML's API reference,
# nvmlClocksEventReasons. An idle GPU and a limit that somebody has set are left out.
_REASONS = {
    0x20 | 0x40: "thermal",
    0x80: "power brake",
    0x04: "power limit",
    0x08: "slowed down by the hardware",
    0x10: "kept at the clock of the slowest in its group",
}


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU at a moment. NaN: not known."""

    utilization: float = math.nan  # the fraction of the last moments in which a kernel ran
    clock: float = math.nan  # of its processors, in MHz
    most_clock: float = math.nan
    reasons: int = 0  # why the clock is not higher, as bits


class OpenGpu:
    """A GPU whose state can be read."""

    def __init__(self, nvml: Nvml, handle: ctypes.c_void_p) -> None:
        """Take the library and its handle of the GPU."""
        self._nvml, self._handle = nvml, handle

    def read(self) -> GpuState:
        """Return the state now."""
        rates = (ctypes.c_uint * 2)()  # of the processors, and of the memory; in per cent
        known = self._nvml.call("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(rates)) == SUCCESS
        reasons = ctypes.c_ulonglong(0)
        self._nvml.call("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle, ctypes.byref(reasons))
        return GpuState(
            rates[0] / 100 if known else math.nan,
            self._clock("nvmlDeviceGetClockInfo"),
            self._clock("nvmlDeviceGetMaxClockInfo"),
            int(reasons.value),
        )

    def _clock(self, function: str) -> float:
        clock = ctypes.c_uint(0)
        found = self._nvml.call(function, self._handle, _SM_CLOCK, ctypes.byref(clock)) == SUCCESS
        return float(clock.value) if found else math.nan


def open_gpu(uuid: str) -> OpenGpu | None:
    """Open a GPU by its UUID; None where the driver of NVIDIA does not know it, such as on AMD's or a MIG instance."""
    nvml = load_nvml()
    handle = ctypes.c_void_p()
    if nvml is None or nvml.call("nvmlInit_v2") != SUCCESS:
        return None
    if nvml.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle)) != SUCCESS:
        nvml.call("nvmlShutdown")
        return None
    return OpenGpu(nvml, handle)


def reason_of(reasons: int) -> str:
    """Return what holds the clock of a GPU back, from its bits; empty if nothing is worth naming."""
    return next((text for bits, text in _REASONS.items() if reasons & bits), "")
