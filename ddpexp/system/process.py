"""Read the state of processes from /proc, tie a process's lifetime to its parent's, and defer its stop signals."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.25
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def how_ended(code: int) -> str:
    """Return how a process ended. Units: the exit code, or minus the signal number."""
    if code >= 0:
        return f"ended with exit code {code}"
    has_name = -code in set(signal.Signals)  # most real-time signals have none
    return f"was killed by {signal.Signals(-code).name if has_name else f'signal {-code}'}"


def stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None when the process is gone. Source: proc(5), stat.

    Index 0 is the state letter; 11 and 12 are user and system time in ticks, 13 and 14 the times of children that it
    has waited for; 19 is the start time; 49 is the exit status.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


@contextmanager
def away_from_current_folder() -> Iterator[None]:
    """Be in ddpexp's own folder in the block, for libraries that read settings from the current one."""
    here = os.open(os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(os.path.dirname(__file__))
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def children(pid: int) -> list[int]:
    """Return the child processes that have not been waited for; empty if the process is gone. Source: proc(5)."""
    pids: list[int] = []
    for thread in threads(pid):
        with suppress(OSError):  # the thread has ended
            pids += map(int, (thread / "children").read_text().split())
    return pids


def threads(pid: int) -> list[Path]:
    """Return the folders of a process's threads; empty if the process is gone. Source: proc(5), /proc/PID/task."""
    folder = Path(f"/proc/{pid}/task")
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def anonymous_bytes(pid: int | None = None) -> int:
    """Return the memory that a process, by default this one, has for itself: not that of files, nor shared memory.

    0 if the process is gone. Units: bytes. Source: proc(5), RssAnon.
    """
    try:
        with open(f"/proc/{pid or 'self'}/status") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon")), 0)
    except OSError:
        return 0


def ancestors(pid: int) -> list[int]:
    """Return the parent of a process, its grandparent and so on, as far as they are visible."""
    pids: list[int] = []
    while (fields := stat(pid)) is not None and (pid := int(fields[1])):
        pids.append(pid)
    return pids


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    fields = stat(pid)
    return fields is None or fields[0] in "ZX"


def exit_code(pid: int) -> int | None:
    """Return the exit code of a zombie, -n after signal n; None while it lives.

    Only for processes of this user: for others the kernel reports 0. Source: proc(5), stat, exit_code.
    """
    fields = stat(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields is not None and fields[0] == "Z" else None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger."""
    fields = stat(pid)
    return fields is not None and fields[0] in "Tt"


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies, however that happens; Linux only.

    `parent` is the expected parent's process id: if it is gone already, this process ends at once.
    Source: prctl(2), PR_SET_PDEATHSIG; the setting does not survive a fork, so every generation sets it again.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


def end_with_parent(
    code: int, report: Callable[[int], None], parent: int, was_lost: Callable[[], bool] = lambda: False
) -> None:
    """Exit with `code` soon after the parent process has ended; `report` is called first, with the parent's id.

    `parent` is the expected parent's process id. `was_lost`, called once, returns whether the original parent was gone
    before this process could record it.

    For processes that other programs start. The kernel's own signal arrives when the *thread* that forked ends, and
    programs fork from threads that they end (Open MPI does with many ranks). A separate thread polls here, whatever
    the main thread is waiting for.
    """

    def poll_parent() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals must wake the main thread
        lost = was_lost()
        while not lost and os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        try:
            report(parent)
        finally:
            os._exit(code)

    threading.Thread(target=poll_parent, daemon=True).start()


@contextmanager
def deferred_stop_signals() -> Iterator[None]:
    """Defer stop signals to the end of the block, which must not be interrupted."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])
