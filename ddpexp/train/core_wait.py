"""Whether a rank gets the cores that it computes on, or waits for other programs to leave them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ddpexp.system.hardware import usable_cores
from ddpexp.system.text import counted

_SWITCH = "DDPEXP_HINTS"  # off: where many runs share a machine on purpose, as tests do
_SCHEDULED = Path("/proc/thread-self/schedstat")
_LARGE_SHARE = 0.7  # waited: with two threads for each core it would be half


def core_wait_hint() -> str | None:
    """Return a hint if this thread has waited for a core most of the time that it could have run, else None.

    Source: Documentation/scheduler/sched-stats.rst; kernels without it, and other systems, give no hint.
    """
    if os.environ.get(_SWITCH) == "off":
        return None
    with suppress(OSError, ValueError):
        ran, waited = map(int, _SCHEDULED.read_text().split()[:2])
        return hint(ran, waited, os.getloadavg()[0], usable_cores())
    return None


def hint(ran: int, waited: int, load: float, cores: int) -> str | None:
    """Judge how long a thread ran and waited for a core. Units: nanoseconds; runnable threads of the machine; cores."""
    if load <= cores or waited <= _LARGE_SHARE * (ran + waited):
        return None
    return (
        f"up to the end of the first step this process waited for a core {waited / (ran + waited):.0%} of the time "
        f"that it could have run (load average {load:.1f}, {counted(cores, 'core')} usable): other "
        "programs, or the threads of other workers, use the cores, and a step takes several times as long. Run fewer "
        "at once, or use fewer trainer.gpus and trainer.threads; ddpexp doctor shows the load."
    )
