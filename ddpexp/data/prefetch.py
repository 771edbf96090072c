"""Making the next batches on the host while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_AHEAD = 2  # batches: one is ready when a step begins, and one is being made


def num_ahead(device: torch.device) -> int:
    """Return how many batches are made ahead; on CPU none, as the step itself needs the cores."""
    return 0 if device.type == "cpu" else _AHEAD


def ahead(tasks: Iterator[Callable[[], T]], number: int, device: torch.device) -> Iterator[T]:
    """Yield what tasks return, in order; a thread of its own runs up to `number` tasks before they are needed.

    A task depends on nothing but its own arguments, so that the results are the same with any number. The thread uses
    `device` when it allocates pinned memory. An error of a task is raised where its result would have been yielded.
    """
    if not number:
        for task in tasks:
            yield task()
        return
    thread = ThreadPoolExecutor(1, "ddpexp-batches", _use, (device,))
    waiting: deque[Future[T]] = deque()
    try:
        for task in tasks:
            waiting.append(thread.submit(task))
            if len(waiting) > number:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        thread.shutdown(wait=True, cancel_futures=True)


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
