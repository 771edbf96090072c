"""Resolve the requested workers to a layout: how many run on which devices; refuses what this machine cannot offer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.system.gpus import Device, nccl_shares_gpus, shared_gpu
from ddpexp.system.hardware import threads_per_worker, visible_devices, why_hidden
from ddpexp.system.text import counted

Auto = Literal["auto"]
_MAX_THREADS = 1024  # per worker; not bounded by this machine's cores, since the configuration may be for another one
_MAX_WORKERS = 256  # with more, the requests to the fork server fill its socket before it answers


def resolve(
    gpus: Auto | int,
    device: str,
    backend: str,
    threads: Auto | int,
    external_workers: int | None = None,
    present: int | None = None,
) -> Layout:
    """Resolve the layout of this node from the `trainer.` keys of the same names.

    `external_workers` is the number of workers on this node where they are started externally; their GPUs are checked
    after the rendezvous, since each may see only its own. `present` is the number of GPUs of another machine.

    Raises:
        RefusedError: more GPUs requested than there are, or a backend that does not support the device.
    """
    if gpus != "auto":
        check_workers(gpus)
    devices = visible_devices() if present is None and device != "cpu" else ()
    present = len(devices) if present is None else present
    if device == "cuda" and present == 0:
        raise RefusedError(
            f"needs a GPU, but this machine shows none{why_hidden()}",
            key="trainer.device",
            value="cuda",
            suggestion="Use trainer.device=cpu for CPU workers.",
        )
    kind = "cuda" if present else "cpu"
    workers = external_workers or (max(1, present) if gpus == "auto" else gpus)
    if kind == "cuda" and workers > present and external_workers is None:
        raise RefusedError(
            f"is more than the {counted(present, 'GPU')} of this machine{why_hidden()}",
            key="trainer.gpus",
            value=workers,
            suggestion=f"Use trainer.gpus={present}, or trainer.device=cpu for {workers} CPU workers.",
        )
    if backend == "nccl" and kind == "cpu":
        raise RefusedError(
            "needs GPUs, but the workers are on CPU",
            key="trainer.backend",
            value="nccl",
            suggestion="Use trainer.backend=gloo or auto.",
        )
    if backend == "nccl" and external_workers is None:
        check_nccl_shares(devices[:workers])
    if threads != "auto":
        check_threads(threads)
    return Layout(
        nodes=1,
        world_size=workers,
        device=kind,
        backend=_backend(kind, devices) if backend == "auto" else backend,
        threads=threads_per_worker(workers) if threads == "auto" else threads,
    )


def check_workers(gpus: int) -> None:
    """Check a number of workers per machine.

    Raises:
        RefusedError: it is more than a machine can start.
    """
    if gpus > _MAX_WORKERS:
        raise RefusedError(
            f"is more than the {_MAX_WORKERS} workers that one machine can start",
            key="trainer.gpus",
            value=gpus,
            suggestion="Use fewer.",
        )


def _backend(kind: str, devices: Sequence[Device], environ: Mapping[str, str] = os.environ) -> str:
    """Return the backend for `auto`: NCCL, but gloo between CPU workers and between MIG instances."""
    by_gloo = any(device.is_mig for device in devices) and not nccl_shares_gpus(environ)
    return "nccl" if kind == "cuda" and not by_gloo else "gloo"


def check_nccl_shares(devices: Sequence[Device], environ: Mapping[str, str] = os.environ) -> None:
    """Check that NCCL can connect the workers of this machine, given their devices.

    Raises:
        RefusedError: two of them are MIG instances of the same GPU.
    """
    gpu = shared_gpu(devices)
    if gpu is not None and not nccl_shares_gpus(environ):
        raise RefusedError(
            f"does not support two workers on MIG instances of the same GPU ({gpu})",
            key="trainer.backend",
            value="nccl",
            suggestion="Use trainer.backend=auto, which takes gloo here; with NCCL 2.30 or newer you can export "
            "NCCL_MULTI_RANK_GPU_ENABLE=1 instead.",
        )


def check_threads(threads: int) -> None:
    """Check a number of threads from the command line or a run directory.

    Raises:
        RefusedError: it is more than a process can start.
    """
    cores = os.cpu_count() or 1
    maximum = max(_MAX_THREADS, cores)
    if threads > maximum:
        raise RefusedError(
            f"is too many for this machine, which has {counted(cores, 'core')}: a worker could not "
            "start so many threads",
            key="trainer.threads",
            value=threads,
            suggestion=f"Use {maximum} or fewer, or trainer.threads=auto.",
        )
