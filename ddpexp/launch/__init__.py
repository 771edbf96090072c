"""Start the workers of one experiment and watch over them; knows nothing of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ddpexp.launch.spawn import Server


@dataclass(frozen=True)
class Layout:
    """How many workers of which kind: resolved once per run directory."""

    nodes: int
    workers_per_node: int
    device: str  # cpu or cuda
    backend: str  # gloo or nccl
    threads: int  # CPU threads a worker

    @property
    def world_size(self) -> int:
        """Return the number of workers of the whole run."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True)
class Job:
    """What the workers are to do: call `entry` with `arguments` in every process."""

    entry: str  # module:function
    arguments: Sequence[str]
    layout: Layout
    logs: Path | None  # the folder for each rank's output; None keeps it only as long as the job runs


@runtime_checkable
class Launcher(Protocol):
    """Chosen by `launcher=`: runs a job in `layout.world_size` processes."""

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the workers, watch them and return the exit code; `server` is a fork server started early, if there is one.

        Raises:
            WorkerError: a worker failed; the first genuine cause, the others are only named.
        """
        ...
