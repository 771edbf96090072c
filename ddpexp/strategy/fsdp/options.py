"""The options of sharded data parallelism; free of torch, because the command checks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.strategy.options import Options, TrainerOptions

if TYPE_CHECKING:
    from ddpexp.distributed.world import World
    from ddpexp.strategy.base import Strategy
    from ddpexp.strategy.memory import Facts, Part, Traffic

_MIB = 1 << 20
_GATHERED = 2  # blocks whose parameters a rank has whole: the one that computes, and the next


@dataclass(frozen=True)
class FSDPOptions(Options):
    """Options of sharded data parallelism; conf/strategy/fsdp.yaml explains every field."""

    supports_exact: ClassVar[bool] = True

    kind: Literal["fsdp"]
    blocks: tuple[str, ...] | None
    min_block_mb: int | float
    reshard_after_forward: bool
    broadcast_buffers: bool
    reduce_through: Literal["auto", "shared_memory", "backend"]
    whole: tuple[str, ...]
    dp_replicate_size: int
    gather_in_evaluation: bool
    init: Literal["whole", "replay", "reset_parameters"]
    reduce_each_micro_batch: bool = False  # older runs do not have these
    offload: bool = False
    draws_values: ClassVar[bool] = True  # whether initial weights are needed

    def check(self, trainer: TrainerOptions) -> None:
        """Check the options by themselves and with the trainer section; see `Options.check`."""
        super().check(trainer)
        if self.min_block_mb <= 0:
            raise RefusedError(f"strategy.min_block_mb={self.min_block_mb}: use a number above 0.")
        if self.dp_replicate_size < 1:
            raise RefusedError(f"strategy.dp_replicate_size={self.dp_replicate_size}: use 1 or more.")
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

    def _check_offload(self, trainer: TrainerOptions) -> None:
        """Refuse what needs all parameters or gradients on the GPU."""
        for clashes, key, instead in (
            (trainer.reduction == "exact", "trainer.reduction=exact", "trainer.reduction=fast"),
            (trainer.precision == "fp16", "trainer.precision=fp16", "trainer.precision=bf16"),
            (trainer.nonfinite == "skip", "trainer.nonfinite=skip", "trainer.nonfinite=stop"),
            (self.init != "whole", f"strategy.init={self.init}", "strategy.init=whole"),
        ):
            if clashes:
                raise RefusedError(
                    f"strategy.offload=true is incompatible with {key}, which works on the GPU with what is in the "
                    f"memory of the CPU then. Use {instead} or strategy.offload=false."
                )

    def makes_copies(self, world_size: int) -> bool:
        """Return whether blocks are gathered in bf16, which are the copies."""
        return world_size > 1

    def check_layout(self, trainer: TrainerOptions, layout: Layout, gradient_accumulation_steps: int) -> None:
        """Check what depends on the workers; see `Options.check_layout`."""
        replicas, size = self.dp_replicate_size, layout.world_size
        if size % replicas:
            sizes = " or ".join(str(number) for number in range(1, size) if size % number == 0) or "1"
            raise RefusedError(
                f"strategy.dp_replicate_size={replicas} does not divide {size} worker{'s' * (size > 1)}: use {sizes}."
            )
        if replicas == size > 1:
            raise RefusedError(
                f"strategy.dp_replicate_size={replicas} leaves one worker to each replica, so nothing is sharded: use "
                "strategy=ddp."
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

    def to_be_loaded(self) -> FSDPOptions:
        """Return options that leave out the initial weights."""
        return _ToBeLoaded(**vars(self))

    def import_modules(self) -> None:
        """Import FSDP2."""
        import torch.distributed.fsdp  # noqa: F401

    def other_bits(self, trainer: TrainerOptions, gradient_accumulation_steps: int) -> str:
        """Return that gradients are summed in another order."""
        if not self.reduce_each_micro_batch or trainer.reduction == "exact" or gradient_accumulation_steps == 1:
            return ""
        return (
            "strategy.reduce_each_micro_batch=true sums gradients over the workers first, then over the micro-batches: "
            "the last bits of the weights will differ from those of strategy=ddp"
        )

    def memory(self, facts: Facts, trainer: TrainerOptions, layout: Layout) -> list[Part]:
        """Return a rank's share of everything that is sharded, and the blocks that it has whole for a moment."""
        from ddpexp.strategy.memory import Part

        parts = super().memory(facts, trainer, layout)
        if layout.world_size == 1:
            return parts
        ranks = layout.world_size // self.dp_replicate_size
        shares = [replace(p, num_bytes=-(-(p.num_bytes or 0) // ranks), on_host=self.offload) for p in parts]
        largest = max((parameter.num_bytes for parameter in facts.parameters), default=0)
        block = min(max(int(self.min_block_mb * _MIB), largest), parts[0].num_bytes or 0)
        note = "parameters and gradients of the blocks that compute"
        return [*shares, Part("gathered blocks", 2 * _GATHERED * block, note)]

    def reserved_bytes(
        self, trained: Sequence[Any], buffers: Sequence[Any], trainer: TrainerOptions, layout: Layout, num_leaves: int
    ) -> tuple[int, int]:
        """Return the memory of exact sums: of one micro-batch a rank keeps none, of several those of all its rows."""
        from ddpexp.strategy.reserved import sums_bytes

        if trainer.reduction != "exact":
            return 0, 0
        summed = [*trained, *buffers] if num_leaves > 1 or layout.world_size == 1 else buffers
        return sums_bytes(summed, num_leaves), 0

    def traffic(self, facts: Facts, trainer: TrainerOptions, layout: Layout) -> Traffic:
        """Return what the ranks send one another in a step: parameters twice, gradients once."""
        from ddpexp.strategy.memory import Traffic

        if layout.world_size == 1:
            return Traffic("none")
        size = sum(parameter.num_bytes for parameter in facts.parameters)
        trained = sum(parameter.num_bytes for parameter in facts.parameters if parameter.trained)
        gathers = 2 if self.reshard_after_forward else 1
        return Traffic("backend", [(gathers * size + trained) // 2])  # an all-reduce is two of these

    def build(
        self,
        world: World,
        factory: Callable[[], Any],
        *,
        trainer: TrainerOptions,
        gradient_accumulation_steps: int,
        prepare: Callable[[Any], None],
    ) -> Strategy:
        """Build the model and shard it."""
        from ddpexp.strategy.fsdp.exact import ExactFSDP
        from ddpexp.strategy.fsdp.strategy import FSDP

        common: dict[str, Any] = {"channels_last": trainer.channels_last, "prepare": prepare}
        lowers = trainer.param_dtype == "bf16" and trainer.master_weights
        if trainer.reduction == "exact":
            return ExactFSDP(self, world, factory, gradient_accumulation_steps=gradient_accumulation_steps, **common)
        return FSDP(self, world, factory, gathers_bf16=lowers, **common)


@dataclass(frozen=True)
class _ToBeLoaded(FSDPOptions):
    draws_values: ClassVar[bool] = False
