"""A rank joins its world: threads, precision of matrix products, deterministic algorithms, the process group."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from ddpexp.config.schema import Experiment, Trainer
from ddpexp.distributed import flight_recorder
from ddpexp.distributed.world import World
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.system.fault_injection import fault_point

_DEBUGGER_SECONDS = 7 * 24 * 3600.0
_MMAP_THRESHOLD_BYTES = 31 << 20  # just below the largest that glibc's dynamic threshold reaches


def join_world(experiment: Experiment, layout: Layout, control: Control) -> World:
    """Set up this process as the configuration says and join the other ranks. Ranks: all."""
    torch.set_num_threads(layout.threads)
    _keep_freed_memory()
    choose_algorithms(experiment.trainer)
    experiment.trust.make_importable()
    uses_nccl = layout.backend == "nccl" and layout.world_size > 1
    if uses_nccl:
        flight_recorder.enable(os.environ)
    world = World.join(layout, _collective_timeout(experiment, control))
    if uses_nccl:
        flight_recorder.answer_inquiries(control, os.environ)
    fault_point("joined")
    return world


def choose_algorithms(trainer: Trainer) -> None:
    """Set which algorithms and number formats torch uses in this process, before CUDA is initialised."""
    if trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    torch.backends.cudnn.benchmark = trainer.cudnn_benchmark


def _keep_freed_memory() -> None:
    """Make glibc keep the memory of activations from step to step, instead of returning and clearing pages each time.

    glibc keeps blocks up to the size of the largest one ever freed, at most 32 MiB. Programs that read their data into
    memory have freed such a block early on. ddpexp maps its data, and without this a step with convolutions takes a
    third longer. The block is never written to, so it costs no memory.
    """
    with suppress(RuntimeError):  # a limit on the address space is reported where memory is really needed
        torch.empty(_MMAP_THRESHOLD_BYTES, dtype=torch.uint8)


def _collective_timeout(experiment: Experiment, control: Control) -> float:
    """Return how long a rank waits in a collective. Units: seconds.

    Longer than the command's own timeouts: the command knows which rank is late, and reports it first. Where a rank
    may be at a debugger's prompt, the others wait as long as the user likes.
    """
    if control.terminal is not None:
        return _DEBUGGER_SECONDS
    timeout = experiment.trainer.timeout
    return 2 * (timeout.init_seconds + timeout.step_seconds + timeout.save_seconds + timeout.data_seconds)
