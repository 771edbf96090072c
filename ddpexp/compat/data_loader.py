"""The processes of torch's DataLoader, and how Python's multiprocessing passes their batches on."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from multiprocessing import connection, queues
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_connection: Any = connection  # without types for what is not public
_queue: Any = queues.Queue
_python_address = _connection.arbitrary_address


def worker_processes(batches: Any) -> Sequence[BaseProcess]:
    """Return the processes of an iterator over a DataLoader; none without workers.

    Private: `_MultiProcessingDataLoaderIter._workers`; torch 2.10 to 2.13.
    Why: the PIDs can be had from the workers themselves, but torch reaps them, and keeps the exit code here.
    When it goes: torch's own error is raised, which names the PID and no reason.
    """
    return batches._workers if isinstance(batches, _MultiProcessingDataLoaderIter) else ()


def forget_half_made(error: BaseException) -> None:
    """Keep the iterator of a loader that could not be made from printing an error when it is collected.

    Private: `_MultiProcessingDataLoaderIter._shutdown`; torch 2.10 to 2.13.
    Why: the finalizer of torch's class needs what its constructor had not reached.
    When it goes: nothing fails, but an error may be printed.
    """
    trace = error.__traceback__
    while trace is not None:
        made = trace.tb_frame.f_locals.get("self")
        if isinstance(made, _MultiProcessingDataLoaderIter) and "_shutdown" not in vars(made):
            made._shutdown = True
        trace = trace.tb_next


def on_unsent(end: Callable[[BaseException], object]) -> None:
    """Have `end` called in this process with the error by which a queue cannot send an item.

    Private: `multiprocessing.queues.Queue._on_queue_feeder_error`; Python 3.10 to 3.13.
    Why: Python's thread would print the error and drop the item. The method is Python's own hook.
    When it goes: the rank waits for trainer.timeout.data_seconds, and finds the error in its log.
    """
    _queue._on_queue_feeder_error = staticmethod(lambda error, item: end(error))


def use_addresses_without_files() -> None:
    """Have this process listen in the abstract namespace of sockets, where no file outlives it.

    Source: unix(7), abstract sockets.

    Private: `multiprocessing.connection.arbitrary_address`, which is not documented; Python 3.10 to 3.13.
    Why: `multiprocessing.reduction` chooses an address by it for the file descriptors of batches.
    When it goes: the socket of a killed worker is left in the temporary folder.
    """
    _connection.arbitrary_address = _address_without_file


def _address_without_file(family: str) -> Any:
    return f"\0ddpexp-{os.getpid()}-{secrets.token_hex(8)}" if family == "AF_UNIX" else _python_address(family)
