"""What keeps DataLoader workers from passing their batches on: too few open files, or shared memory that is full."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from ddpexp.compat.data_loader import on_unsent
from ddpexp.errors import EXIT_DONE, EXIT_FAILED, LoaderError
from ddpexp.system.containers import enlarge_shared_memory, runtime, shared_memory_place
from ddpexp.system.limits import free_files, reason

_SHARED = "/dev/shm"
_SMALL = 64 << 20  # bytes of shared memory: the default of containers
_FEW_FILES, _LITTLE = 16, 1 << 20
_IN_SHARED_MEMORY = (errno.EROFS, errno.EACCES, errno.ENOENT)  # of torch's semaphores, where it cannot be used


def shared_memory() -> tuple[int | None, int | None]:
    """Return the total and the free shared memory of this host. Units: bytes."""
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def shared_memory_warning(num_workers: int) -> str | None:
    """Return a warning if there is little shared memory for the batches of DataLoader workers, else None."""
    size, _ = shared_memory()
    if not num_workers or size is None or size >= _SMALL:
        return None
    kind = runtime()
    return (
        f"{_SHARED} of this {shared_memory_place(kind)} has {size / 1e6:,.1f} MB, little for the batches of "
        f"data.num_workers={num_workers} DataLoader workers a rank: enlarge it ({enlarge_shared_memory(kind)}), or use "
        "data.num_workers=0"
    )


def no_room() -> LoaderError:
    """Return the error for batches that do not fit into shared memory."""
    size, free = shared_memory()
    found = (
        f"{size / 1e6:,.1f} MB, {free / 1e6:,.1f} MB of it free"
        if size is not None and free is not None
        else "too little"
    )
    kind = runtime()
    return LoaderError(
        f"the batches of the DataLoader workers do not fit into shared memory: {_SHARED} of this "
        f"{shared_memory_place(kind)} has {found}. Enlarge it ({enlarge_shared_memory(kind)}), or use "
        "data.num_workers=0, or a smaller trainer.micro_batch_size."
    )


def error_at_limit(error: BaseException, num_workers: int, is_start: bool = False) -> LoaderError | None:
    """Return the error for a limit that the workers of a loader have reached; None if it is about something else.

    `is_start`: the loader was being made, with its semaphores in shared memory.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC:
        left, (_, free) = free_files(Path(_SHARED)), shared_memory()
        if left is None or left >= _FEW_FILES or free is None or free < _LITTLE:
            return no_room()
        return _unusable(num_workers, f"{_SHARED} has too little room for files: {left} (nr_inodes of its mount)")
    if is_start and number in _IN_SHARED_MEMORY:
        return _unusable(num_workers, f"{_SHARED} cannot be written ({os.strerror(number)})")
    limit = reason(error)
    return _unusable(num_workers, limit) if limit is not None else None


def unsent(worker: int, number: int, num_workers: int) -> LoaderError:
    """Return the error for a worker that has ended because it could not send a batch; `number` is its errno."""
    found = error_at_limit(OSError(number, os.strerror(number)), num_workers)
    return found or LoaderError(f"DataLoader worker {worker} could not send a batch: {os.strerror(number)}.")


def _unusable(num_workers: int, why: str) -> LoaderError:
    return LoaderError(
        f"data.num_workers={num_workers}: the DataLoader workers of a rank cannot pass their batches on: {why}. Or use "
        "fewer data.num_workers: 0 needs none of this."
    )


def end_at_first_unsent(worker: int, problems: memoryview) -> None:
    """Have this worker end where it cannot send a batch, and leave the error's number in `problems`.

    Python's thread for that would print the error and drop the batch, for which its rank would wait.
    """

    def end(error: BaseException) -> None:
        problems[worker] = (error.errno or 0) if isinstance(error, OSError) else 0
        if not problems[worker]:
            traceback.print_exception(error)
        sys.stderr.flush()
        # With 0 torch is silent about the worker, in whatever it does when the signal of its end comes.
        os._exit(EXIT_DONE if problems[worker] else EXIT_FAILED)

    def in_thread(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OSError):  # the thread that passes files on: it would repeat this for each
            end(error)
        sys.__excepthook__(kind, error, trace)

    on_unsent(end)
    sys.excepthook = in_thread
