"""The options of pipeline parallelism; free of torch, because the command checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.mesh import DataRank, Mesh, sizes_that_divide
from ddpexp.strategy.optimizers import WHOLE_MATRICES, WHOLE_ROWS, check_optimizer
from ddpexp.strategy.options import Options, check_records_no_graphs
from ddpexp.strategy.pipeline.schedule import Pipe, Schedule
from ddpexp.strategy.tensor.options import DividedLayers
from ddpexp.system.text import counted


@dataclass(frozen=True)
class PipelineOptions(Options):
    """Options of pipeline parallelism; conf/strategy/pipeline.yaml explains every field."""

    builder: ClassVar[str] = "ddpexp.strategy.pipeline.strategy:build"
    estimator: ClassVar[str] = "ddpexp.strategy.pipeline.estimator:PipelineEstimator"
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
        left, of = world_size, counted(world_size, "worker")
        for name, least in (("pp_size", 2), ("tp_size", 1), ("dp_shard_size", 1)):
            size = getattr(self, name)
            if left % size:
                instead = sizes_that_divide(left, least)
                instead = f"Use {instead}." if instead else f"Use trainer.gpus={self.pp_size}, or strategy=ddp."
                raise RefusedError(f"does not divide {of}", key=f"strategy.{name}", value=size, suggestion=instead)
            left //= size
            of = f"the {counted(left, 'worker')} that strategy.{name}={size} leaves of {of.removeprefix('the ')}"
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
            raise RefusedError("has no effect without strategy.tp_size=2 or more", key="strategy.tp_plan")
        for number, entry in enumerate(self.tp_plan or ()):
            entry.check(f"strategy.tp_plan[{number}]")
        for clashes, other, why, instead in (
            (
                trainer.compile and trainer.compile_blocks is None, f"trainer.compile={str(trainer.compile).lower()}",
                "which compiles the forward pass of the whole model",
                "trainer.compile_blocks=Block with the class of the model's layers, or trainer.compile=false",
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
                raise RefusedError(
                    f"is incompatible with {other}, {why}",
                    key="strategy",
                    value="pipeline",
                    suggestion=f"Use {instead}.",
                )

    def _check_stages(self) -> None:
        """Check the schedule, and the names of the layers with which stages begin."""
        stages, each = self.pipe.num_stages, self.stages_per_worker
        if self.schedule == "interleaved" and each == 1:
            raise RefusedError(
                "gives each worker several stages",
                key="strategy.schedule",
                value="interleaved",
                suggestion="Use strategy.stages_per_worker=2 or more, or strategy.schedule=1f1b.",
            )
        if self.schedule != "interleaved" and each > 1:
            raise RefusedError(
                f"is for strategy.schedule=interleaved, and this is {self.schedule}",
                key="strategy.stages_per_worker",
                value=each,
                suggestion="Use that schedule, or one stage.",
            )
        if self.split_before is not None and len(self.split_before) != stages - 1:
            of = f" x strategy.stages_per_worker={each}" if each > 1 else ""
            raise RefusedError(
                f"names the layers with which {len(self.split_before)} stages begin, and of "
                f"strategy.pp_size={self.pp_size}{of} stages all but the first begin with one",
                key="strategy.split_before",
                suggestion=f"Name {stages - 1}.",
            )

    def check_layout(self, experiment: ExperimentSettings, layout: Layout, gradient_accumulation_steps: int) -> None:
        """Check that workers divide into stages, and that there is something to pass through them."""
        super().check_layout(experiment, layout, gradient_accumulation_steps)
        mesh, num_passes = self.mesh(layout.world_size), gradient_accumulation_steps
        if self.divides_layers:
            why = "the collectives inside divided layers were never tried in one"
            check_records_no_graphs(experiment.trainer, layout, why)
        if num_passes < self.pp_size:
            raise RefusedError(
                f"keeps its stages busy with {self.pp_size} micro-batches a step or more, and there "
                f"{'is' if num_passes == 1 else 'are'} {num_passes}",
                key="strategy.pp_size",
                value=self.pp_size,
                suggestion="Use a smaller trainer.micro_batch_size, at most trainer.global_batch_size / "
                f"{self.pp_size * mesh.data_size}.",
            )
        if self.schedule == "interleaved" and num_passes % self.pp_size:
            raise RefusedError(
                f"passes strategy.pp_size={self.pp_size} micro-batches through each stage in turn, and "
                f"{self.pp_size} does not divide the {num_passes} of a step",
                key="strategy.schedule",
                value="interleaved",
                suggestion="Change trainer.micro_batch_size or trainer.global_batch_size, or use "
                "strategy.schedule=1f1b.",
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


@dataclass(frozen=True)
class _ToBeLoaded(PipelineOptions):
    draws_values: ClassVar[bool] = False
