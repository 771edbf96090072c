"""Estimates for data parallelism: DDP's buckets, and what carries the gradients. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.estimator import Bucket, Estimator, Facts, MemoryItem, Parameter, Traffic, Variant
from ddpexp.system.text import size_text

_MIB = 1 << 20
_GATHERED = 128 << 10  # ddpexp.strategy.comm.reduce.GATHERED_BYTES, which a test holds this to


@dataclass(frozen=True)
class DDPEstimator(Estimator):
    """Whole replicas, whose gradients are averaged."""

    variants: ClassVar[Sequence[Variant]] = (Variant(), Variant(("strategy.shard_optimizer=true",)))

    options: DDPOptions

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[MemoryItem]:
        """Return what a rank holds of the model, its gradients and its optimizers."""
        by_ddp = layout.world_size > 1 and trainer.reduction == "fast"
        parameters, gradients, optimizer = super().memory(facts, trainer, layout)
        if by_ddp and self.options.gradient_as_bucket_view:
            gradients = MemoryItem("gradients", facts.trained_bytes, "views of the buckets")
        parts = [parameters, gradients]
        if by_ddp and not self.options.gradient_as_bucket_view:
            note = "beside the gradients: strategy.gradient_as_bucket_view=false"
            parts.append(MemoryItem("buckets", facts.trained_bytes, note))
        if self.options.shard_optimizer and layout.world_size > 1:
            share = -(-facts.optimizer_bytes // layout.world_size)
            note = f"a share of {size_text(facts.optimizer_bytes)}: strategy.shard_optimizer=true"
            optimizer = MemoryItem("optimizer", share, note)
        parts.append(optimizer)
        if trainer.reduction == "exact":
            parts.append(MemoryItem("sums of micro-batches", facts.sums_bytes, "trainer.reduction=exact"))
        transport, workers = self.transport(trainer, layout), layout.world_size // layout.nodes
        if transport == "shared_memory":
            note = f"{size_text(facts.shared_bytes)} for {workers} workers"
            parts.append(MemoryItem("shared memory", facts.shared_bytes // workers, note))
        elif transport == "in_rank_order":
            sizes = [bucket.num_bytes for bucket in self._buckets(facts, trainer, layout)] or [facts.sums_bytes]
            note = "what the ranks send one another, in the order of the sum"
            parts.append(MemoryItem("exchange", exchange_bytes(sizes, layout.world_size), note))
        elif transport == "backend" and self.options.comm_hook == "powersgd":
            note = "the error that it feeds back, and its factors beside that"
            parts.append(MemoryItem("PowerSGD's memory", facts.trained_bytes, note))
        return parts

    def traffic(self, facts: Facts, trainer: Trainer, layout: Layout) -> Traffic:
        """Return what the ranks send one another in a step; compressed gradients as they travel."""
        transport = self.transport(trainer, layout)
        if transport == "none":
            return Traffic(transport)
        all_buckets = self._buckets(facts, trainer, layout)
        sizes = [bucket.num_bytes for bucket in all_buckets] or [facts.trained_bytes]
        if self.options.comm_hook in ("fp16", "bf16"):
            sizes = [size // 2 for size in sizes]
        unknown = "what PowerSGD's products cost is not known" if self.options.comm_hook == "powersgd" else ""
        return Traffic(transport, sizes, all_buckets, self.options.bucket_cap_mb, unknown)

    def reserved_bytes(
        self, trained: Sequence[Any], buffers: Sequence[Any], trainer: Trainer, layout: Layout, num_leaves: int
    ) -> tuple[int, int]:
        """Return the memory of sums over micro-batches, and the memory shared by the workers of a host."""
        from ddpexp.strategy.reserved import shared_bytes, sums_bytes

        exact = trainer.reduction == "exact"
        sums = sums_bytes([*trained, *buffers], num_leaves) if exact else 0
        if self.transport(trainer, layout) != "shared_memory":
            return sums, 0
        tensors, leaves = ([*trained, *buffers], num_leaves) if exact else (trained, 0)
        return sums, shared_bytes(tensors, leaves, layout.world_size)

    def transport(
        self, trainer: Trainer, layout: Layout
    ) -> Literal["none", "shared_memory", "in_rank_order", "backend"]:
        """Return what carries the gradients.

        See `ddpexp.strategy.comm.reduce`, and `ddpexp.strategy.exact.exchange` for the exact reduction.
        """
        if layout.world_size == 1:
            return "none"
        if layout.device == "cuda" or self.options.comm_hook != "none":
            return "backend"
        if layout.nodes == 1 and self.options.reduce_through != "backend":
            return "shared_memory"
        return "backend" if layout.world_size == 2 and trainer.reduction == "fast" else "in_rank_order"

    def _buckets(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[Bucket]:
        """Return DDP's buckets; there are none alone, nor in the exact reduction."""
        if layout.world_size == 1 or trainer.reduction == "exact":
            return []
        # A search for unused parameters keeps the initial buckets.
        searches = self.options.find_unused_parameters and not self.options.static_graph
        return buckets(facts.parameters, self.options.bucket_cap_mb, rebuilt=not searches)


def buckets(parameters: Iterable[Parameter], bucket_cap_mb: float, rebuilt: bool = True) -> list[Bucket]:
    """Cut the trained parameters into DDP's buckets, those first whose gradients are ready first.

    A bucket closes as soon as it holds `strategy.bucket_cap_mb` or more, so a large parameter may overflow it; each
    kind of number has its own. `rebuilt` is DDP's layout from the second step on, in the order in which gradients
    become ready, for which the reverse of the models' order stands in; without it the buckets are cut in the models'
    order.
    Source: torch, csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size and Reducer::rebuild_buckets.
    """
    cap = int(bucket_cap_mb * _MIB)
    models: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.trained:
            models.setdefault(parameter.model, []).append(parameter)
    all_buckets = []
    for name, members in models.items():
        cut = _cut(name, members[::-1] if rebuilt else members, cap)
        all_buckets += cut if rebuilt else cut[::-1]
    return all_buckets


def _cut(model: str, members: Sequence[Parameter], cap: int) -> list[Bucket]:
    full: list[Bucket] = []
    filling: dict[str, Bucket] = {}
    for parameter in members:
        dtype = parameter.dtype
        last = filling.get(dtype, Bucket(model, dtype, 0, 0))
        filling[dtype] = Bucket(model, dtype, last.num_bytes + parameter.num_bytes, last.num_parameters + 1)
        if filling[dtype].num_bytes >= cap:
            full.append(filling.pop(dtype))
    return [*full, *filling.values()]


def exchange_bytes(sizes: Iterable[int], world_size: int) -> int:
    """Return what a rank holds while gradients are summed in the order of the ranks through the backend.

    A small bucket is gathered from all ranks; of a large one this rank sends all chunks and receives its own from all.
    """
    return sum(
        world_size * size if (world_size - 2) * size < _GATHERED else 2 * -(-size // world_size) * world_size
        for size in sizes
    )
