"""The plan as a value, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ddpexp.config.fitted import FIT
from ddpexp.config.schema import Experiment
from ddpexp.config.strategies import estimator_of
from ddpexp.data.batch_plan import BatchPlan
from ddpexp.plan.calibrate import Calibration
from ddpexp.plan.gather import Curves
from ddpexp.plan.layout import Assumed
from ddpexp.plan.memory import AVERAGE, checkpoint_files, checkpoints_at_once, num_checkpoints, parts
from ddpexp.plan.speed import Costs, Place, Step, predict
from ddpexp.run.directory import RunDir
from ddpexp.strategy.estimator import Estimator, Facts, MemoryItem, Traffic
from ddpexp.system import files
from ddpexp.system.job_schedulers import SCHEDULERS


@dataclass(frozen=True)
class Outcome:
    """All results of the plan."""

    experiment: Experiment
    assumed: Assumed
    batch: BatchPlan
    facts: Facts
    steps_per_epoch: int
    num_steps: int
    resumes: RunDir | None  # the existing run that would be resumed
    costs: Costs | None = None  # None: not given
    calibration: Calibration | None = None
    curves: Curves = field(default_factory=dict)  # empty: not wanted

    @property
    def folder(self) -> str:
        """Return the run directory."""
        run_dir = self.experiment.run.dir
        return (
            files.relative(self.resumes.path)
            if self.resumes
            else run_dir or f"outputs/{self.experiment.recipe.name}/<date>_<time>"
        )

    @property
    def dropped_samples(self) -> int:
        """Return how many samples an epoch leaves out; they differ from epoch to epoch."""
        return self.facts.num_samples % self.batch.global_batch_size

    @property
    def num_parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(parameter.num_elements for parameter in self.facts.parameters)

    @property
    def num_trained(self) -> int:
        """Return the number of elements of the parameters that are not frozen."""
        return sum(parameter.num_elements for parameter in self.facts.parameters if parameter.trained)

    @property
    def estimator(self) -> Estimator:
        """Return the estimates for the strategy."""
        return estimator_of(self.experiment.strategy)

    def traffic(self) -> Traffic:
        """Return what the ranks send one another in a step."""
        return self.estimator.traffic(self.facts, self.experiment.trainer, self.assumed.layout)

    def parts(self) -> list[MemoryItem]:
        """Return what a rank holds."""
        return parts(self.facts, self.experiment.trainer, self.estimator, self.assumed.layout)

    def rank_bytes(self, on_host: bool) -> int:
        """Return the known bytes of a rank: on its device, or beside that on its host."""
        return sum(part.num_bytes or 0 for part in self.parts() if self.is_on_host(part) == on_host)

    def moments(self) -> Mapping[str, int]:
        """Return what a rank holds of the model at moments other than a step, on its device. Units: bytes.

        In evaluations it also has what stays between two steps; of CPU workers that is the copy for a checkpoint, too.
        """
        found = self.estimator.moments(self.facts, self.experiment.trainer, self.assumed.layout)
        stays = [part for part in self.parts() if part.on_host and not self.is_on_host(part)]
        stays += [part for part in self.parts() if part.name == AVERAGE] * 2  # while the weights have its values
        beside = {"evaluation": sum(part.num_bytes or 0 for part in stays)}
        return {moment: num_bytes + beside.get(moment, 0) for moment, num_bytes in found.items()}

    def most_bytes(self) -> int:
        """Return the most that a rank holds on its device."""
        return max(self.rank_bytes(on_host=False), *self.moments().values(), 0)

    def is_on_host(self, part: MemoryItem) -> bool:
        """Return whether a part is in the host's memory while the worker computes elsewhere."""
        return part.on_host and self.assumed.layout.device == "cuda"

    @property
    def place(self) -> Place:
        """Return where the workers are, for the time of a step."""
        return place_of(self.assumed, self.experiment, self.facts)

    def step(self) -> Step | str:
        """Return the time of a step, or why it is left out."""
        traffic = self.traffic()
        alone = traffic.transport == "none"
        if self.costs is None:
            more = "" if alone else ", --alpha_us and --bandwidth_gbps"
            return f"left out: give --compute_ms{more}, or measure with --calibrate"
        if alone:
            return predict(self.costs, self.batch.gradient_accumulation_steps, [], self.place)
        if traffic.unknown:
            return f"left out: {traffic.unknown}"
        if self.costs.alpha_us is None or self.costs.bandwidth_gbps is None:
            return "left out: give --alpha_us and --bandwidth_gbps, which cannot be measured with one worker"
        return predict(self.costs, self.batch.gradient_accumulation_steps, traffic.num_bytes, self.place)

    def files(self) -> dict[str, int]:
        """Return the sizes of a checkpoint's files."""
        return checkpoint_files(self.facts, self.experiment.trainer)

    def checkpoints(self) -> tuple[int, int]:
        """Return how many checkpoints the run makes, and how many are there at once."""
        made = num_checkpoints(self.experiment.trainer, self.num_steps, self.steps_per_epoch)
        return made, checkpoints_at_once(self.experiment.trainer, made, self.num_steps)

    def notes(self) -> list[str]:
        """Return the assumptions as sentences."""
        model = [f"the model was {self.facts.notes['model']}"] if "model" in self.facts.notes else []
        fit = self.experiment.trainer.micro_batch_size == FIT
        found = ["trainer.micro_batch_size=fit is planned as the largest that it can be"] if fit else []
        return [*self.assumed.notes, *found, *model, *(self.calibration.notes if self.calibration else ())]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values. Units: bytes."""
        layout = self.assumed.layout
        cut = self.traffic().buckets
        files = self.files()
        made, at_once = self.checkpoints()
        return {
            "recipe": self.experiment.recipe.name,
            "world": {**asdict(layout), "workers_per_node": self.assumed.workers, "cores_per_node": self.assumed.cores},
            "batch": {key: value for key, value in asdict(self.batch).items() if key != "data_size"},
            "samples": self.facts.num_samples,
            "steps_per_epoch": self.steps_per_epoch,
            "dropped_samples": self.dropped_samples,
            "num_steps": self.num_steps,
            "run_dir": self.folder,
            "resumes": self.resumes is not None,
            **self._requests(),
            "parameters": self.num_parameters,
            "trained_parameters": self.num_trained,
            "groups": [asdict(group) for group in self.facts.groups],
            "reduction": self.traffic().transport,
            "buckets": [asdict(bucket) for bucket in cut],
            "memory": {
                "rank_bytes": self.rank_bytes(on_host=False),
                "host_bytes": self.rank_bytes(on_host=True),
                "moments": dict(self.moments()),
                "parts": [{**asdict(part), "on_host": self.is_on_host(part)} for part in self.parts()],
            },
            "checkpoint": {"bytes": sum(files.values()), "files": files, "made": made, "at_once": at_once},
            "step": self._step_as_dict(),
            "notes": self.notes(),
        }

    def _requests(self) -> dict[str, list[str]]:
        """Return the lines that request resources, by the name of the job scheduler."""
        request = self.assumed.request
        return {
            scheduler.name: list(request.lines) if request is not None and request.scheduler is scheduler else []
            for scheduler in SCHEDULERS
        }

    def _step_as_dict(self) -> dict[str, Any]:
        """Return the step time as plain values. Units: milliseconds, unless the name has another unit."""
        step = self.step()
        costs = {"costs": None if self.costs is None else asdict(self.costs)}
        measured = {} if self.calibration is None else {"measured": asdict(self.calibration.measured)}
        if isinstance(step, str):
            return {"total_ms": None, "why": step, **costs, **measured}
        seconds = self.num_steps * step.total_ms / 1e3
        rate = 1e3 * self.batch.global_batch_size / step.total_ms
        return {
            "total_ms": step.total_ms,
            **asdict(step),
            "samples_per_second": rate,
            "train_seconds": seconds,
            **costs,
            **measured,
        }


def place_of(assumed: Assumed, experiment: Experiment, facts: Facts) -> Place:
    """Return where the workers are, and how they reduce gradients."""
    layout = assumed.layout
    return Place(
        world_size=layout.world_size,
        workers=assumed.workers,
        threads=layout.threads,
        cores=0 if layout.device == "cuda" else assumed.cores,
        way=estimator_of(experiment.strategy).traffic(facts, experiment.trainer, layout).transport,
        by_nccl=layout.backend == "nccl",
    )
