"""Whether the checkpoints of a run fit on the disk, and within the limits of the shell."""

from __future__ import annotations

import logging
import math
import os
import resource
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ddpexp.checkpoint import format as on_disk
from ddpexp.errors import RefusedError
from ddpexp.run.directory import RunDir
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Strategy
from ddpexp.system.files import relative
from ddpexp.system.text import distinct_size_texts, size_text
from ddpexp.train.loop import Loop

_OTHER_FILES = 8  # of a checkpoint beside those of tensors: five parts, config.yaml, the manifest, and their folder


def check_disk_space(run: RunDir, trainer: Trainer, loop: Loop) -> None:
    """Check that the disk and the shell's limits have room for a checkpoint. Ranks: rank zero.

    Raises:
        RefusedError: not even one checkpoint fits, and trainer.on_save_error=stop.
    """
    files = _expected_bytes(loop)
    needed, largest = sum(files), max(files)
    disk = os.statvfs(run.path)
    free = disk.f_bavail * disk.f_frsize
    problem = None
    if free < needed:
        takes, has = distinct_size_texts(needed, free)
        problem = f"a checkpoint takes {takes} and {run.path} has {has} free"
        remedy = "Make room, or choose another place with run.dir=... ."
    elif disk.f_files and disk.f_favail < (num_files := sum(map(bool, files)) + _OTHER_FILES):
        problem = (
            f"a checkpoint takes {num_files} files and the file system of {run.path} can hold {disk.f_favail:,} more "
            f"of its {disk.f_files:,} (inodes; {size_text(free)} are free)"
        )
        remedy = "Remove files, or choose another place with run.dir=... ."
    elif (allowed := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY and largest > allowed:
        problem = (
            f"a file of a checkpoint takes {size_text(largest)} and this shell allows {allowed // 1024:,} KiB a file "
            "(ulimit -f)"
        )
        remedy = "Raise that limit."
    if problem is not None and trainer.on_save_error == "stop":
        raise RefusedError(f"{problem}, so that nothing of this run could be saved", suggestion=remedy)
    existing = on_disk.scan(run.checkpoints).complete
    existing_bytes = sum(file.num_bytes for checkpoint in existing for file in checkpoint.files.values())
    kept = (trainer.keep_last or 1) + 1  # the oldest goes when the newest is complete
    if trainer.keep_every is not None:
        kept += loop.run.num_steps // trainer.keep_every
    if problem is not None:
        logging.getLogger("ddpexp").warning("%s: %s", problem, remedy)
    elif free + existing_bytes < kept * needed:
        text = "%s has %s free, and %d checkpoints of %s exist at the same time (%s): saving will fail later"
        shown = f"trainer.keep_last={'null' if trainer.keep_last is None else trainer.keep_last}"
        shown += f" trainer.keep_every={trainer.keep_every}" if trainer.keep_every is not None else ""
        logging.getLogger("ddpexp").warning(
            text, relative(run.path), size_text(free + existing_bytes), kept, size_text(needed), shown
        )


def _expected_bytes(loop: Loop) -> list[int]:
    """Return a lower bound for the size of each file of a checkpoint that holds tensors. Units: bytes."""
    strategy, average = loop.run.strategy, loop.average
    models = strategy.modules
    weights = [_num_bytes(strategy, module.state_dict().values()) for module in models.values()]
    averages = []
    if average is not None:
        averages = [_num_bytes(strategy, average.tensors(name).values()) for name in models]
    return [*weights, *averages, sum(_state_bytes(strategy, optimizer) for optimizer in loop.run.optimizers.values())]


def _num_bytes(strategy: Strategy, values: Iterable[Any]) -> int:
    """Return the size of all distinct tensors among the values, as a checkpoint holds them. Units: bytes."""
    shards = [strategy.shard("", value) for value in values if isinstance(value, Tensor)]
    sizes = {shard.tensor.data_ptr(): math.prod(shard.shape) * shard.tensor.element_size() for shard in shards}
    return sum(sizes.values())


def _state_bytes(strategy: Strategy, optimizer: torch.optim.Optimizer) -> int:
    """Return the size of the state that one of torch's optimizers allocates with its first step. Units: bytes."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return 0
    total = 0
    for group in optimizer.param_groups:
        copies = 2 * ("betas" in group or "rho" in group) + bool(group.get("amsgrad")) + bool(group.get("momentum"))
        copies += ("alpha" in group) + bool(group.get("centered"))
        total += copies * _num_bytes(strategy, (parameter for parameter in group["params"] if parameter.requires_grad))
    return total
