"""torch's DataLoader for one rank, with clear errors when one of its workers fails."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from ddpexp.compat.data_loader import forget_half_made, use_addresses_without_files, worker_processes
from ddpexp.data.base import IndexData
from ddpexp.data.loader_limits import (
    end_at_first_unsent,
    error_at_limit,
    no_room,
    unsent,
)
from ddpexp.data.samples import describe_samples, first_mismatch, form, tensors_of, user_code_error
from ddpexp.distributed.rng import seed_everything
from ddpexp.errors import CodeError, LoaderError
from ddpexp.system.process import die_with_parent, how_ended

_DUMP_SECONDS = 0.5  # for a worker to write its stack


class Key(NamedTuple):
    """A micro-batch to load."""

    seed: int
    indices: list[int]
    epoch_seed: int = 0


def load(
    data: IndexData, name: str, keys: Iterator[Key], num_workers: int, device: torch.device, timeout_seconds: float
) -> Iterator[Any]:
    """Yield a batch for each key, in order; one loader serves all epochs, so that its workers are started only once.

    `name` is the set's name in messages; `timeout_seconds` is the longest wait for a batch, 0 for no limit.

    Raises:
        CodeError: the data set raised an error. LoaderError: a worker died, hangs, or has no memory for its batches.
    """
    requested: deque[list[int]] = deque()
    page = _Page.of(num_workers)
    loader: DataLoader[Any] = DataLoader(
        _Fetch(data, name, page.current),  # type: ignore[arg-type]
        batch_sampler=_Keys(keys, requested),  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=_identity,
        pin_memory=device.type == "cuda",
        timeout=timeout_seconds if num_workers else 0,
        worker_init_fn=partial(_start_worker, os.getpid(), page) if num_workers else None,
        generator=torch.Generator().manual_seed(0),  # so that it does not draw from the global generator
    )
    received, deaths = 0, _deaths(page)
    try:
        batches = iter(loader)
        deaths.__enter__()  # before torch's own handler, which is installed by now
    except OSError as error:  # its semaphores are in shared memory, too
        forget_half_made(error)
        raise (error_at_limit(error, num_workers, is_start=True) if num_workers else None) or error from None
    except RuntimeError as error:  # raised by torch's handler, or a thread that cannot be started
        _raise_death(page)
        forget_half_made(error)
        raise (error_at_limit(error, num_workers) if num_workers else None) or error from None
    try:
        while True:
            _raise_death(page)  # a worker may have died before the handler was installed
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if "timed out" not in str(error):
                    _raise_reaped(batches, page)
                    raise (error_at_limit(error, num_workers) if num_workers else None) or error from None
                worker = received % num_workers  # torch uses the workers in turn
                _dump(page.pids[worker])
                at = page.current[worker]
                stuck = [at] if at in requested[0] else requested[0]
                raise _silent(worker, describe_samples(data, stuck, name), timeout_seconds) from None
            received += 1
            requested.popleft()
            if isinstance(batch, CodeError | LoaderError):
                try:
                    raise batch
                finally:
                    del batch  # its traceback would keep this frame and the workers alive until garbage collection
            yield batch
    finally:
        deaths.__exit__(None, None, None)  # an ExitStack would keep this frame and the workers alive in Python 3.10


@dataclass(frozen=True)
class _Page:
    """What a loader shares with its workers: the PID of each, its current sample, and what keeps it from sending."""

    pids: memoryview
    current: memoryview  # indices
    problems: memoryview  # errno

    @classmethod
    def of(cls, num_workers: int) -> _Page:
        size = num_workers or 1  # this process notes its current sample without workers, too
        words = memoryview(mmap.mmap(-1, 24 * size)).cast("q")
        return cls(words[:num_workers], words[size : 2 * size], words[2 * size :])


@dataclass(frozen=True)
class _Fetch:
    """A data set that returns collated batches, and seeds every generator first, in any process.

    Errors are returned instead of raised, because torch would wrap them in a text of its own and lose their type.
    """

    data: IndexData
    name: str
    current: memoryview  # the index of each worker's current sample, if samples are fetched one by one

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, key: Key) -> Any:
        seed, indices, epoch_seed = key
        seed_everything(seed)
        try:
            samples = self._samples(indices, epoch_seed)
            if self.data.collate is not default_collate:
                seed_everything(seed)
            return self._collated(samples, indices)
        except (CodeError, LoaderError) as error:
            return error

    def _samples(self, indices: list[int], epoch_seed: int) -> Any:
        info = get_worker_info()
        worker, begun = info.id if info is not None else 0, indices

        def begin(place: int | None) -> None:
            nonlocal begun
            begun = indices if place is None else [indices[place]]
            self.current[worker] = -1 if place is None else indices[place]

        try:
            return self.data.load_samples(indices, begin, epoch_seed)
        except Exception as error:
            raise user_code_error(error, self._description(begun)) from None

    def _collated(self, samples: Any, indices: list[int]) -> Any:
        collate = self.data.collate
        try:
            return _in_shared_memory(collate(samples))
        except Exception as error:
            if (info := get_worker_info()) is not None and _is_no_room(error):
                raise error_at_limit(error, info.num_workers) or no_room() from None
            if collate is not default_collate:
                name = getattr(collate, "__qualname__", type(collate).__qualname__)
                raise user_code_error(error, f"data.collate={name}, {self._description(indices)}") from None
            other = first_mismatch(samples)
            if other is None:
                raise user_code_error(error, self._description(indices)) from None
            pair = [indices[0], indices[other]]
            forms = f"{form(samples[0])} and {form(samples[other])}"
            raise user_code_error(error, f"{self._description(pair)} do not fit into one batch: {forms}") from None

    def _description(self, indices: list[int]) -> str:
        info = get_worker_info()
        where = f", in DataLoader worker {info.id}" if info is not None else ""
        return f"{describe_samples(self.data, indices, self.name)}{where}"


@dataclass(frozen=True)
class _Keys:
    """A batch sampler over an iterator of keys, without state to save; records the indices that were requested."""

    keys: Iterator[Key]
    requested: deque[list[int]]

    def __iter__(self) -> Iterator[Key]:
        for key in self.keys:
            self.requested.append(key.indices)
            yield key


def _identity(batch: Any) -> Any:
    return batch


def _in_shared_memory(batch: Any) -> Any:
    """Move a worker's batch to shared memory here: in torch's own thread, a lack of memory would only be printed."""
    if get_worker_info() is None:
        return batch
    for tensor in tensors_of(batch):
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return batch


def _is_no_room(error: Exception) -> bool:
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in ("shared memory", "shm"))


@contextmanager
def _deaths(page: _Page) -> Iterator[None]:
    """Raise an error in this process when one of its workers dies; torch's own names neither worker nor cause."""
    if (
        not page.pids.nbytes or threading.current_thread() is not threading.main_thread()
    ):  # signals are for the main thread
        yield
        return

    def look(number: int, frame: FrameType | None) -> None:
        _raise_death(page)
        if callable(before):
            before(number, frame)

    before = signal.signal(signal.SIGCHLD, look)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _raise_death(page: _Page) -> None:
    _raise_unsent(page)
    for worker, pid in enumerate(page.pids):
        problem = _death(pid)
        if problem is not None:
            raise _lost(worker, problem)


