"""The options of sharded data parallelism; free of torch, because the command checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.mesh import DataRank, Mesh, sizes_that_divide
from ddpexp.strategy.optimizers import NOT_SHARDED, WHOLE_MATRICES, check_optimizer
from ddpexp.strategy.options import Options, check_records_no_graphs, check_reduce_through
from ddpexp.strategy.tensor.options import DividedLayers
from ddpexp.system.text import counted


@dataclass(frozen=True)
class FSDPOptions(Options):
    """Options of sharded data parallelism; conf/strategy/fsdp.yaml explains every field."""

    builder: ClassVar[str] = "ddpexp.strategy.fsdp.build:build"
    estimator: ClassVar[str] = "ddpexp.strategy.fsdp.estimator:FSDPEstimator"
    supports_exact: ClassVar[bool] = True

    kind: Literal["fsdp"]
    blocks: tuple[str, ...] | None
    min_block_mb: Annotated[int | float, Key(above=0)]
    reshard_after_forward: bool
    broadcast_buffers: bool
    reduce_through: Annotated[Literal["auto", "shared_memory", "backend"], Key(on_resume="free")]
    whole: tuple[str, ...]
    dp_replicate_size: Annotated[int, Key(at_least=1, also="data_parallel_replicate_degree")]
    gather_in_evaluation: bool
    init: Literal["whole", "replay", "reset_parameters"]
    reduce_each_micro_batch: bool = False
    offload: Annotated[bool, Key(on_resume="free")] = False
    tp_size: Annotated[int, Key(at_least=1)] = 1
    tp_plan: tuple[DividedLayers, ...] | None = None
    sequence_parallel: bool = False
    draws_values: ClassVar[bool] = True  # whether initial weights are needed

    @property
    def updates_on_host(self) -> bool:
        """Return whether parameters and their optimizer are in the memory of the host."""
        return self.offload

    def data_rank(self, rank: int, world_size: int) -> DataRank:
        """Return which share of the global batch a rank computes: the ranks of a tensor group the same one."""
        self._check_sizes(world_size)
        return DataRank(rank // self.tp_size, world_size // self.tp_size, rank % self.tp_size == 0)

    def check(self, experiment: ExperimentSettings) -> None:
        """Check the options by themselves and with the trainer section; see `Options.check`."""
        super().check(experiment)
        trainer = experiment.trainer
        optimizer = experiment.optimizer.target
        check_optimizer(optimizer, NOT_SHARDED, "", "strategy=ddp")
        if self.divides_layers:
            part = ", of which each worker of strategy.tp_size has a part"
            check_optimizer(optimizer, WHOLE_MATRICES, part, "strategy.tp_size=1")
        if self.tp_size > 1:
            self._check_tensor_parallel(trainer)
        elif self.tp_plan is not None:
            raise RefusedError("has no effect without strategy.tp_size=2 or more", key="strategy.tp_plan")
        elif self.sequence_parallel:
            raise RefusedError(
                "divides tokens among the workers of a tensor group, and there is none",
                key="strategy.sequence_parallel",
                value=True,
                suggestion="Use strategy.tp_size=2 or more.",
            )
        if trainer.reduction == "exact" and not self.broadcast_buffers:
            raise RefusedError(
                "combines the buffers of all micro-batches",
                key="trainer.reduction",
                value="exact",
                suggestion="Use strategy.broadcast_buffers=true.",
            )
        if self.offload:
            self._check_offload(trainer)
        if self.init != "whole" and trainer.param_dtype == "bf16" and not trainer.master_weights:
            raise RefusedError(
                "builds weights in fp32, and trainer.master_weights=false keeps none",
                key="strategy.init",
                value=self.init,
                suggestion="Use trainer.master_weights=true or strategy.init=whole.",
            )
        if trainer.compile and trainer.compile_blocks is None:
            raise RefusedError(
                "compiles the whole model, and strategy=fsdp gathers parameters by hooks between its modules, which "
                "would cut it to pieces",
                key="trainer.compile",
                value=trainer.compile,
                suggestion="Name the class of its layers, for example trainer.compile_blocks=Block, or use "
                "trainer.compile=false or strategy=ddp.",
            )

    def _check_tensor_parallel(self, trainer: Trainer) -> None:
        """Refuse what tensor parallelism cannot keep or does not have."""
        for number, entry in enumerate(self.tp_plan or ()):
            entry.check(f"strategy.tp_plan[{number}]")
        for clashes, other, why, instead in (
            (
                trainer.reduction == "exact", "trainer.reduction=exact",
                "whose bits must not depend on the workers, while the sums inside divided layers do",
                "trainer.reduction=fast",
            ),
            (
                self.offload, "strategy.offload=true", "for which layers are not divided", "strategy.offload=false",
            ),
            (
                self.reduce_through == "shared_memory", "strategy.reduce_through=shared_memory",
                "which all workers would have to use together", "strategy.reduce_through=auto",
            ),
        ):  # fmt: skip
            if clashes:
                raise RefusedError(
                    f"is incompatible with {other}, {why}",
                    key="strategy.tp_size",
                    value=self.tp_size,
                    suggestion=f"Use {instead} or strategy.tp_size=1.",
                )

    def _check_offload(self, trainer: Trainer) -> None:
        """Refuse what needs all parameters or gradients on the GPU."""
        for clashes, other, instead in (
            (trainer.reduction == "exact", "trainer.reduction=exact", "trainer.reduction=fast"),
            (trainer.precision == "fp16", "trainer.precision=fp16", "trainer.precision=bf16"),
            (trainer.nonfinite == "skip", "trainer.nonfinite=skip", "trainer.nonfinite=stop"),
            (self.init != "whole", f"strategy.init={self.init}", "strategy.init=whole"),
        ):
            if clashes:
                raise RefusedError(
                    f"is incompatible with {other}, which works on the GPU with what is in the memory of the CPU then",
                    key="strategy.offload",
                    value=True,
                    suggestion=f"Use {instead} or strategy.offload=false.",
                )

    def makes_copies(self, world_size: int) -> bool:
        """Return whether blocks are gathered in bf16, which are the copies."""
        return world_size > self.tp_size

    def check_layout(self, experiment: ExperimentSettings, layout: Layout, gradient_accumulation_steps: int) -> None:
        """Check what depends on the workers; see `Options.check_layout`."""
        super().check_layout(experiment, layout, gradient_accumulation_steps)
        replicas, size = self.dp_replicate_size, layout.world_size
        self._check_sizes(size)
        if replicas == size // self.tp_size > 1:
            instead = "strategy=ddp" if self.tp_size == 1 else "strategy.dp_replicate_size=1"
            each = "worker" if self.tp_size == 1 else "tensor group"
            raise RefusedError(
                f"leaves one {each} to each replica, so nothing is sharded",
                key="strategy.dp_replicate_size",
                value=replicas,
                suggestion=f"Use {instead}.",
            )
        if layout.device == "cuda" and layout.backend == "gloo" and size > 1:
            raise RefusedError(
                "needs NCCL between GPU workers, and these use gloo, as MIG instances and "
                "trainer.backend=gloo do: torch would set up NCCL beside it",
                key="strategy",
                value="fsdp",
                suggestion="Use whole GPUs with trainer.backend=auto, or strategy=ddp.",
            )
        why = "strategy=fsdp gathers parameters to other memory in every pass, where a graph does not find them"
        check_records_no_graphs(experiment.trainer, layout, why)
        if self.offload and layout.device == "cpu":
            raise RefusedError(
                "keeps what a GPU does not need at the moment in the memory of the CPU, and these are CPU workers",
                key="strategy.offload",
                value=True,
                suggestion="Use strategy.offload=false.",
            )
        if self.offload and size == 1:
            raise RefusedError(
                "is for two or more workers: one alone has nothing to gather",
                key="strategy.offload",
                value=True,
                suggestion="Use strategy.offload=false.",
            )
        check_reduce_through(self.reduce_through, layout)

    def mesh(self, world_size: int) -> Mesh:
        """Return how the workers are numbered; see `Options.mesh`."""
        shards = world_size // self.tp_size // self.dp_replicate_size
        return Mesh(1, self.dp_replicate_size, shards, self.tp_size)

    def _check_sizes(self, world_size: int) -> None:
        """Check that the world divides into tensor groups and replicas."""
        workers = counted(world_size, "worker")
        if world_size % self.tp_size:
            raise RefusedError(
                f"does not divide {workers}",
                key="strategy.tp_size",
                value=self.tp_size,
                suggestion=f"Use {sizes_that_divide(world_size)}.",
            )
        groups = world_size // self.tp_size
        if groups % self.dp_replicate_size:
            of = f"the {groups} groups of strategy.tp_size={self.tp_size} of " if self.tp_size > 1 else ""
            raise RefusedError(
                f"does not divide {of}{workers}",
                key="strategy.dp_replicate_size",
                value=self.dp_replicate_size,
                suggestion=f"Use {sizes_that_divide(groups, most=groups - 1) or 1}.",
            )

    def to_be_loaded(self) -> FSDPOptions:
        """Return options that leave out the initial weights."""
        return _ToBeLoaded(**vars(self))

    def other_bits(self, trainer: Trainer, gradient_accumulation_steps: int) -> str:
        """Return that layers are divided, convolutions are other ones, or gradients are summed in another order."""
        if self.tp_size > 1:
            return (
                f"strategy.tp_size={self.tp_size}: the sums inside divided layers have another order, so the last "
                "digits of the weights differ from those of other strategies"
            )
        if trainer.channels_last:
            return (
                "trainer.channels_last=true: with strategy=fsdp inputs have that memory format, but not the weights, "
                "whose last bits may differ from those of strategy=ddp"
            )
        if not self.reduce_each_micro_batch or trainer.reduction == "exact" or gradient_accumulation_steps == 1:
            return ""
        return (
            "strategy.reduce_each_micro_batch=true sums gradients over the workers first, then over the micro-batches: "
            "the last bits of the weights will differ from those of strategy=ddp"
        )

    @property
    def divides_optimizer(self) -> str:
        """Return what gives each rank some rows of each parameter to update, as typed."""
        return "strategy=fsdp"

    @property
    def divides_layers(self) -> bool:
        """Return whether there is tensor parallelism."""
        return self.tp_size > 1


@dataclass(frozen=True)
class _ToBeLoaded(FSDPOptions):
    draws_values: ClassVar[bool] = False
