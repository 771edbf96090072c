"""The options of sharded data parallelism; free of torch, because the command checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.mesh import DataRank, Mesh, sizes_that_divide
from ddpexp.strategy.optimizers import NOT_SHARDED, WHOLE_MATRICES, check_optimizer
from ddpexp.strategy.options import Options
from ddpexp.strategy.tensor.options import DividedLayers, divide_for_a_rank
from ddpexp.system.limits import human

if TYPE_CHECKING:
    from ddpexp.strategy.memory import Facts, Part, Traffic

_MIB = 1 << 20
_GATHERED = 2  # blocks that a rank has whole: the one that computes, and the next or the last one; each twice


@dataclass(frozen=True)
class FSDPOptions(Options):
    """Options of sharded data parallelism; conf/strategy/fsdp.yaml explains every field."""

    builder: ClassVar[str] = "ddpexp.strategy.fsdp.build:build"
    supports_exact: ClassVar[bool] = True

    kind: Literal["fsdp"]
    blocks: tuple[str, ...] | None
    min_block_mb: Annotated[int | float, Key(above=0)]
    reshard_after_forward: bool
    broadcast_buffers: bool
    reduce_through: Annotated[Literal["auto", "shared_memory", "backend"], Key(on_resume="free")]
    whole: tuple[str, ...]
    dp_replicate_size: Annotated[int, Key(at_least=1, also=("data_parallel_replicate_degree",))]
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
            raise RefusedError("strategy.tp_plan has no effect without strategy.tp_size=2 or more.")
        elif self.sequence_parallel:
            raise RefusedError(
                "strategy.sequence_parallel=true divides tokens among the workers of a tensor group, and there is "
                "none: use strategy.tp_size=2 or more."
            )
        if trainer.reduction == "exact" and not self.broadcast_buffers:
            raise RefusedError(
                "trainer.reduction=exact combines the buffers of all micro-batches, so strategy.broadcast_buffers must "
                "stay true."
            )
        if self.offload:
            self._check_offload(trainer)
        if self.init != "whole" and trainer.param_dtype == "bf16" and not trainer.master_weights:
            raise RefusedError(
                f"strategy.init={self.init} builds weights in fp32, and trainer.master_weights=false keeps none. Use "
                "trainer.master_weights=true or strategy.init=whole."
            )
        if trainer.compile:
            raise RefusedError(
                f"trainer.compile={str(trainer.compile).lower()} is incompatible with strategy=fsdp, whose parameters "
                "are gathered by hooks between the modules. Use trainer.compile=false or strategy=ddp."
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
                    f"strategy.tp_size={self.tp_size} is incompatible with {other}, {why}. Use {instead} or "
                    "strategy.tp_size=1."
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
                    f"strategy.offload=true is incompatible with {other}, which works on the GPU with what is in the "
                    f"memory of the CPU then. Use {instead} or strategy.offload=false."
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
                f"strategy.dp_replicate_size={replicas} leaves one {each} to each replica, so nothing is sharded: use "
                f"{instead}."
            )
        if layout.device == "cuda" and layout.backend == "gloo" and size > 1:
            raise RefusedError(
                "strategy=fsdp needs NCCL between GPU workers, and these use gloo, as MIG instances and "
                "trainer.backend=gloo do: torch would set up NCCL beside it. Use whole GPUs with trainer.backend=auto, "
                "or strategy=ddp."
            )
        if self.offload and layout.device == "cpu":
            raise RefusedError(
                "strategy.offload=true keeps what a GPU does not need at the moment in the memory of the CPU, and "
                "these are CPU workers: use strategy.offload=false."
            )
        if self.offload and size == 1:
            raise RefusedError(
                "strategy.offload=true is for two or more workers: one alone has nothing to gather. Use "
                "strategy.offload=false."
            )
        if self.reduce_through == "shared_memory" and (layout.device == "cuda" or layout.nodes > 1):
            where = "workers have GPUs" if layout.device == "cuda" else f"workers are on {layout.nodes} nodes"
            raise RefusedError(
                f"strategy.reduce_through=shared_memory is for CPU workers of one host, and these {where}. "
                "Use strategy.reduce_through=auto."
            )

    def mesh(self, world_size: int) -> Mesh:
        """Return how the workers are numbered; see `Options.mesh`."""
        shards = world_size // self.tp_size // self.dp_replicate_size
        return Mesh(1, self.dp_replicate_size, shards, self.tp_size)

    def _check_sizes(self, world_size: int) -> None:
        """Check that the world divides into tensor groups and replicas."""
        workers = f"{world_size} worker{'s' * (world_size > 1)}"
        if world_size % self.tp_size:
            raise RefusedError(
                f"strategy.tp_size={self.tp_size} does not divide {workers}: use {sizes_that_divide(world_size)}."
            )
        groups = world_size // self.tp_size
        if groups % self.dp_replicate_size:
            of = f"the {groups} groups of strategy.tp_size={self.tp_size} of " if self.tp_size > 1 else ""
            raise RefusedError(
                f"strategy.dp_replicate_size={self.dp_replicate_size} does not divide {of}{workers}: use "
                f"{sizes_that_divide(groups, most=groups - 1) or 1}."
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

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[Part]:
        """Return a rank's share of everything that is sharded, and the blocks that it has whole for a moment."""
        from ddpexp.strategy.memory import Part

        parts = super().memory(facts, trainer, layout)
        if layout.world_size == self.tp_size:
            return parts
        size = self.weights_share(layout)
        parameters, gradients, optimizer = (self._share(part, facts, size) for part in parts)
        accumulates = facts.num_passes > 1 and not self.reduce_each_micro_batch and trainer.reduction == "fast"
        if accumulates:
            gradients = replace(parts[1], note="whole until the last of the accumulated passes")
        elif facts.activations_bytes:
            # Backward frees activations while gradients come into being.
            more = max(0, (gradients.num_bytes or 0) - facts.activations_bytes + facts.recomputed_bytes)
            note = f"{gradients.note}, where activations were".removeprefix(", ")
            gradients = Part("gradients", more, note if more < (gradients.num_bytes or 0) else gradients.note)
        block = max(facts.blocks_bytes, default=parts[0].num_bytes or 0)
        if self.reshard_after_forward:
            note = f"parameters and gradients of blocks, the largest has {human(block)}"
            gathered = 2 * _GATHERED * block
        else:
            note = "all parameters after a forward pass, and gradients of blocks"
            gathered = sum(facts.blocks_bytes) + _GATHERED * block
        held = [replace(part, on_host=self.offload) for part in (parameters, gradients, optimizer)]
        sums = [Part("sums of micro-batches", facts.sums_bytes, "trainer.reduction=exact")] if facts.sums_bytes else []
        return [*held, *sums, Part("gathered blocks", gathered, note)]

    def _share(self, part: Part, facts: Facts, size: int) -> Part:
        """Return a rank's share of a part."""
        if part.num_bytes is None:
            return part
        whole = sum(parameter.num_bytes for parameter in facts.parameters if parameter.model in self.whole)
        whole = whole if part.name == "parameters" else 0  # those models are frozen
        share = whole + -(-(part.num_bytes - whole) // size)
        return replace(part, num_bytes=share, note=f"a share of {human(part.num_bytes)}")

    def weights_share(self, layout: Layout) -> int:
        """Return the number of ranks that a replica of the model is divided over."""
        return max(1, layout.world_size // self.tp_size // self.dp_replicate_size)

    def moments(self, facts: Facts, trainer: Trainer, layout: Layout) -> Mapping[str, int]:
        """Return what a rank holds where it has the whole model: as it is built, and in evaluations."""
        if layout.world_size == 1:
            return {}
        size, weights = self.weights_share(layout), sum(parameter.num_bytes for parameter in facts.parameters)
        moments = {}
        if self.init == "whole":
            moments["start"] = weights + max(facts.blocks_bytes, default=0)
        if self.gather_in_evaluation and not self.divides_layers:
            shares = 0 if self.offload else -(-(weights + facts.optimizer_bytes) // size)
            moments["evaluation"] = weights + shares
        return moments

    @property
    def divides_optimizer(self) -> str:
        """Return what gives each rank some rows of each parameter to update, as typed."""
        return "strategy=fsdp"

    @property
    def divides_layers(self) -> bool:
        """Return whether there is tensor parallelism."""
        return self.tp_size > 1

    def divide_models(self, models: Mapping[str, Any]) -> None:
        """Leave in models what the first rank of a tensor group has of them; see `Options.divide_models`."""
        if self.divides_layers:
            divided = {name: module for name, module in models.items() if name not in self.whole}
            divide_for_a_rank(divided, self.tp_plan, self.tp_size, self.sequence_parallel)

    def blocks_bytes(self, models: Mapping[str, Any]) -> list[int]:
        """Return the sizes of the parameters of each block, without those of blocks inside it."""
        from ddpexp.strategy.fsdp.blocks import blocks_of

        sharded = {name: module for name, module in models.items() if name not in self.whole}
        taken: set[int] = set()
        sizes = []
        for block in blocks_of(sharded, self.blocks, self.min_block_mb * _MIB):
            free = {id(p): p.numel() * p.element_size() for p in block.parameters() if id(p) not in taken}
            taken.update(free)
            sizes.append(sum(free.values()))
        return sizes

    def reserved_bytes(
        self, trained: Sequence[Any], buffers: Sequence[Any], trainer: Trainer, layout: Layout, num_leaves: int
    ) -> tuple[int, int]:
        """Return the memory of exact sums: of one micro-batch a rank keeps none, of several those of all its rows."""
        from ddpexp.strategy.reserved import sums_bytes

        if trainer.reduction != "exact":
            return 0, 0
        summed = [*trained, *buffers] if num_leaves > 1 or layout.world_size == 1 else buffers
        return sums_bytes(summed, num_leaves), 0

    def traffic(self, facts: Facts, trainer: Trainer, layout: Layout) -> Traffic:
        """Return what the ranks send one another in a step: parameters twice, gradients once."""
        from ddpexp.strategy.memory import Traffic

        if layout.world_size == 1:
            return Traffic("none")
        if self.divides_layers:
            return Traffic("backend", unknown="what tensor parallelism sends inside layers is not known")
        size = sum(parameter.num_bytes for parameter in facts.parameters)
        trained = sum(parameter.num_bytes for parameter in facts.parameters if parameter.trained)
        gathers = 2 if self.reshard_after_forward else 1
        return Traffic("backend", [(gathers * size + trained) // 2])  # an all-reduce is two of these


@dataclass(frozen=True)
class _ToBeLoaded(FSDPOptions):
    draws_values: ClassVar[bool] = False