def _raise_unsent(page: _Page) -> None:
    for worker, number in enumerate(page.problems):
        if number:
            raise unsent(worker, number, len(page.pids)) from None


def _raise_reaped(batches: Any, page: _Page) -> None:
    """Raise an error if a worker died while it sent a batch: torch notices, and reaps it before its signal arrives."""
    _raise_unsent(page)
    for worker, process in enumerate(worker_processes(batches)):
        if process.exitcode:
            raise _lost(worker, how_ended(process.exitcode)) from None


def _death(pid: int) -> str | None:
    """Return how a child has ended that should be alive, without reaping it."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if pid else None
    except ChildProcessError:  # already reaped, or not a child: the handler also runs in children of a worker
        return None
    if found is None or (found.si_code == os.CLD_EXITED and found.si_status == 0):
        return None
    return how_ended(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def _silent(worker: int, samples: str, seconds: float) -> LoaderError:
    return LoaderError(
        f"DataLoader worker {worker} produced no batch for {seconds:g} s (trainer.timeout.data_seconds={seconds:g}): "
        f"it is at {samples}, and its stack is in the log of this rank. Raise trainer.timeout.data_seconds if a batch "
        "takes that long."
    )


def _lost(worker: int, problem: str) -> LoaderError:
    if problem.endswith("SIGBUS"):
        return no_room()
    text = f"DataLoader worker {worker} {problem}, and its batches are lost"
    if problem.endswith("SIGKILL"):
        return LoaderError(f"{text}: out of memory? Fewer data.num_workers need less.")
    return LoaderError(f"{text}: its last output is in the log of this rank.")


def _dump(pid: int) -> None:
    """Make a worker write its stack, if this process installed the handler before it forked the worker."""
    if pid and callable(signal.getsignal(signal.SIGQUIT)):
        os.kill(pid, signal.SIGQUIT)
        time.sleep(_DUMP_SECONDS)


def _start_worker(parent: int, page: _Page, worker: int) -> None:
    """Set up a worker: it ends with the rank, and ignores stop signals, which schedulers send to all processes."""
    die_with_parent(parent)
    page.pids[worker] = os.getpid()
    end_at_first_unsent(worker, page.problems)
    # Batches are sent through a socket, whose file would outlive a killed worker: use an address without a
    # file. Connecting requires the key that only the rank and its workers have.
    use_addresses_without_files()
    faulthandler.disable()  # torch has installed crash handlers that show no stack
    faulthandler.enable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the rank's handler is for its own children
