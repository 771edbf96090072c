"""Estimates for sharded data parallelism. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.estimator import Estimator, Facts, MemoryItem, Traffic, Variant
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.system.text import size_text

_MIB = 1 << 20
_GATHERED = 2  # blocks that a rank has whole: the one that computes, and the next or the last one; each twice


@dataclass(frozen=True)
class FSDPEstimator(Estimator):
    """A share of the model on each rank, and the blocks that are gathered for a moment."""

    variants: ClassVar[Sequence[Variant]] = (
        Variant(),
        Variant(("strategy.init=replay", "strategy.gather_in_evaluation=false")),
        Variant(("strategy.tp_size=2",), is_optional=True),
    )

    options: FSDPOptions

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[MemoryItem]:
        """Return a rank's share of everything that is sharded, and the blocks that it has whole for a moment."""
        parts = super().memory(facts, trainer, layout)
        if layout.world_size == self.options.tp_size:
            return parts
        size = self.weights_share(layout)
        parameters, gradients, optimizer = (self._share(part, facts, size) for part in parts)
        accumulates = facts.num_passes > 1 and not self.options.reduce_each_micro_batch and trainer.reduction == "fast"
        if accumulates:
            gradients = replace(parts[1], note="whole until the last of the accumulated passes")
        elif facts.activations_bytes:
            # Backward frees activations while gradients come into being.
            more = max(0, (gradients.num_bytes or 0) - facts.activations_bytes + facts.recomputed_bytes)
            note = f"{gradients.note}, where activations were".removeprefix(", ")
            gradients = MemoryItem("gradients", more, note if more < (gradients.num_bytes or 0) else gradients.note)
        block = max(facts.blocks_bytes, default=parts[0].num_bytes or 0)
        if self.options.reshard_after_forward:
            note = f"parameters and gradients of blocks, the largest has {size_text(block)}"
            gathered = 2 * _GATHERED * block
        else:
            note = "all parameters after a forward pass, and gradients of blocks"
            gathered = sum(facts.blocks_bytes) + _GATHERED * block
        shares = [replace(part, on_host=self.options.offload) for part in (parameters, gradients, optimizer)]
        sums = (
            [MemoryItem("sums of micro-batches", facts.sums_bytes, "trainer.reduction=exact")]
            if facts.sums_bytes
            else []
        )
        return [*shares, *sums, MemoryItem("gathered blocks", gathered, note)]

    def _share(self, part: MemoryItem, facts: Facts, size: int) -> MemoryItem:
        """Return a rank's share of a part."""
        if part.num_bytes is None:
            return part
        whole = sum(parameter.num_bytes for parameter in facts.parameters if parameter.model in self.options.whole)
        whole = whole if part.name == "parameters" else 0  # those models are frozen
        share = whole + -(-(part.num_bytes - whole) // size)
        return replace(part, num_bytes=share, note=f"a share of {size_text(part.num_bytes)}")

    def weights_share(self, layout: Layout) -> int:
        """Return the number of ranks that a replica of the model is divided over."""
        return max(1, layout.world_size // self.options.tp_size // self.options.dp_replicate_size)

    def moments(self, facts: Facts, trainer: Trainer, layout: Layout) -> Mapping[str, int]:
        """Return what a rank holds where it has the whole model: as it is built, and in evaluations."""
        if layout.world_size == 1:
            return {}
        size, weights = self.weights_share(layout), facts.parameters_bytes
        moments = {}
        if self.options.init == "whole":
            moments["start"] = weights + max(facts.blocks_bytes, default=0)
        if self.options.gather_in_evaluation and not self.options.divides_layers:
            shares = 0 if self.options.offload else -(-(weights + facts.optimizer_bytes) // size)
            moments["evaluation"] = weights + shares
        return moments

    def divide_models(self, models: Mapping[str, Any]) -> None:
        """Reduce each model to the shard of the first rank of a tensor group; see `Estimator.divide_models`."""
        from ddpexp.strategy.tensor.layers import divide_for_a_rank

        if self.options.divides_layers:
            divided = {name: module for name, module in models.items() if name not in self.options.whole}
            divide_for_a_rank(divided, self.options.tp_plan, self.options.tp_size, self.options.sequence_parallel)

    def blocks_bytes(self, models: Mapping[str, Any], trainer: Trainer) -> list[int]:
        """Return the sizes of the parameters of each block, without those of blocks inside it."""
        from ddpexp.strategy.fsdp.blocks import blocks_of

        sharded = {name: module for name, module in models.items() if name not in self.options.whole}
        taken: set[int] = set()
        sizes = []
        min_bytes = self.options.min_block_mb * _MIB
        for block in blocks_of(sharded, self.options.blocks, min_bytes, trainer.compile_blocks):
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
        if layout.world_size == 1:
            return Traffic("none")
        if self.options.divides_layers:
            return Traffic("backend", unknown="what tensor parallelism sends inside layers is not known")
        gathers = 2 if self.options.reshard_after_forward else 1
        num_bytes = gathers * facts.parameters_bytes + facts.trained_bytes
        return Traffic("backend", [num_bytes // 2])  # an all-reduce is two of these
