"""The options of pipeline parallelism; free of torch, because the command checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.strategy.options import DataRank, Options, TrainerOptions

if TYPE_CHECKING:
    from ddpexp.distributed.world import World
    from ddpexp.strategy.base import Strategy
    from ddpexp.strategy.memory import Facts, Part


@dataclass(frozen=True)
class PipelineOptions(Options):
    """Options of pipeline parallelism; conf/strategy/pipeline.yaml explains every field."""

    supports_train_step: ClassVar[bool] = False

    kind: Literal["pipeline"]
    pp_size: int
    split_before: tuple[str | int, ...] | None
    schedule: Literal["1f1b", "gpipe"]

    def stage_of(self, rank: int, world_size: int) -> int:
        """Return the stage that a rank computes: neighbours share one, and differ in their data."""
        return rank // (world_size // self.pp_size)

    def data_rank(self, rank: int, world_size: int) -> DataRank:
        """Return which share of the global batch a rank computes; of its stages the last one has the loss."""
        self._check_size(world_size)
        size = world_size // self.pp_size
        return DataRank(rank % size, size, self.stage_of(rank, world_size) == self.pp_size - 1)

    def check(self, trainer: TrainerOptions) -> None:
        """Check the options by themselves and with the trainer section; see `Options.check`."""
        super().check(trainer)
        if self.pp_size < 2:
            raise RefusedError(f"strategy.pp_size={self.pp_size}: use 2 or more stages, or strategy=ddp.")
        if self.split_before is not None and len(self.split_before) != self.pp_size - 1:
            raise RefusedError(
                f"strategy.split_before names the layers with which {len(self.split_before)} stages begin, and of "
                f"strategy.pp_size={self.pp_size} stages all but the first begin with one: name {self.pp_size - 1}."
            )
        for clashes, key, why, instead in (
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
                raise RefusedError(f"strategy=pipeline is incompatible with {key}, {why}. Use {instead}.")

    def check_layout(self, trainer: TrainerOptions, layout: Layout, gradient_accumulation_steps: int) -> None:
        """Check that workers divide into stages, and that there is something to pass through them."""
        self._check_size(layout.world_size)
        if gradient_accumulation_steps < self.pp_size:
            replicas = layout.world_size // self.pp_size
            raise RefusedError(
                f"strategy.pp_size={self.pp_size} keeps its stages busy with {self.pp_size} micro-batches a step or "
                f"more, and there {'is' if gradient_accumulation_steps == 1 else 'are'} {gradient_accumulation_steps}: "
                "use a smaller trainer.micro_batch_size, at most trainer.global_batch_size / "
                f"{self.pp_size * replicas}."
            )

    def _check_size(self, world_size: int) -> None:
        if world_size % self.pp_size:
            sizes = [str(size) for size in range(2, world_size + 1) if not world_size % size]
            instead = f"use {' or '.join(sizes)}" if sizes else f"use trainer.gpus={self.pp_size}, or strategy=ddp"
            raise RefusedError(
                f"strategy.pp_size={self.pp_size} does not divide {world_size} worker{'s' * (world_size > 1)}: "
                f"{instead}."
            )

    def other_bits(self, trainer: TrainerOptions, gradient_accumulation_steps: int) -> str:
        """Return that sums over several workers and dropout are others."""
        return (
            "strategy=pipeline: dropout draws other random numbers than on one worker, and gradients of several "
            "replicas are summed in the order of the backend, so the last digits differ from those of strategy=ddp"
        )

    def memory(self, facts: Facts, trainer: TrainerOptions, layout: Layout) -> list[Part]:
        """Return what the largest stage holds of parameters, gradients and optimizer, and of other micro-batches.

        With 1f1b the first stage keeps its activations of as many micro-batches as there are stages: as much as a whole
        pass of one.
        """
        from ddpexp.strategy.memory import Part

        stages, note = facts.blocks_bytes, f"of the largest of {self.pp_size} stages"
        whole = sum(parameter.num_bytes for parameter in facts.parameters)
        largest = max(stages, default=whole)
        parts = [
            replace(part, num_bytes=part.num_bytes and -(-part.num_bytes * largest // max(whole, 1)), note=note)
            for part in super().memory(facts, trainer, layout)
        ]
        if self.schedule == "gpipe" and facts.activations_bytes and facts.num_passes > self.pp_size:
            more = facts.activations_bytes * (facts.num_passes - self.pp_size) // self.pp_size
            parts.append(Part("more activations", more, f"{facts.num_passes} micro-batches at once, strategy.schedule"))
        return parts

    def weights_share(self, layout: Layout) -> int:
        """Return the number of stages."""
        return self.pp_size

    def moments(self, facts: Facts, trainer: TrainerOptions, layout: Layout) -> Mapping[str, int]:
        """Return what a rank holds where it has the whole model: as it is built, and in evaluations."""
        weights = sum(parameter.num_bytes for parameter in facts.parameters)
        largest = max(facts.blocks_bytes, default=weights)
        return {"start": weights, "evaluation": weights + facts.optimizer_bytes * largest // max(weights, 1)}

    def blocks_bytes(self, models: Mapping[str, Any]) -> list[int]:
        """Return the sizes of the parameters of each stage."""
        from ddpexp.strategy.pipeline.stages import divide

        division = divide(models, self.pp_size, self.names)
        sizes = [0] * self.pp_size
        for model in models.values():
            for name, parameter in model.named_parameters():
                for stage in division.stages_of(name):
                    sizes[stage] += parameter.numel() * parameter.element_size()
        return sizes

    @property
    def names(self) -> list[str] | None:
        """Return the layers with which stages begin; those of an nn.Sequential are numbers on the command line."""
        return None if self.split_before is None else [str(name) for name in self.split_before]

    @property
    def divides_optimizer(self) -> str:
        """Return what gives each rank the parameters of its stage to update, as typed."""
        return "strategy=pipeline"

    def build(
        self,
        world: World,
        factory: Callable[[], Any],
        *,
        trainer: TrainerOptions,
        gradient_accumulation_steps: int,
        prepare: Callable[[Any], None],
    ) -> Strategy:
        """Build the model and keep the layers of this rank's stage."""
        from ddpexp.strategy.pipeline.strategy import Pipeline

        return Pipeline(
            self, world, factory, gradient_accumulation_steps, channels_last=trainer.channels_last, prepare=prepare
        )
