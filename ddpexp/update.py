"""One optimizer step in the making: what a task's own `train_step` works with, and the run loop too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpexp.data.batch_plan import BatchPlan
from ddpexp.errors import DdpexpError
from ddpexp.faults import reach
from ddpexp.launch.control import Control
from ddpexp.precision import Precision
from ddpexp.seeds import MODEL, OPTIMIZER, seed_everything, seed_of, seed_torch
from ddpexp.strategy.contract import Strategy
from ddpexp.task import Sums, Task
from ddpexp.world import World


@dataclass
class Update:
    """One optimizer step in the making: what a task's own `train_step` works with, and ours too."""

    strategy: Strategy
    precision: Precision
    optimizers: Mapping[str, Optimizer]
    world: World
    control: Control
    plan: BatchPlan
    seed: int
    reduction: Literal["fast", "exact"]
    clip_grad_norm: float | None
    want_norm: bool = False
    norm: Tensor | None = None
    _step: int = 0
    _passes: int = 0  # micro-batches begun in this step
    _inside: bool = False  # of a micro-batch
    _counts: list[Tensor] = field(default_factory=list)
    _weights: dict[int, Tensor] = field(default_factory=dict)
    _draws: bool = field(init=False)

    def __post_init__(self) -> None:
        """See whether an optimizer may draw random numbers: torch's own do not."""
        self._draws = not all(type(one).__module__.startswith("torch.optim.") for one in self.optimizers.values())

    @property
    def models(self) -> Any:
        """Return what the task's step calls: the wrapped module, or the mapping of them."""
        return self.strategy.training

    def begin(self, step: int) -> None:
        """Begin an optimizer step. Units: steps, from 0."""
        self._step, self._passes, self.norm = step, 0, None

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of one micro-batch; the gradient is reduced in the last one.

        Random numbers are a function of seed, step and micro-batch inside, not of what happened before.
        """
        return _MicroBatch(self, self.strategy.micro_batch(last))

    def _seed(self) -> None:
        each = self.plan.gradient_accumulation_steps
        turn, number = divmod(self._passes, each)  # a task by hand may go through its micro-batches several times
        index = turn * each * self.plan.world_size + self.world.rank * each + number
        value = seed_of(self.seed, MODEL, self._step, index)
        if self.reduction == "exact":
            seed_everything(value)
        seed_torch(value, self.world.device)

    def forward(self, task: Task, batch: Any) -> Sums:
        """Call the task's step in this run's precision."""
        with self.precision.autocast():
            return task.step(self.models, batch)

    def backward(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Add the gradient of `loss_sum / (count over the global batch)`.

        Ranks: all.

        Raises:
            DdpexpError: outside of `micro_batch`.
        """
        reach("backward")
        if not self._inside:
            raise DdpexpError(
                "the task's train_step calls update.backward outside of `with update.micro_batch(last):`, at whose end the workers "
                "sum their gradients: it belongs to none of them. Enclose it."
            )
        if isinstance(count, Tensor):  # known for the global batch only once all of it was seen: see apply
            total = self.plan.global_batch_size
            self._counts.append(count.detach())
        else:
            total = count * self.plan.gradient_accumulation_steps * self.plan.world_size
        if total not in self._weights:
            self._weights[total] = torch.tensor(self.strategy.gradient_weight / total, device=self.world.device)
        self.precision.backward(loss_sum, self._weights[total])

    def apply(self, *names: str) -> None:
        """Step the named optimizers, or all, with the gradients there are, and clear every gradient.

        Those of other parameters too: what one network's loss leaves in another must not reach that one's next step.
        Ranks: all; communicates only where the task's counts are tensors.

        Raises:
            DdpexpError: inside of `micro_batch`.
        """
        if self._inside:
            raise DdpexpError(
                "the task's train_step calls update.apply inside of `with update.micro_batch(last):`, at whose end the workers sum "
                "their gradients: the optimizer would see this worker's own. Call it after that."
            )
        optimizers = [self.optimizers[name] for name in names or self.optimizers]
        if self._counts:
            counted = _stack(self._counts, self.world.device)
            each = counted.new_zeros(self.world.world_size, len(counted))
            each[self.world.rank] = counted  # a number of each rank stands alone, so their sum has one order everywhere
            total = self.world.sum(each).cpu().flatten().cumsum(0)[-1]
            self.strategy.scale_gradient((self.plan.global_batch_size / total).to(self.world.device))
            self._counts.clear()
        if self._draws:
            seed_torch(seed_of(self.seed, OPTIMIZER, self._step, 0), self.world.device)
        for optimizer in optimizers:
            self.precision.unscale(optimizer)
        if self.clip_grad_norm is not None:
            self.norm = self.strategy.clip(_parameters(optimizers), self.clip_grad_norm)
        elif self.want_norm:
            self.norm = self.strategy.gradient_norm(_parameters(optimizers))
        for optimizer in optimizers:
            self.precision.step(optimizer)
        self.precision.update()
        self.strategy.clear_gradient()


class _MicroBatch(AbstractContextManager[None]):
    """One micro-batch of an update; a class, for a generator takes four times as long."""

    def __init__(self, update: Update, strategy: AbstractContextManager[None]) -> None:
        self._update = update
        self._strategy = strategy

    def __enter__(self) -> None:
        update = self._update
        update.control.beat()
        reach("forward")
        update._seed()
        update._passes += 1
        update._inside = True
        self._strategy.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._update._inside = False
        return self._strategy.__exit__(*error)


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def _stack(values: Sequence[Tensor], device: torch.device) -> Tensor:
    if len({(value.dtype, value.device) for value in values}) == 1:
        return torch.stack(list(values)).to(device, torch.float64)  # one conversion for all
    return torch.stack([value.to(device, torch.float64) for value in values])
