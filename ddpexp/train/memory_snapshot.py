"""Write the history of a GPU's memory, by trainer.memory_snapshot: of a step, or when the memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ddpexp.compat import cuda_memory
from ddpexp.distributed.world import World
from ddpexp.run.directory import RunDir
from ddpexp.system.files import typed
from ddpexp.system.limits import reason_with_limit

_OPEN = "open it at https://pytorch.org/memory_viz"
_LOG = logging.getLogger("ddpexp")


@dataclass(frozen=True)
class StepSnapshot:
    """Writes what one step allocates, on each rank; without a step nothing."""

    run: RunDir | None = None
    rank: int = 0
    step: int | None = None  # counted from 1

    def next_after(self, step: int) -> int | None:
        """Return the next step after which this begins or ends. Units: steps done."""
        if self.step is None or step >= self.step:
            return None
        return self.step if step == self.step - 1 else self.step - 1

    def begin(self, step: int) -> None:
        """Record what the next step allocates, if it is the one."""
        if step + 1 == self.step:
            cuda_memory.record()

    def end(self, step: int) -> None:
        """Write what this step has allocated, if it is the one."""
        if step == self.step and self.run is not None:
            _write(self.run.profile(step), self.rank, f"of step {step}")
            cuda_memory.stop()


@contextmanager
def on_oom(setting: Literal["oom"] | int | None, run: RunDir, world: World) -> Iterator[None]:
    """With `oom`, record every allocation, and write the newest ones when the memory runs out."""
    if setting != "oom":
        yield
        return
    cuda_memory.record()
    try:
        yield
    except torch.OutOfMemoryError:
        _write(run.profiles / "oom", world.rank, "when it ran out")
        raise


def _write(folder: Path, rank: int, when: str) -> None:
    path = folder / f"rank{rank}.memory.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cuda_memory.dump(path)
    except OSError as error:
        _LOG.warning(f"the memory of rank {rank} {when} cannot be written: {reason_with_limit(error, path)}")
    else:
        _LOG.log(
            logging.WARNING if when == "when it ran out" else logging.INFO,
            f"memory of rank {rank} {when}: {typed(path)} ({_OPEN})",
        )
