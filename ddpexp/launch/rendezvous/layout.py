"""From what was asked to how many workers run on which devices; refuses what this machine does not have."""

from __future__ import annotations

import os
from typing import Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.system.hardware import count_gpus, threads_per_worker, why_none

Auto = Literal["auto"]
_MOST_THREADS = (
    1024  # of a worker: more than machines have cores; the same number is right elsewhere, so fewer cores refuse none
)
_MOST_WORKERS = 256  # with more the requests to the fork server fill its socket before it answers


def resolve(
    gpus: Auto | int,
    device: str,
    backend: str,
    threads: Auto | int,
    told: int | None = None,
    present: int | None = None,
) -> Layout:
    """Decide the layout on this node from the `trainer.` keys of the same names.

    `told` is the number of workers on this node where somebody else has started them; their GPUs are looked at when all
    commands have met, for each may see its own alone. `present` are the GPUs of a machine that is not this one.

    Raises:
        RefusedError: more GPUs asked for than there are, or a backend that does not serve the device.
    """
    if gpus != "auto" and gpus < 1:
        raise RefusedError(f"trainer.gpus={gpus} starts no worker: use 1 or more, or auto for all GPUs.")
    if gpus != "auto" and gpus > _MOST_WORKERS:
        raise RefusedError(
            f"trainer.gpus={gpus} is more than the {_MOST_WORKERS} workers that one machine can start. Use fewer."
        )
    if present is None:
        present = 0 if device == "cpu" else count_gpus()
    if device == "cuda" and present == 0:
        why = why_none()
        raise RefusedError(
            f"trainer.device=cuda, but this machine shows no GPU{why}. Use trainer.device=cpu for CPU workers."
        )
    kind = "cuda" if present else "cpu"
    workers = told or (max(1, present) if gpus == "auto" else gpus)
    if kind == "cuda" and workers > present and told is None:
        raise RefusedError(
            f"trainer.gpus={workers}, but this machine shows {present} GPU{'s' if present > 1 else ''}. "
            f"Use trainer.gpus={present}, or trainer.device=cpu for {workers} CPU workers."
        )
    if backend == "nccl" and kind == "cpu":
        raise RefusedError(
            "trainer.backend=nccl needs GPUs, and the workers are on CPU. Use trainer.backend=gloo or auto."
        )
    if threads != "auto":
        check_threads(threads)
    return Layout(
        nodes=1,
        world_size=workers,
        device=kind,
        backend=("nccl" if kind == "cuda" else "gloo") if backend == "auto" else backend,
        threads=threads_per_worker(workers) if threads == "auto" else threads,
    )


def check_threads(threads: int) -> None:
    """Look at a number of threads that was typed, or that a run directory names.

    Raises:
        RefusedError: it leaves a worker without any, or with more than a process can start.
    """
    if threads < 1:
        raise RefusedError(f"trainer.threads={threads} leaves a worker without a thread: use 1 or more.")
    cores = os.cpu_count() or 1
    most = max(_MOST_THREADS, cores)
    if threads > most:
        raise RefusedError(
            f"trainer.threads={threads} is beyond this machine, which has {cores} core{'s' if cores > 1 else ''}: a "
            "worker could "
            f"not start so many. Use {most} or fewer, or trainer.threads=auto."
        )
