"""What every kind of strategy offers before workers start: options, checks, estimates. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.mesh import DataRank, Mesh

if TYPE_CHECKING:
    from ddpexp.strategy.memory import Facts, Part, Traffic


@dataclass(frozen=True)
class Compilation:
    """What is compiled for training, and how."""

    mode: str = "default"  # of torch.compile
    blocks: str | None = None  # the class of modules that are compiled one by one; None: the whole model

    @classmethod
    def of(cls, trainer: Trainer) -> Compilation | None:
        """Return what the trainer section asks for; None if nothing is compiled."""
        if not trainer.compile:
            return None
        return cls("default" if trainer.compile is True else str(trainer.compile), trainer.compile_blocks)

    @classmethod
    def records_graphs(cls, trainer: Trainer) -> bool:
        """Return whether CUDA graphs are used, whose outputs later runs of the same graphs overwrite."""
        compilation = cls.of(trainer)
        return compilation is not None and compilation.mode in ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Options:
    """The options of a kind of strategy: a subclass adds a field for each key of its section.

    conf/strategy/<kind>.yaml sets every key. Another package registers its subclass by an entry point in the group
    `ddpexp.strategies`, whose name is the kind.
    """

    kind: str
    builder: ClassVar[str] = ""  # the `ddpexp.strategy.base.Builder`, as `module:name`; imported by workers alone
    supports_exact: ClassVar[bool] = False  # trainer.reduction=exact: the same bits at every number of workers
    supports_train_step: ClassVar[bool] = True  # of tasks that do a step themselves

    @property
    def least_world_size(self) -> int:
        """Return the number of workers below which the strategy cannot work."""
        return 1

    @property
    def accepts_unused_parameters(self) -> bool:
        """Return whether parameters may be left without a gradient in a step."""
        return False

    @property
    def updates_on_host(self) -> bool:
        """Return whether the optimizer works on parameters in the memory of the host, although there are GPUs."""
        return False

    def data_rank(self, rank: int, world_size: int) -> DataRank:
        """Return which share of the global batch a rank computes."""
        return DataRank(rank, world_size)

    def check(self, experiment: ExperimentSettings) -> None:
        """Check the options by themselves and with the rest of the configuration; a subclass calls this method too.

        Raises:
            RefusedError: a value means nothing, or contradicts another; names the keys.
        """
        trainer = experiment.trainer
        if trainer.reduction == "exact" and not self.supports_exact:
            raise RefusedError(
                f"trainer.reduction=exact is incompatible with strategy={self.kind}, whose sums depend on the number "
                "of workers. Use trainer.reduction=fast or strategy=ddp."
            )

    def makes_copies(self, world_size: int) -> bool:
        """Return whether the strategy makes the copies in bf16 that `trainer.master_weights` needs."""
        return False

    def check_layout(self, experiment: ExperimentSettings, layout: Layout, gradient_accumulation_steps: int) -> None:
        """Check what depends on the number of workers and their device; a subclass calls this method of its base too.

        Raises:
            RefusedError: the workers lack what an option needs.
        """
        trainer = experiment.trainer
        copies = trainer.param_dtype == "bf16" and trainer.master_weights
        if copies and trainer.activation_checkpointing and not self.makes_copies(layout.world_size):
            raise RefusedError(
                "computes again in backward, when the copies in bf16 that trainer.master_weights=true makes are gone",
                key="trainer.activation_checkpointing",
                value=trainer.activation_checkpointing,
                suggestion="Use strategy=fsdp with two or more workers, trainer.master_weights=false, or "
                "trainer.precision=bf16 instead of trainer.param_dtype=bf16.",
            )

    def to_be_loaded(self) -> Options:
        """Return options for models whose values do not matter, because all of them are read from a checkpoint."""
        return self

    @property
    def late_modules(self) -> Sequence[str]:
        """Return the modules that the strategy imports late, which must be imported before it is built.

        See `ddpexp.compat.lazy_dynamo`.
        """
        return ()

    def missing_in_checkpoints(self) -> str:
        """Return what a checkpoint does not hold and what follows from it, as a sentence; empty if it holds all."""
        return ""

    def other_bits(self, trainer: Trainer, gradient_accumulation_steps: int) -> str:
        """Return which option makes the last bits others than those of strategy=ddp, as a sentence; empty if none."""
        return ""

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[Part]:
        """Return what a rank holds of the model, its gradients and its optimizers, for `ddpexp plan`."""
        from ddpexp.strategy.memory import Part

        weights = sum(parameter.num_bytes for parameter in facts.parameters)
        trained = sum(parameter.num_bytes for parameter in facts.parameters if parameter.trained)
        return [
            Part("parameters", weights, f"{sum(parameter.num_elements for parameter in facts.parameters):,} numbers"),
            Part("gradients", trained),
            Part("optimizer", facts.optimizer_bytes, facts.notes.get("optimizer", "")),
        ]

    def weights_share(self, layout: Layout) -> int:
        """Return over how many ranks the weights of a model, and their average, are divided."""
        return 1

    def moments(self, facts: Facts, trainer: Trainer, layout: Layout) -> Mapping[str, int]:
        """Return what a rank holds of the model at moments other than a step, by their names. Units: bytes."""
        return {}

    @property
    def divides_optimizer(self) -> str | None:
        """Return what gives each rank a part of the parameters to update, as typed; None: a rank updates all."""
        return None

    def mesh(self, world_size: int) -> Mesh:
        """Return how the workers are numbered along the dimensions of parallelism, for people."""
        return Mesh(dp_replicate_size=world_size)

    @property
    def divides_layers(self) -> bool:
        """Return whether several ranks compute a layer together, each with a part of its parameters."""
        return False

    @property
    def looks_at_layers(self) -> bool:
        """Return whether `divide_models` checks the layers of models before workers start."""
        return self.divides_layers

    def divide_models(self, models: Mapping[str, Any]) -> None:
        """Leave in models what one rank computes of them, to see what that takes; for `ddpexp plan` and for checks.

        Raises:
            RefusedError: a layer does not divide.
        """

    def in_stages(self, models: Mapping[str, Any], enter: Callable[[int, Any], None]) -> Any:
        """Return a model for a task to call, which calls `enter(stage, x)` before it computes each of its stages.

        None: it has none. For `ddpexp plan`.
        """
        return None

    def kept_bytes(self, of_stages: Sequence[int], num_passes: int) -> int:
        """Return what a rank keeps for backward, given what each stage keeps of one of `num_passes` micro-batches."""
        return sum(of_stages)

    def blocks_bytes(self, models: Mapping[str, Any]) -> list[int]:
        """Return the sizes of the parameters that are gathered together; modules may be on torch's meta device."""
        return []

    def traffic(self, facts: Facts, trainer: Trainer, layout: Layout) -> Traffic:
        """Return what the ranks send one another in a step, for `ddpexp plan`."""
        from ddpexp.strategy.memory import Traffic

        if layout.world_size == 1:
            return Traffic("none")
        return Traffic("backend", unknown=f"what strategy={self.kind} sends in a step is not known")

    def reserved_bytes(
        self, trained: Sequence[Any], buffers: Sequence[Any], trainer: Trainer, layout: Layout, num_leaves: int
    ) -> tuple[int, int]:
        """Return the memory of sums over micro-batches, and the memory shared by the workers of a host.

        Shapes: `trained` and `buffers` are tensors, also on torch's meta device; a rank has `num_leaves` micro-batches.
        """
        return 0, 0
