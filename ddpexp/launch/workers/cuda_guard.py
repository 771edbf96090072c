"""Detect that a process has initialised CUDA: what is forked from it could not use CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

# CUDA keeps it open from cuInit on. NVML does not need it: it opens /dev/nvidiactl and /dev/nvidia0, /dev/nvidia1 ...,
# and torch keeps NVML open after a check with PYTORCH_NVML_BASED_CUDA_CHECK=1. ROCm's /dev/kfd is the same for HIP.
_OPEN_IN_CUDA = ("/dev/nvidia-uvm", "/dev/kfd")
START = "the start of Python (sitecustomize, or a .pth file of an installed package)"


class CudaGuard:
    """Notes which import initialises CUDA in this process."""

    def __init__(self) -> None:
        """Check the process as it is before the first import."""
        self._culprit: str | None = None
        self.imported(START)

    def imported(self, name: str) -> None:
        """Note that CUDA was initialised by importing this module, if it was."""
        if self._culprit is None and is_initialised(_torch_reports(), open_files()):
            self._culprit = name

    def warning(self, rank: int) -> str | None:
        """Return why a worker cannot be forked from this process if it uses CUDA; None if it can."""
        self.imported("a module")
        return None if self._culprit is None else sentence(rank, self._culprit)


def is_initialised(torch_reports: bool, files: Sequence[str]) -> bool:
    """Return whether a process has initialised CUDA, given the files that it has open.

    torch knows only of itself: neither of other libraries, nor of `torch.cuda.is_available()`, which initialises the
    driver too.
    """
    return torch_reports or any(name in _OPEN_IN_CUDA for name in files)


def sentence(rank: int, culprit: str) -> str:
    """Return the warning for a worker that is started as a new interpreter."""
    subject = culprit if culprit in (START, "a module") else f"importing {culprit}"
    return (
        f"rank {rank} starts as a new interpreter, which takes seconds: {subject} initialised CUDA in the process that "
        "forks the workers, and a fork of it could not use CUDA. Call CUDA in a function that runs in the worker, not "
        "where a module is imported."
    )


def open_files() -> list[str]:
    """Return the paths of the files that this process has open."""
    paths = []
    with suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the listing itself
                paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return paths


def _torch_reports() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return bool(cuda is not None and hasattr(cuda, "is_initialized") and cuda.is_initialized())
