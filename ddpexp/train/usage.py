"""What the ranks use of their machines while they train: memory of host and GPU, and how busy the GPU is."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from ddpexp.settings.metrics import GPU, MEMORY
from ddpexp.system.gpu_state import GpuState, open_gpu
from ddpexp.system.oom import available_bytes
from ddpexp.system.process import anonymous_bytes, children
from ddpexp.train.step_times import SLOW_CLOCK, SLOW_MOST_CLOCK, SLOW_REASONS

GIB = 1 << 30
HOST, AVAILABLE = f"{MEMORY}host", f"{MEMORY}available"
UTILIZATION, CLOCK = f"{GPU}utilization", f"{GPU}clock"
_OF_HOST = (HOST, AVAILABLE)
_OF_GPU = (f"{MEMORY}gpu", f"{MEMORY}gpu_reserved", f"{MEMORY}gpu_peak", UTILIZATION, CLOCK)
_LIMITS = ("most_clock", "reasons")  # of a rank's GPU; they are recorded where it is the slow one
_INTERVAL_SECONDS = 1.0  # in which a rank measures once: each costs up to a millisecond


class UsageMeter:
    """Measures what this rank uses. As numbers, because they travel in the reduction of a record; NaN: not known."""

    def __init__(self, device: torch.device) -> None:
        """Measure the host, and the GPU if that is the device."""
        self._gpu = open_gpu(_uuid(device)) if device.type == "cuda" else None
        self._device = device
        self._numbers: list[float] = []
        self._at = -math.inf

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the numbers, the same on all ranks of a run."""
        return names_on(self._device.type)

    def row(self) -> list[float]:
        """Return the numbers, as they were at most a second ago."""
        now = time.monotonic()
        if now - self._at >= _INTERVAL_SECONDS:
            self._numbers, self._at = [*_host(), *(self._of_gpu() if self._device.type == "cuda" else ())], now
        return self._numbers

    def _of_gpu(self) -> Iterator[float]:
        stats: Mapping[str, Any] = torch.cuda.memory_stats(self._device)
        for name in ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak"):
            yield stats.get(name, 0) / GIB
        state = GpuState() if self._gpu is None else self._gpu.read()
        yield from (state.utilization, state.clock, state.most_clock, float(state.reasons))


def names_on(device: str) -> Sequence[str]:
    """Return the names of the numbers of a rank on a kind of device."""
    return (*_OF_HOST, *_OF_GPU, *_LIMITS) if device == "cuda" else _OF_HOST


def usage_columns(names: Sequence[str], ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return what a record says: of several ranks the median, and the least and the greatest beside it.

    Units: memory in GiB, utilization as a fraction, clocks in MHz.
    """
    columns: dict[str, float] = {}
    for name, values in zip(names, zip(*ranks, strict=True), strict=True):
        known = [value for value in values if not math.isnan(value)]
        if name in _LIMITS or not known:
            continue
        columns[name] = round(median(known), 4)
        if len(ranks) > 1:
            columns |= {f"{name}_least": round(min(known), 4), f"{name}_greatest": round(max(known), 4)}
    return columns


def slow_gpu(names: Sequence[str], row: Sequence[float]) -> dict[str, float]:
    """Return what a record says of the GPU of the slow rank. Units: MHz."""
    known = dict(zip(names, row, strict=True))
    columns = {SLOW_CLOCK: CLOCK, SLOW_MOST_CLOCK: "most_clock", SLOW_REASONS: "reasons"}
    found = {column: known.get(name, math.nan) for column, name in columns.items()}
    return {} if any(map(math.isnan, found.values())) else found


def _host() -> Iterator[float]:
    """Yield the memory of this process with its data workers, and how much more it can get."""
    yield sum(map(anonymous_bytes, [os.getpid(), *children(os.getpid())])) / GIB
    yield available_bytes() / GIB


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
