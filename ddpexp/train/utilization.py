"""Model FLOPs utilization (MFU): which part of its devices' peak a training uses for the model's own operations."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch

from ddpexp.data.batches import TrainBatches
from ddpexp.data.lengths import ByLength
from ddpexp.data.streams import Batches
from ddpexp.data.token_batches import ByTokens
from ddpexp.errors import DdpexpError
from ddpexp.settings.trainer import Trainer
from ddpexp.system import separate_process
from ddpexp.system.peak_flops import Numbers, peak_flops
from ddpexp.system.text import flops_text
from ddpexp.task import HasFlops, HasTrainStep

_COUNT = "ddpexp.plan.summarize:answer"
_MEMORY_PART = 0.25  # of the free memory, for the process that counts


@dataclass(frozen=True)
class Utilization:
    """Attributes: `peak` of all devices together, and `flops` of a sample, once they are known. Units: FLOPs, seconds.

    MFU counts forward and backward of the model as it is written, not what activation checkpointing computes again.
    """

    peak: float
    flops: Future[float | None]

    def column(self, samples_per_second: float) -> dict[str, float]:
        """Return the value of a record; nothing as long as it is not known."""
        flops = self.flops.result() if self.flops.done() else None
        return {} if flops is None else {"train/mfu": samples_per_second * flops / self.peak}


def utilization_of(
    trainer: Trainer, device: torch.device, world_size: int, task: Any, train: Batches, request: Mapping[str, Any]
) -> Utilization | None:
    """Return the utilization that records are to have, which counts FLOPs in a process of its own if it has to.

    None where the peak of the devices is not known, or not what a sample takes. `request` has the configuration and
    the prepared data, as `ddpexp.plan.summarize` takes them. Ranks: zero.
    """
    peak, name = _peak(trainer, device)
    if peak is None:
        return None
    log = logging.getLogger("ddpexp")
    flops: Future[float | None] = Future()
    if isinstance(task, HasFlops):
        flops.set_result(float(task.flops_per_sample))
    elif why := _uncountable(task, train):
        if trainer.peak_tflops is not None:
            log.warning(f"no train/mfu: {why}. The task can give the number: flops_per_sample.")
        return None
    else:
        text = f"FLOPs   %s a sample, and at most {flops_text(peak)} a second of a device{name}: train/mfu"
        Thread(target=_count, args=(request, flops, text), name="count-flops", daemon=True).start()
    return Utilization(peak * world_size, flops)


def _peak(trainer: Trainer, device: torch.device) -> tuple[float | None, str]:
    """Return the peak of one device, and its name in parentheses."""
    if trainer.peak_tflops is not None:
        return trainer.peak_tflops * 1e12, ""
    if device.type != "cuda":
        return None, ""
    name = torch.cuda.get_device_name(device)
    numbers: Numbers = trainer.computes_in
    if numbers == "fp32" and trainer.matmul_precision != "highest":
        numbers = "tf32"
    return peak_flops(name, numbers), f" ({name})"


def _uncountable(task: Any, train: Batches) -> str:
    """Return why a sample cannot stand for all; empty if it can."""
    if isinstance(task, HasTrainStep):
        return "the task's train_step decides how often the model is called"
    if isinstance(train, TrainBatches) and isinstance(train.order, ByTokens | ByLength):
        return "the samples differ in length"
    return ""


def _count(request: Mapping[str, Any], flops: Future[float | None], text: str) -> None:
    try:
        # The graphics memory is the run's, and so is the terminal.
        found = separate_process.call(
            _COUNT, {**request, "memory_part": _MEMORY_PART}, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except DdpexpError:
        found = {}
    forward, backward = found.get("forward_flops"), found.get("backward_flops")
    if forward and backward:
        logging.getLogger("ddpexp").info(text, flops_text(forward + backward))
        flops.set_result(forward + backward)
    else:
        logging.getLogger("ddpexp").info("no train/mfu: FLOPs could not be counted; `ddpexp summary` says why")
        flops.set_result(None)
