"""What a new interpreter takes from its surroundings. A fork can stand for a new interpreter where it is equal.

Commands import this before anything else, so it imports little.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

SOCKET = "DDPEXP_TESTS_ZYGOTE"
"""The variable with the path of the zygote's socket."""
COMMANDS = "DDPEXP_TESTS_COMMANDS"
"""The variable with the path of the socket of the process that forks commands."""
MOST_BYTES = 1 << 20
"""Of a request to the zygote."""
VARIABLES = 2
"""Position of the environment's variables among what `state` returns."""

# Read once by Python, torch and other libraries, when they are loaded.
_VARIABLES = (
    "PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "TORCH", "PYTORCH", "ATEN_",
    "CUDA", "NVIDIA_", "LC_", "LANG", "MPL", "MATPLOTLIB",
)  # fmt: skip
_TAKEN_OVER = ("PYTHONWARNINGS", "PYTHONPATH")  # the fork applies them
_OF_AGENTS = ("TORCHELASTIC_", "TORCH_ELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")  # read when ranks meet, or by NCCL
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE)  # likewise
_NAMESPACES = ("cgroup", "ipc", "mnt", "pid", "user")
_ENTERED = (
    "net",
    "uts",
)  # namespaces that a fork enters: a host of the cluster is a network and a host name of its own


def ignored_signals() -> list[int]:
    """Return the signals that this process ignores, which programs that it starts inherit.

    Apart from SIGTTIN, which terminals alone send, and which MPICH's mpirun ignores.
    """
    others = set(range(1, signal.NSIG)) - {signal.SIGTTIN}
    return [number for number in sorted(others) if signal.getsignal(number) == signal.SIG_IGN]


def state(ignored: list[int], environ: Mapping[str, str] = os.environ) -> list[Any]:
    """Return plain values that are equal where new interpreters would be; `ignored` are signals as inherited."""
    numbers = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    limits = {number: resource.getrlimit(number) for number in numbers - set(_LIMITS)}
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith(_VARIABLES) and not (name in _TAKEN_OVER or name.startswith(_OF_AGENTS))
    }
    return [
        ignored,
        sorted([number, *limit] for number, limit in limits.items()),
        sorted([name, value] for name, value in variables.items()),
        _namespaces(_NAMESPACES),
        sorted(os.sched_getaffinity(0)),
        [*os.getresuid(), *os.getresgid(), os.getpriority(os.PRIO_PROCESS, 0)],
        [_text("/proc/self/cgroup"), _text("/proc/self/oom_score_adj")],
    ]


def surroundings() -> dict[str, Any]:
    """Return what a fork takes over from the process that asks for it."""
    umask = os.umask(0o77)
    os.umask(umask)
    return {
        "umask": umask,
        "limits": [resource.getrlimit(number) for number in _LIMITS],
        "pid": os.getpid(),
        "namespaces": _namespaces(_ENTERED),
    }


def take_over(request: dict[str, Any], streams: list[int]) -> None:
    """Have the surroundings of the process that has asked for this fork, as a new interpreter would."""
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    for number, limit in zip(_LIMITS, request["limits"], strict=True):
        resource.setrlimit(number, limit)
    _enter(request["pid"], request["namespaces"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.warnoptions[:] = filter(None, os.environ.get("PYTHONWARNINGS", "").split(","))
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    faults: Any = sys.modules.get("ddpexp.system.fault_injection")
    if faults is not None:
        faults._SPECIFICATION = os.environ.get(faults.VARIABLE, "")


def _namespaces(kinds: Sequence[str]) -> list[str]:
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]


def _enter(pid: int, namespaces: list[str]) -> None:
    """Enter those of a living process that are not this process's own, which takes root."""
    import ctypes  # here, as commands import this module first
    import platform

    libc = ctypes.CDLL(None, use_errno=True)
    for kind, theirs, own in zip(_ENTERED, namespaces, _namespaces(_ENTERED), strict=True):
        if theirs == own:
            continue
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns to {theirs}")
        platform._uname_cache = None  # type: ignore[attr-defined]


def reap() -> None:
    """Remove children of this process that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
