"""The options of data parallelism, free of torch, so that the command can check them before it starts workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.strategy.ddp_memory import buckets, exchange_bytes, keeps_buckets, transport
from ddpexp.strategy.memory import Bucket, Facts, Part, Traffic
from ddpexp.strategy.options import Options, TrainerOptions
from ddpexp.system.limits import human

if TYPE_CHECKING:
    from ddpexp.distributed.world import World
    from ddpexp.strategy.base import Strategy


@dataclass(frozen=True)
class DDPOptions(Options):
    """Options of data parallelism; conf/strategy/ddp.yaml explains every field."""

    supports_exact: ClassVar[bool] = True

    kind: Literal["ddp"]
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    bucket_cap_mb: int | float
    broadcast_buffers: bool
    reduce_through: Literal["auto", "shared_memory", "backend"]
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"]
    powersgd_rank: int
    sync_batchnorm: bool

    def check(self, trainer: TrainerOptions) -> None:
        """Check the options by themselves and with the trainer section; see `Options.check`."""
        if self.bucket_cap_mb <= 0:
            raise RefusedError(f"strategy.bucket_cap_mb={self.bucket_cap_mb}: use a number above 0.")
        if self.reduce_through == "shared_memory" and self.comm_hook != "none":
            raise RefusedError(
                f"strategy.reduce_through=shared_memory leaves nothing to compress, so it is incompatible with "
                f"strategy.comm_hook={self.comm_hook}. Use strategy.reduce_through=auto or strategy.comm_hook=none."
            )
        if self.powersgd_rank < 1:
            raise RefusedError(f"strategy.powersgd_rank={self.powersgd_rank}: use 1 or more.")
        if self.static_graph and self.find_unused_parameters:
            raise RefusedError(
                "strategy.static_graph=true finds unused parameters by itself in the first step: "
                "leave strategy.find_unused_parameters=false."
            )
        if trainer.reduction == "exact":
            self._check_exact()
        scaled = trainer.precision == "fp16" or trainer.nonfinite == "skip"
        if self.comm_hook == "powersgd" and scaled:
            raise RefusedError(
                f"strategy.comm_hook=powersgd remembers every gradient, also one that is left out because it is not "
                f"finite. Use trainer.precision=fp32 or bf16 and trainer.nonfinite=stop, not {trainer.precision} and "
                f"{trainer.nonfinite}."
            )

    def _check_exact(self) -> None:
        """Refuse what would make the numbers depend on the number of workers although `trainer.reduction=exact`."""
        why = "trainer.reduction=exact"
        if self.comm_hook != "none":
            raise RefusedError(
                f"{why} is incompatible with strategy.comm_hook={self.comm_hook}, which rounds each worker's sum. "
                "Use none."
            )
        if self.sync_batchnorm:
            raise RefusedError(
                f"{why} is incompatible with strategy.sync_batchnorm=true: its statistics are those of all workers' "
                "micro-batches of a pass, which another number of workers cuts in another way. Use "
                "strategy.sync_batchnorm=false."
            )
        if self.static_graph:
            raise RefusedError(
                f"{why} does without DDP, whose option strategy.static_graph=true is. Use strategy.static_graph=false."
            )
        if not self.broadcast_buffers:
            raise RefusedError(
                f"{why} combines the buffers of all micro-batches, so strategy.broadcast_buffers must stay true."
            )

    def check_layout(self, trainer: TrainerOptions, layout: Layout, gradient_accumulation_steps: int) -> None:
        """Check what depends on the workers; see `Options.check_layout`."""
        if self.static_graph and gradient_accumulation_steps > 1:
            raise RefusedError(
                f"strategy.static_graph=true is incompatible with {gradient_accumulation_steps} accumulated passes a "
                "step: torch would reduce other passes than it planned. Use strategy.static_graph=false or a larger "
                "trainer.micro_batch_size."
            )
        if self.comm_hook == "bf16" and layout.backend == "gloo":
            raise RefusedError(
                "strategy.comm_hook=bf16 needs trainer.backend=nccl: gloo cannot add bf16 numbers. Use fp16 or none."
            )
        if self.sync_batchnorm and layout.device == "cpu":
            raise RefusedError(
                "strategy.sync_batchnorm=true needs GPUs: torch has no synchronised batch normalisation on CPU. "
                "Use strategy.sync_batchnorm=false."
            )
        if self.reduce_through == "shared_memory" and (layout.device == "cuda" or layout.nodes > 1):
            where = "workers have GPUs" if layout.device == "cuda" else f"workers are on {layout.nodes} nodes"
            raise RefusedError(
                f"strategy.reduce_through=shared_memory is for CPU workers of one host, and these {where}. "
                f"Use strategy.reduce_through=auto."
            )

    def import_modules(self) -> None:
        """Import DDP's hooks."""
        if self.comm_hook != "none":
            from ddpexp.strategy.ddp import import_hooks

            import_hooks()

    def missing_in_checkpoints(self) -> str:
        """Return that PowerSGD's state is missing."""
        if self.comm_hook != "powersgd":
            return ""
        return (
            "PowerSGD's memory of earlier gradients is not saved and starts empty: the last bits will differ from "
            "those of an uninterrupted run"
        )

    def memory(self, facts: Facts, trainer: TrainerOptions, layout: Layout) -> list[Part]:
        """Return what a rank holds of the model, its gradients and its optimizers."""
        by_ddp = layout.world_size > 1 and trainer.reduction == "fast"
        parameters, gradients, optimizer = super().memory(facts, trainer, layout)
        trained = gradients.num_bytes
        if by_ddp and self.gradient_as_bucket_view:
            gradients = Part("gradients", trained, "views of the buckets")
        parts = [parameters, gradients]
        if by_ddp and not self.gradient_as_bucket_view:
            parts.append(Part("buckets", trained, "beside the gradients: strategy.gradient_as_bucket_view=false"))
        parts.append(optimizer)
        if trainer.reduction == "exact":
            parts.append(Part("sums of micro-batches", facts.sums_bytes, "trainer.reduction=exact"))
        way, local = transport(trainer, self, layout), layout.world_size // layout.nodes
        if way == "shared_memory":
            note = f"{human(facts.shared_bytes)} for {local} workers"
            parts.append(Part("shared memory", facts.shared_bytes // local, note))
        elif way == "in_rank_order":
            sizes = [bucket.num_bytes for bucket in self._buckets(facts, trainer, layout)] or [facts.sums_bytes]
            note = "what the ranks send one another, in the order of the sum"
            parts.append(Part("exchange", exchange_bytes(sizes, layout.world_size), note))
        elif way == "backend" and self.comm_hook == "powersgd":
            note = "the error that it feeds back, and its factors beside that"
            parts.append(Part("PowerSGD's memory", trained, note))
        return parts

    def traffic(self, facts: Facts, trainer: TrainerOptions, layout: Layout) -> Traffic:
        """Return what the ranks send one another in a step; compressed gradients as they travel."""
        way = transport(trainer, self, layout)
        if way == "none":
            return Traffic(way)
        cut = self._buckets(facts, trainer, layout)
        sizes = [bucket.num_bytes for bucket in cut]
        if not cut:
            sizes = [sum(parameter.num_bytes for parameter in facts.parameters if parameter.trained)]
        if self.comm_hook in ("fp16", "bf16"):
            sizes = [size // 2 for size in sizes]
        unknown = "what PowerSGD's products cost is not known" if self.comm_hook == "powersgd" else ""
        return Traffic(way, sizes, cut, self.bucket_cap_mb, unknown)

    def _buckets(self, facts: Facts, trainer: TrainerOptions, layout: Layout) -> list[Bucket]:
        """Return DDP's buckets; there are none alone, nor in the exact reduction."""
        if layout.world_size == 1 or trainer.reduction == "exact":
            return []
        return buckets(facts.parameters, self, not keeps_buckets(trainer, self, layout))

    def reserved_bytes(
        self, trained: Sequence[Any], buffers: Sequence[Any], trainer: TrainerOptions, layout: Layout, num_leaves: int
    ) -> tuple[int, int]:
        """Return the memory of sums over micro-batches, and the memory shared by the workers of a host."""
        from ddpexp.strategy.reserved import shared_bytes, sums_bytes

        exact = trainer.reduction == "exact"
        sums = sums_bytes([*trained, *buffers], num_leaves) if exact else 0
        if transport(trainer, self, layout) != "shared_memory":
            return sums, 0
        tensors, leaves = ([*trained, *buffers], num_leaves) if exact else (trained, 0)
        return sums, shared_bytes(tensors, leaves, layout.world_size)

    def build(
        self,
        world: World,
        factory: Callable[[], Any],
        *,
        trainer: TrainerOptions,
        gradient_accumulation_steps: int,
        prepare: Callable[[Any], None],
    ) -> Strategy:
        """Build DDP, or with `trainer.reduction=exact` the strategy that sums in a fixed order."""
        from ddpexp.strategy.ddp import DDP
        from ddpexp.strategy.exact.strategy import Exact

        common: dict[str, Any] = {
            "channels_last": trainer.channels_last, "compile": trainer.compile, "prepare": prepare,
        }  # fmt: skip
        if trainer.reduction == "exact":
            return Exact(self, world, factory, gradient_accumulation_steps=gradient_accumulation_steps, **common)
        return DDP(self, world, factory, deterministic=trainer.deterministic, **common)
