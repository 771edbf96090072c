"""Facts about a model, and the estimates for `ddpexp plan` of the memory and messages that a strategy needs for it.

Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.options import Options


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model, in the order in which the model names them."""

    model: str
    num_elements: int
    num_bytes: int
    dtype: str
    trained: bool


@dataclass(frozen=True)
class ParamGroup:
    """A parameter group of an optimizer."""

    optimizer: str
    name: str
    conditions: str  # by which the configuration has chosen its parameters; empty: it has not
    num_parameters: int  # tensors
    num_elements: int
    num_trained: int  # elements that are not frozen
    lr: float
    weight_decay: float | None  # None: the optimizer has no such setting


@dataclass(frozen=True)
class Facts:
    """What was learnt from building the model, its optimizers and the data; see `ddpexp.plan.build`."""

    parameters: Sequence[Parameter]  # each once, tied ones too
    buffers_bytes: int
    state_bytes: Mapping[str, int]  # of each model's state_dict: a file of a checkpoint
    optimizer_bytes: int
    activations_bytes: int | None  # of a micro-batch; None: not measured
    batch_bytes: int | None
    data_bytes: int | None  # of the data sets, of each rank's own
    num_samples: int
    device_data_bytes: int = 0  # of the data sets where they lie on the device
    sums_bytes: int = 0  # of trainer.reduction=exact
    shared_bytes: int = 0  # the memory through which the workers of a machine reduce; 0: they do not
    recomputed_bytes: int = 0  # of the activations: those of the module that is computed again
    temporary_bytes: int = 0  # of operations in backward
    num_passes: int = 1  # micro-batches of a rank in a step
    blocks_bytes: Sequence[int] = ()  # of the parameters that are gathered together
    notes: Mapping[str, str] = field(default_factory=dict)  # by what they are about
    groups: Sequence[ParamGroup] = ()
    late_starts: Sequence[str] = ()  # what trainer.freeze_until freezes at first
    averaged_by: str | None = None  # the optimizer that averages the weights itself
    divided: Sequence[Parameter] = ()  # the parameters as one rank has them, if several ranks divide layers

    @property
    def parameters_bytes(self) -> int:
        """Return the size of all parameters."""
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def trained_bytes(self) -> int:
        """Return the size of the parameters that are not frozen, and of their gradients."""
        return sum(parameter.num_bytes for parameter in self.parameters if parameter.trained)

    def of_a_rank(self) -> Facts:
        """Return the facts with the parameters that a rank has of divided layers, and its optimizer's state."""
        if not self.divided:
            return self
        own = sum(parameter.num_bytes for parameter in self.divided)
        optimizer_bytes = self.optimizer_bytes * own // max(self.parameters_bytes, 1)
        return replace(self, parameters=self.divided, optimizer_bytes=optimizer_bytes)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together."""

    model: str
    dtype: str
    num_bytes: int
    num_parameters: int


@dataclass(frozen=True)
class MemoryItem:
    """Memory that a rank needs for one purpose."""

    name: str
    num_bytes: int | None  # None: not known
    note: str = ""
    on_host: bool = False  # in the host's memory, also where the workers have GPUs


@dataclass(frozen=True)
class Traffic:
    """What the ranks send one another in a step."""

    transport: Literal["none", "shared_memory", "in_rank_order", "backend"]
    num_bytes: Sequence[int] = ()  # of the messages, in the order in which they are ready
    buckets: Sequence[Bucket] = ()  # of DDP
    bucket_cap_mb: float = 0.0
    unknown: str = ""  # why the time that it takes cannot be estimated


@dataclass(frozen=True)
class Variant:
    """Options of a kind of strategy that `ddpexp plan --strategies` compares with others."""

    overrides: tuple[str, ...] = ()  # beside strategy=KIND
    is_optional: bool = False  # few models say how to divide them: where one does not, a note says so


@dataclass(frozen=True)
class Estimator:
    """The estimates for `ddpexp plan`: a subclass overrides what its kind of strategy does not share with replicas.

    The options name the class. Modules and tensors may be on torch's meta device.
    """

    variants: ClassVar[Sequence[Variant]] = (Variant(),)

    options: Options

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[MemoryItem]:
        """Return what a rank holds of the model, its gradients and its optimizers."""
        num_elements = sum(parameter.num_elements for parameter in facts.parameters)
        return [
            MemoryItem("parameters", facts.parameters_bytes, f"{num_elements:,} numbers"),
            MemoryItem("gradients", facts.trained_bytes),
            MemoryItem("optimizer", facts.optimizer_bytes, facts.notes.get("optimizer", "")),
        ]

    def weights_share(self, layout: Layout) -> int:
        """Return over how many ranks the weights of a model, and their average, are divided."""
        return 1

    def moments(self, facts: Facts, trainer: Trainer, layout: Layout) -> Mapping[str, int]:
        """Return what a rank holds of the model at moments other than a step, by their names. Units: bytes."""
        return {}

    def divide_models(self, models: Mapping[str, Any]) -> None:
        """Reduce each model to one rank's shard; also checks the layers before workers start.

        Raises:
            RefusedError: a layer does not divide.
        """

    def in_stages(self, models: Mapping[str, Any], enter: Callable[[int, Any], None]) -> Any:
        """Return a model for a task to call, which calls `enter(stage, x)` before it computes each of its stages.

        None: it has none.
        """
        return None

    def kept_bytes(self, of_stages: Sequence[int], num_passes: int) -> int:
        """Return what a rank keeps for backward, given what each stage keeps of one of `num_passes` micro-batches."""
        return sum(of_stages)

    def blocks_bytes(self, models: Mapping[str, Any], trainer: Trainer) -> list[int]:
        """Return the sizes of the parameters that are gathered together."""
        return []

    def traffic(self, facts: Facts, trainer: Trainer, layout: Layout) -> Traffic:
        """Return what the ranks send one another in a step."""
        if layout.world_size == 1:
            return Traffic("none")
        return Traffic("backend", unknown=f"what strategy={self.options.kind} sends in a step is not known")

    def reserved_bytes(
        self, trained: Sequence[Any], buffers: Sequence[Any], trainer: Trainer, layout: Layout, num_leaves: int
    ) -> tuple[int, int]:
        """Return the memory of sums over micro-batches, and the memory shared by the workers of a host.

        Shapes: `trained` and `buffers` are tensors; a rank has `num_leaves` micro-batches.
        """
        return 0, 0
