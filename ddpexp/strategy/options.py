"""What every kind of strategy offers before workers start: options and their checks. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.mesh import DataRank, Mesh


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
    # As `module:name`.
    builder: ClassVar[str] = ""  # the `ddpexp.strategy.base.Builder`, which workers alone import
    estimator: ClassVar[str] = "ddpexp.strategy.estimator:Estimator"  # the class for `ddpexp plan`, free of torch
    supports_exact: ClassVar[bool] = False  # trainer.reduction=exact: the same bits at every number of workers
    supports_train_step: ClassVar[bool] = True  # of tasks that do a step themselves
    supports_compiled_step: ClassVar[bool] = False  # trainer.compile_step: gradients that are there before it begins

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
                f"is incompatible with strategy={self.kind}, whose sums depend on the number of workers",
                key="trainer.reduction",
                value="exact",
                suggestion="Use trainer.reduction=fast or strategy=ddp.",
            )
        if trainer.compile_step and not self.supports_compiled_step:
            raise RefusedError(
                "is for strategy=ddp, which reduces whole gradients when they are computed",
                key="trainer.compile_step",
                value=True,
                suggestion="Use strategy=ddp or trainer.compile_step=false.",
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
        """Return whether the estimator's `divide_models` checks the layers of models before workers start."""
        return self.divides_layers


def check_records_no_graphs(trainer: Trainer, layout: Layout, why: str) -> None:
    """Check that no CUDA graphs are recorded, which a strategy cannot do because of `why`.

    Raises:
        RefusedError: they are.
    """
    if layout.device == "cuda" and layout.world_size > 1 and Compilation.records_graphs(trainer):
        instead = "max-autotune-no-cudagraphs" if trainer.compile == "max-autotune" else "true"
        raise RefusedError(
            f"records CUDA graphs, and {why}",
            key="trainer.compile",
            value=trainer.compile,
            suggestion=f"Use trainer.compile={instead}.",
        )


def check_reduce_through(reduce_through: str, layout: Layout) -> None:
    """Check that the workers share memory, where gradients are to be reduced through it.

    Raises:
        RefusedError: they do not.
    """
    if reduce_through == "shared_memory" and (layout.device == "cuda" or layout.nodes > 1):
        where = "workers have GPUs" if layout.device == "cuda" else f"workers are on {layout.nodes} nodes"
        raise RefusedError(
            f"is for CPU workers of one host, and these {where}",
            key="strategy.reduce_through",
            value="shared_memory",
            suggestion="Use strategy.reduce_through=auto.",
        )
