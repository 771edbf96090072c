"""Estimates for pipeline parallelism. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.estimator import Estimator, Facts, MemoryItem, Variant
from ddpexp.strategy.pipeline.options import PipelineOptions
from ddpexp.strategy.pipeline.schedule import num_in_flight


@dataclass(frozen=True)
class PipelineEstimator(Estimator):
    """The layers of some stages on each rank."""

    variants: ClassVar[Sequence[Variant]] = (
        Variant(is_optional=True),
        Variant(("strategy.init=replay", "strategy.gather_in_evaluation=false")),
    )

    options: PipelineOptions

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[MemoryItem]:
        """Return what the worker with the most parameters holds of them, of gradients and of the optimizer's state."""
        stages = "stages" if self.options.stages_per_worker == 1 else "workers' stages"
        note = f"of the largest of {self.options.pp_size} {stages}"
        whole = facts.parameters_bytes
        largest = max(facts.blocks_bytes, default=whole)
        parts = [
            replace(part, num_bytes=part.num_bytes and -(-part.num_bytes * largest // max(whole, 1)), note=note)
            for part in super().memory(facts, trainer, layout)
        ]
        if self.options.dp_shard_size > 1:
            optimizer = parts.pop()
            share = optimizer.num_bytes and -(-optimizer.num_bytes // self.options.dp_shard_size)
            parts.append(MemoryItem("optimizer", share, f"a share of that {note}"))
        return parts

    def weights_share(self, layout: Layout) -> int:
        """Return the number of workers of a pipe."""
        return self.options.pp_size

    def moments(self, facts: Facts, trainer: Trainer, layout: Layout) -> Mapping[str, int]:
        """Return what a rank holds where it has the whole model: as it is built, and in evaluations."""
        divided = facts.of_a_rank()
        own = divided.parameters_bytes
        largest = max(facts.blocks_bytes, default=own)
        state = divided.optimizer_bytes * largest // max(own, 1) // self.options.dp_shard_size
        moments = {"start": facts.parameters_bytes} if self.options.init == "whole" else {}
        return {**moments, "evaluation": own + state} if self.options.gather_in_evaluation else moments

    def blocks_bytes(self, models: Mapping[str, Any], trainer: Trainer) -> list[int]:
        """Return the sizes of the parameters of each worker of a pipe."""
        from ddpexp.strategy.pipeline.stages import divide

        division = divide(models, self.options.pipe, self.options.names)
        sizes = [0] * self.options.pp_size
        for model in models.values():
            for name, parameter in model.named_parameters():
                for place in division.places_of(name):
                    sizes[place] += parameter.numel() * parameter.element_size()
        return sizes

    def in_stages(self, models: Mapping[str, Any], enter: Callable[[int, Any], None]) -> Any:
        """Return a model that computes one stage after the other; see `Estimator.in_stages`."""
        from ddpexp.strategy.pipeline.stages import InStages, divide

        return InStages(next(iter(models.values())), divide(models, self.options.pipe, self.options.names), enter)

    def kept_bytes(self, of_stages: Sequence[int], num_passes: int) -> int:
        """Return what the worker keeps for backward passes that keeps most; see `Estimator.kept_bytes`."""
        return max(self.kept_by_workers(of_stages, num_passes))

    def kept_by_workers(self, of_stages: Sequence[int], num_passes: int) -> list[int]:
        """Return the most that each worker of a pipe keeps, given what each stage keeps of one micro-batch."""
        kept = []
        for place in range(self.options.pp_size):
            own = [of_stages[stage] for stage in self.options.pipe.stages_of(place)]
            most = num_in_flight(self.options.schedule, place, self.options.pipe, num_passes)
            kept.append(most * sum(own) // self.options.stages_per_worker)
        return kept

    def divide_models(self, models: Mapping[str, Any]) -> None:
        """Check the stages, and reduce divided layers to one rank's shard; see `Estimator.divide_models`."""
        from ddpexp.strategy.pipeline.stages import divide
        from ddpexp.strategy.tensor.layers import divide_for_a_rank

        divide(models, self.options.pipe, self.options.names)
        if self.options.divides_layers:
            divide_for_a_rank(models, self.options.tp_plan, self.options.tp_size)
