"""A rank joins its world: threads, precision of matrix products, deterministic algorithms, the process group."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Any

import torch

from ddpexp.config.schema import Experiment
from ddpexp.distributed import flight_recorder
from ddpexp.distributed.world import World
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.settings.trainer import Trainer
from ddpexp.system import numa
from ddpexp.system.fault_injection import fault_point

_DEBUGGER_SECONDS = 7 * 24 * 3600.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # source: glibc, malloc.h
_MOST_OF_THE_HEAP = 32 << 20  # bytes of a block, the largest threshold that glibc accepts


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
    if world.device.type == "cuda" and experiment.trainer.numa_binding:
        numa.bind(_pci_address(world.device), layout.threads)
    if uses_nccl:
        flight_recorder.answer_inquiries(control, os.environ)
    fault_point("joined")
    return world


def choose_algorithms(trainer: Trainer) -> None:
    """Set which algorithms and number formats torch uses in this process, before CUDA is initialised."""
    if trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling new memory costs 8 ms for a pinned batch of 38 MB; it shows reads before writes, which have no place
        # in the results of a run.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    if trainer.conv_precision == "fp32":
        torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = trainer.cudnn_benchmark


def _pci_address(gpu: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(gpu)
    numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def _keep_freed_memory() -> None:
    """Make glibc keep the memory of activations from step to step, instead of returning and clearing pages each time.

    By itself it returns what is free at the end of the heap when that is more than 64 MiB, and whether it is depends on
    what happens to lie there: of equal runs of recipe=cifar10 about half had 8 times the page faults, and 0.6 of the
    speed. Blocks of more than 32 MiB are returned as before. Variables of glibc's in the environment are respected.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    with suppress(AttributeError, OSError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_THRESHOLD, _MOST_OF_THE_HEAP)
        set_option(_M_TRIM_THRESHOLD, -1)  # never


def _collective_timeout(experiment: Experiment, control: Control) -> float:
    """Return how long a rank waits in a collective. Units: seconds.

    Longer than the command's own timeouts: the command knows which rank is late, and reports it first. Where a rank
    may be at a debugger's prompt, the others wait as long as the user likes.
    """
    if control.terminal is not None:
        return _DEBUGGER_SECONDS
    timeout = experiment.trainer.timeout
    return 2 * (timeout.init_seconds + timeout.step_seconds + timeout.save_seconds + timeout.data_seconds)
