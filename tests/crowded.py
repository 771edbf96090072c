"""A process as users' imports leave it before a fork: libraries with handlers of their own, processes, threads, a loop.

Imported, it is such a process; `python -m tests.crowded` forks itself from a coroutine of a running loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ddpexp.system.forks import fork

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGCHLD)


def descriptors() -> dict[str, str]:
    """Return what this process holds open, by number."""
    found = {}
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # the folder itself
            found[str(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


AT_IMPORT = sorted(descriptors().values())


def crowd() -> None:
    """Import what users import, and leave a thread behind that holds a lock for ever."""
    for name in ("torch", "numpy", "matplotlib.pyplot", "pandas"):
        with contextlib.suppress(ModuleNotFoundError):  # pandas, which no extra of ddpexp brings
            importlib.import_module(name)
    lock = threading.Lock()
    threading.Thread(target=lambda: lock.acquire() and threading.Event().wait(), daemon=True).start()
    draw()  # numpy imports its generator when it is first used


def multiply() -> float:
    """Multiply matrices large enough for several threads, with torch and with numpy."""
    import numpy as np
    import torch

    ones = torch.ones(300, 300)
    return float((ones @ ones).sum()) + float((np.ones((300, 300)) @ np.ones((300, 300))).sum())


def draw() -> list[float]:
    """Return the next number of each generator."""
    import numpy as np
    import torch

    return [random.random(), np.random.random(), torch.rand(()).item()]


def here() -> dict[str, Any]:
    """Return what a fork may rely on: its descriptors and handlers, and that libraries work in it."""

    async def add() -> int:
        await asyncio.sleep(0)
        return 2 + 3

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        threaded = list(pool.map(abs, (-1, -2)))
    held = descriptors()
    wakeup = signal.set_wakeup_fd(-1)
    logging.getLogger().debug("its lock is free")
    return {
        "descriptors": held,
        "wakeup": wakeup,
        "handlers": {number.name: repr(signal.getsignal(number)).partition(" at ")[0] for number in HANDLED},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "looping": asyncio._get_running_loop() is not None,
        "awaited": asyncio.run(add()),
        "threaded": threaded,
        "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
        "multiplied": multiply(),
        "drawn": draw(),
    }


def describe(path: str) -> int:
    """Write what is here to a file, as the entry point of a worker."""
    Path(path).write_text(json.dumps({**here(), "at_import": AT_IMPORT}))
    return 7


async def _fork_twice(folder: str) -> None:
    """Fork beside a running loop that has installed a handler and its own wakeup descriptor."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
    before = descriptors()
    codes = []
    for number in range(2):
        pid = fork(lambda number=number: describe(f"{folder}/{number}"))  # type: ignore[misc]
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)  # the loop still gets its signals
    print(json.dumps([codes, before, draw()]))


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Manager() as manager:
        crowd()
        asyncio.run(_fork_twice(sys.argv[1]))
        assert manager.list([1, 2])[1] == 2  # it has outlived the forks
elif __name__ == "tests.crowded":  # not the process of the manager
    crowd()
