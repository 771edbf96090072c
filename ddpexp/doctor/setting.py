"""What the findings are judged for: the workers that a run would have on a host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpexp.config.registry import key_of_class
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout, WorkerRequest
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.run import directory
from ddpexp.settings.data import Data


@dataclass(frozen=True)
class Setting:
    """A run on one host."""

    folder: str  # in which its run directory would be made
    launcher: str = "spawn"
    device: str = "cpu"
    nodes: int = 1
    world_size: int = 1
    workers: int = 1  # on this host
    threads: int = 1  # per worker
    num_workers: int = 0  # DataLoader workers per worker
    compiles: bool = False
    data: Data | None = None

    @classmethod
    def of(cls, experiment: Experiment, request: WorkerRequest) -> Setting:
        """Return the setting as far as it is known before the commands of a job have met."""
        trainer = experiment.trainer
        try:
            layout = resolve(request.gpus, request.device, request.backend, request.threads)
        except RefusedError:  # the launcher reports it
            workers = request.gpus if isinstance(request.gpus, int) and request.gpus > 0 else 1
            layout = Layout(1, workers, "cpu", "gloo", 1)
        return cls(
            folder=str(directory.parent(experiment.run.dir, experiment.recipe.name)),
            launcher=key_of_class("launcher", type(experiment.launcher)) or "other",
            device=layout.device,
            nodes=request.nodes if isinstance(request.nodes, int) else 1,
            world_size=layout.world_size,
            workers=layout.world_size,
            threads=layout.threads,
            num_workers=experiment.data.num_workers,
            compiles=trainer.compiles,
            data=experiment.data,
        )

    def with_layout(self, layout: Layout, workers: int) -> Setting:
        """Return the setting of a host that has `workers` of the ranks."""
        return replace(
            self,
            device=layout.device,
            nodes=layout.nodes,
            world_size=layout.world_size,
            workers=workers,
            threads=layout.threads,
        )
