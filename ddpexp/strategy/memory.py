"""Facts about a model, and what a strategy needs for it: memory and messages. Pure, and free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal


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

    def of_a_rank(self) -> Facts:
        """Return the facts with the parameters that a rank has of divided layers, and its optimizer's state."""
        if not self.divided:
            return self
        whole, own = (sum(one.num_bytes for one in each) for each in (self.parameters, self.divided))
        return replace(self, parameters=self.divided, optimizer_bytes=self.optimizer_bytes * own // max(whole, 1))


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together."""

    model: str
    dtype: str
    num_bytes: int
    num_parameters: int


@dataclass(frozen=True)
class Part:
    """A part of what a rank holds."""

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
