"""The options of pipeline parallelism; free of torch, because the command checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.mesh import DataRank, Mesh, sizes_that_divide
from ddpexp.strategy.optimizers import WHOLE_MATRICES, WHOLE_ROWS, check_optimizer
from ddpexp.strategy.options import Options
from ddpexp.strategy.pipeline.schedule import Pipe, Schedule, num_in_flight
from ddpexp.strategy.tensor.options import DividedLayers

if TYPE_CHECKING:
    from ddpexp.strategy.memory import Facts, Part


@dataclass(frozen=True)
class PipelineOptions(Options):
    """Options of pipeline parallelism; conf/strategy/pipeline.yaml explains every field."""

    builder: ClassVar[str] = "ddpexp.strategy.pipeline.strategy:build"
    supports_train_step: ClassVar[bool] = False

    kind: Literal["pipeline"]
    pp_size: Annotated[int, Key(at_least=2, use="2 or more stages, or strategy=ddp")]
    split_before: tuple[str | int, ...] | None
    schedule: Schedule
    stages_per_worker: Annotated[int, Key(at_least=1)] = 1
    dp_shard_size: Annotated[int, Key(at_least=1)] = 1
    tp_size: Annotated[int, Key(at_least=1)] = 1
    tp_plan: tuple[DividedLayers, ...] | None = None
    gather_in_evaluation: bool = True
    init: Literal["whole", "replay", "reset_parameters"] = "whole"
    draws_values: ClassVar[bool] = True  # whether initial weights are needed

    @property
    def least_world_size(self) -> int:
        """Return the workers of one pipe."""
        return self.pp_size * self.tp_size * self.dp_shard_size

    @property
    def pipe(self) -> Pipe:
        """Return the workers and stages through which a batch passes."""
        return Pipe(self.pp_size, self.stages_per_worker)

    def mesh(self, world_size: int) -> Mesh:
        """Return how the workers are numbered: those with the same stages are neighbours.

        Raises:
            RefusedError: the sizes do not divide them; names those that do.
        """
        left, of = world_size, f"{world_size} worker{'s' * (world_size > 1)}"
        for name, least in (("pp_size", 2), ("tp_size", 1), ("dp_shard_size", 1)):
            size = getattr(self, name)
            if left % size:
                instead = sizes_that_divide(left, least)
                instead = f"use {instead}" if instead else f"use trainer.gpus={self.pp_size}, or strategy=ddp"
                raise RefusedError(f"strategy.{name}={size} does not divide {of}: {instead}.")
            left //= size
            of = f"the {left} worker{'s' * (left > 1)} that strategy.{name}={size} leaves of {of.removeprefix('the ')}"
        return Mesh(self.pp_size, left, self.dp_shard_size, self.tp_size)

    def data_rank(self, rank: int, world_size: int) -> DataRank:
        """Return which share of the global batch a rank computes; of its pipe the last worker has the loss."""
        mesh = self.mesh(world_size)
        place, replica, shard, tensor = mesh.place(rank)
        reports = place == self.pp_size - 1 and tensor == 0
        return DataRank(replica * self.dp_shard_size + shard, mesh.data_size, reports)

    def check(self, experiment: ExperimentSettings) -> None:
        """Check the options by themselves and with the trainer section; see `Options.check`."""
        super().check(experiment)
        trainer = experiment.trainer
        stage = ", and with strategy=pipeline a worker has only the parameters of its stage"
        check_optimizer(experiment.optimizer.target, {**WHOLE_MATRICES, **WHOLE_ROWS}, stage, "strategy=ddp")
        self._check_stages()
        if self.tp_size == 1 and self.tp_plan is not None:
            raise RefusedError("strategy.tp_plan has no effect without strategy.tp_size=2 or more.")
        for number, entry in enumerate(self.tp_plan or ()):
            entry.check(f"strategy.tp_plan[{number}]")
        for clashes, other, why, instead in (
            (
                bool(trainer.compile), f"trainer.compile={str(trainer.compile).lower()}",
                "which compiles the forward pass of the whole model", "trainer.compile=false",
            ),
            (
                trainer.param_dtype != "fp32", f"trainer.param_dtype={trainer.param_dtype}",
                "which casts the inputs and outputs of the whole model",
                "trainer.param_dtype=fp32 trainer.precision=bf16",
            ),
            (
                trainer.average_batch_norm is not None, f"trainer.average_batch_norm={trainer.average_batch_norm}",
                "for which one worker computes the whole model", "trainer.average_batch_norm=null",
            ),
        ):  # fmt: skip
            if clashes:
                raise RefusedError(f"strategy=pipeline is incompatible with {other}, {why}. Use {instead}.")

    def _check_stages(self) -> None:
        """Check the schedule, and the names of the layers with which stages begin."""
        stages, each = self.pipe.num_stages, self.stages_per_worker
        if self.schedule == "interleaved" and each == 1:
            raise RefusedError(
                "strategy.schedule=interleaved gives each worker several stages: use strategy.stages_per_worker=2 or "
                "more, or strategy.schedule=1f1b."
            )
        if self.schedule != "interleaved" and each > 1:
            raise RefusedError(
                f"strategy.stages_per_worker={each} is for strategy.schedule=interleaved, and this is "
                f"{self.schedule}: use that schedule, or one stage."
            )
        if self.split_before is not None and len(self.split_before) != stages - 1:
            of = f" x strategy.stages_per_worker={each}" if each > 1 else ""
            raise RefusedError(
                f"strategy.split_before names the layers with which {len(self.split_before)} stages begin, and of "
                f"strategy.pp_size={self.pp_size}{of} stages all but the first begin with one: name {stages - 1}."
            )

    def check_layout(self, experiment: ExperimentSettings, layout: Layout, gradient_accumulation_steps: int) -> None:
        """Check that workers divide into stages, and that there is something to pass through them."""
        super().check_layout(experiment, layout, gradient_accumulation_steps)
        mesh, num_passes = self.mesh(layout.world_size), gradient_accumulation_steps
        if num_passes < self.pp_size:
            raise RefusedError(
                f"strategy.pp_size={self.pp_size} keeps its stages busy with {self.pp_size} micro-batches a step or "
                f"more, and there {'is' if num_passes == 1 else 'are'} {num_passes}: "
                "use a smaller trainer.micro_batch_size, at most trainer.global_batch_size / "
                f"{self.pp_size * mesh.data_size}."
            )
        if self.schedule == "interleaved" and num_passes % self.pp_size:
            raise RefusedError(
                f"strategy.schedule=interleaved passes strategy.pp_size={self.pp_size} micro-batches through each "
                f"stage in turn, and {self.pp_size} does not divide the {num_passes} of a step: change "
                "trainer.micro_batch_size or trainer.global_batch_size, or use strategy.schedule=1f1b."
            )

    def to_be_loaded(self) -> PipelineOptions:
        """Return options that leave out the initial weights."""
        return _ToBeLoaded(**vars(self))

    def other_bits(self, trainer: Trainer, gradient_accumulation_steps: int) -> str:
        """Return that sums over several workers and dropout are others."""
        divided = f", and with strategy.tp_size={self.tp_size} those inside layers" * self.divides_layers
        return (
            "strategy=pipeline: dropout draws other random numbers than on one worker, and gradients of several "
            f"replicas are summed in the order of the backend{divided}, so the last digits differ from those of "
            "strategy=ddp"
        )

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[Part]:
        """Return what the worker with the most parameters holds of them, of gradients and of the optimizer's state."""
        from ddpexp.strategy.memory import Part

        note = f"of the largest of {self.pp_size} " + ("stages" if self.stages_per_worker == 1 else "workers' stages")
        whole = sum(parameter.num_bytes for parameter in facts.parameters)
        largest = max(facts.blocks_bytes, default=whole)
        parts = [
            replace(part, num_bytes=part.num_bytes and -(-part.num_bytes * largest // max(whole, 1)), note=note)
            for part in super().memory(facts, trainer, layout)
        ]
        if self.dp_shard_size > 1:
            optimizer = parts.pop()
            share = optimizer.num_bytes and -(-optimizer.num_bytes // self.dp_shard_size)
            parts.append(Part("optimizer", share, f"a share of that {note}"))
        return parts

    def weights_share(self, layout: Layout) -> int:
        """Return the number of workers of a pipe."""
        return self.pp_size

    def moments(self, facts: Facts, trainer: Trainer, layout: Layout) -> Mapping[str, int]:
        """Return what a rank holds where it has the whole model: as it is built, and in evaluations."""
        weights = sum(parameter.num_bytes for parameter in facts.parameters)
        divided = facts.of_a_rank()
        own = sum(parameter.num_bytes for parameter in divided.parameters)
        largest = max(facts.blocks_bytes, default=own)
        state = divided.optimizer_bytes * largest // max(own, 1) // self.dp_shard_size
        moments = {"start": weights} if self.init == "whole" else {}
        return {**moments, "evaluation": own + state} if self.gather_in_evaluation else moments

    def blocks_bytes(self, models: Mapping[str, Any]) -> list[int]:
        """Return the sizes of the parameters of each worker of a pipe."""
        from ddpexp.strategy.pipeline.stages import divide

        division = divide(models, self.pipe, self.names)
        sizes = [0] * self.pp_size
        for model in models.values():
            for name, parameter in model.named_parameters():
                for place in division.places_of(name):
                    sizes[place] += parameter.numel() * parameter.element_size()
        return sizes

    def in_stages(self, models: Mapping[str, Any], enter: Callable[[int, Any], None]) -> Any:
        """Return a model that computes one stage after the other; see `Options.in_stages`."""
        from ddpexp.strategy.pipeline.stages import InStages, divide

        return InStages(next(iter(models.values())), divide(models, self.pipe, self.names), enter)

    def kept_bytes(self, of_stages: Sequence[int], num_passes: int) -> int:
        """Return what the worker keeps for backward passes that keeps most; see `Options.kept_bytes`."""
        return max(self.kept_by_workers(of_stages, num_passes))

    def kept_by_workers(self, of_stages: Sequence[int], num_passes: int) -> list[int]:
        """Return the most that each worker of a pipe keeps, given what each stage keeps of one micro-batch."""
        kept = []
        for place in range(self.pp_size):
            own = [of_stages[stage] for stage in self.pipe.stages_of(place)]
            most = num_in_flight(self.schedule, place, self.pipe, num_passes)
            kept.append(most * sum(own) // self.stages_per_worker)
        return kept

    @property
    def names(self) -> list[str] | None:
        """Return the layers with which stages begin; those of an nn.Sequential are numbers on the command line."""
        return None if self.split_before is None else [str(name) for name in self.split_before]

    @property
    def divides_optimizer(self) -> str:
        """Return what gives each rank the parameters of its stage to update, as typed."""
        return "strategy=pipeline"

    @property
    def divides_layers(self) -> bool:
        """Return whether there is tensor parallelism."""
        return self.tp_size > 1

    @property
    def looks_at_layers(self) -> bool:
        """Return that the layers are checked before workers start."""
        return True

    def divide_models(self, models: Mapping[str, Any]) -> None:
        """Check the stages, and leave in models what a rank has of divided layers; see `Options.divide_models`."""
        from ddpexp.strategy.pipeline.stages import divide
        from ddpexp.strategy.tensor.options import divide_for_a_rank

        divide(models, self.pipe, self.names)
        if self.divides_layers:
            divide_for_a_rank(models, self.tp_plan, self.tp_size)


@dataclass(frozen=True)
class _ToBeLoaded(PipelineOptions):
    draws_values: ClassVar[bool] = False
