"""An optimizer step in progress: what the run loop, a strategy and a task's own `train_step` work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpexp.data.batch_plan import BatchPlan
from ddpexp.distributed.rng import MODEL, OPTIMIZER, seed_everything, seed_of, seed_torch
from ddpexp.distributed.transfers import moved
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.launch.workers.control import Control
from ddpexp.strategy.base import Strategy
from ddpexp.strategy.replica import clip_values
from ddpexp.system.fault_injection import fault_point
from ddpexp.task import HasTrainStep, Sums, Task
from ddpexp.train.counts import GlobalCounts, stack_counts
from ddpexp.train.freezing import LateStarts
from ddpexp.train.precision import Precision
from ddpexp.train.task_checks import check_loss, check_names, check_sums, check_unchanged, gradients_of, own_backward
from ddpexp.train.undo import Undo

_MAX_CALLS = 1 << 20  # of backward in a micro-batch


@dataclass
class Step:
    """An optimizer step in progress; implements `ddpexp.task.OptimizerStep`.

    A step consists of rounds: micro-batches add gradients, and one or several calls of `apply` use them. The gradients
    are cleared when the next micro-batch begins, or when the step ends.
    """

    task: Task
    strategy: Strategy
    precision: Precision
    optimizers: Mapping[str, Optimizer]
    world: World
    control: Control
    plan: BatchPlan
    seed: int
    reduction: Literal["fast", "exact"]
    clip_grad_norm: float | None
    clip_grad_value: float | None
    num_steps: int
    records_graphs: bool = False  # torch.compile uses CUDA graphs
    on_gradients: Callable[[Sequence[Optimizer]], None] | None = None  # of callbacks
    late_starts: LateStarts = field(default_factory=LateStarts)
    want_norm: bool = False
    norms: dict[str, Tensor] = field(default_factory=dict)  # of the last step, before clipping; see `apply`
    moved: bool = False  # whether an optimizer has changed parameters in this step
    manual: HasTrainStep | None = field(init=False)  # the task, if it has a `train_step` of its own
    _checked: bool = False  # that the task returns what it should: done in the first step
    _step: int = 0
    _summed: bool = True  # the last micro-batch that began was the last one of its round
    _passes: int = 0  # micro-batches begun in this step
    _inside: bool = False  # of a micro-batch
    _passes_in_round: int = 0
    _current: int = 0  # micro-batch in the round whose passes are in progress
    _position: int = 0  # of the next call of backward in its micro-batch
    _numbers: dict[int, int] = field(default_factory=dict)  # counts that are numbers, by the position of their call
    _has_numbers: bool = False  # in this round
    _counts: list[Tensor] = field(default_factory=list)  # counts of this round that are tensors
    _places: list[tuple[int, int]] = field(default_factory=list)  # for each of them the pass and the position
    _weights: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    _applied: tuple[str, ...] = ()  # optimizers that have already used the gradients of this round
    _undo: Undo | None = field(init=False)
    _global_counts: GlobalCounts = field(init=False)
    _names: tuple[str, ...] = field(init=False)
    _draws: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look at the task and the optimizers once: the checks are slow."""
        self.manual = self.task if isinstance(self.task, HasTrainStep) else None
        self._undo = Undo(self.strategy.modules) if self.precision.skips else None
        self._names = tuple(self.optimizers)
        self._global_counts = GlobalCounts(self._caller)
        # Whether an optimizer may draw random numbers; torch's own do not.
        self._draws = not all(type(o).__module__.startswith("torch.optim.") for o in self.optimizers.values())

    @property
    def micro_batch_in_progress(self) -> int | None:
        """Return the number of the micro-batch whose forward or backward pass is in progress, from 0; None: none."""
        return (self._passes - 1) % self.plan.gradient_accumulation_steps if self._inside else None

    @property
    def step(self) -> int:
        """Return the number of this optimizer step. Units: steps, from 0."""
        return self._step

    @property
    def models(self) -> Any:
        """Return the wrapped module that the task trains, or the mapping of modules."""
        return self.strategy.train_model

    def run(self, step: int, micro_batches: list[Any]) -> list[Sums]:
        """Do one optimizer step; return the sums of each micro-batch, or those of a manual task's whole step.

        Units: steps, from 0. Ranks: all; communicates.

        Raises:
            DdpexpError: gradients that no optimizer has used.
        """
        self._step, self._passes, self.norms, self.moved = step, 0, {}, False
        self.late_starts.report(step)
        if self.records_graphs:
            # Once a step: torch would let each micro-batch overwrite the gradients that the ones before have left in
            # the memory of its graphs. Source: https://github.com/pytorch/pytorch/issues/169545
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        if self.manual is None:
            sums = self.strategy.train_step(self, micro_batches)
        else:
            sums = [self.manual.train_step(self, micro_batches)]
            if not self._checked:
                check_sums(sums[0], self.manual.train_step, trains=False)
        self._checked = True
        self._end()
        return sums

    def _end(self) -> None:
        """End an optimizer step: clear its gradients."""
        if self._passes_in_round:
            if not self._applied and (self._counts or self._has_numbers):
                raise DdpexpError(
                    "the task's train_step calls update.backward without a later update.apply: its gradients are lost",
                    suggestion="Call update.apply() for the optimizers that are to use them.",
                )
            self._end_round()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch; the last one reduces the gradient.

        The forward pass runs in the precision of the run. Random numbers inside are a function of seed, step and
        micro-batch, independent of earlier draws. Ranks: all, equally often; communicates in the last one.
        """
        self._summed = bool(last)
        return _MicroBatch(self, self.strategy.micro_batch(self._summed))

    @contextmanager
    def backward_pass(self, micro_batch: int) -> Iterator[None]:
        """Return a context for the backward pass of a micro-batch, numbered from 0, whose own context has ended.

        For a pipeline, which begins further micro-batches before that; inside there is one call of `backward`.
        """
        self.control.heartbeat()
        self._position, self._current, self._inside = 0, micro_batch, True
        yield
        self._inside = False

    @contextmanager
    def forward_pass(self, micro_batch: int) -> Iterator[None]:
        """Return a context for a further forward pass of a micro-batch, which draws the random numbers of its first."""
        with self.backward_pass(micro_batch), self.precision.autocast():
            self._seed(0, micro_batch)
            yield

    def forward(self, batch: Any) -> Sums:
        """Return the task's sums for a micro-batch; those of the first step are checked."""
        if self._checked:
            return self.task.step(self.strategy.train_model, batch)  # type: ignore[return-value]
        before = gradients_of(self.strategy.parameters())
        sums = self.task.step(self.strategy.train_model, batch)
        check_unchanged(before, self.strategy.parameters(), self.task.step)
        check_sums(sums, self.task.step, trains=True)
        return sums  # type: ignore[return-value]

    def backward(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Add the gradient of `loss_sum / (count over the global batch)`.

        Several calls in one micro-batch each have a count of their own; they are matched across micro-batches by their
        order. A number must be the same in every micro-batch of a step. The total of a tensor is known only after the
        whole global batch, so the totals of all calls must be equal, and every rank must make the same number of
        calls.

        Ranks: all.

        Raises:
            DdpexpError: called outside of `micro_batch`; a count is 0 or changes; numbers are mixed with tensors.
        """
        fault_point("backward")
        if not self._inside:
            raise DdpexpError(
                "the task's train_step calls update.backward outside of `with update.micro_batch(last):`, at whose "
                "end the workers sum their gradients: this call belongs to no micro-batch",
                suggestion="Enclose it.",
            )
        if not self._checked and self.manual is not None:
            check_loss(loss_sum, count, step=self.manual.train_step)
        position = self._position
        self._position = position + 1
        if isinstance(count, Tensor):
            total = self.plan.global_batch_size  # provisional: see _scale_by_counts
            self._counts.append(count.detach())
            self._places.append((self._current // self.plan.gradient_accumulation_steps, position))
        else:
            if self._numbers.get(position) != count:
                self._check_number(count, position)
            self._has_numbers = True
            total = count * self.plan.gradient_accumulation_steps * self.plan.data_size
        if self._counts and self._has_numbers:
            raise DdpexpError(
                f"{self._caller} gives numbers and tensors as counts for the same gradient: the value of a tensor is "
                "known only when the gradient is complete, and its parts cannot be divided any more",
                suggestion="Make all counts tensors, or all numbers.",
            )
        key = (total, loss_sum.dtype)
        weight = self._weights.get(key)
        if weight is None:
            kind = torch.float64 if loss_sum.dtype == torch.float64 else torch.float32
            weight = torch.tensor(self.strategy.gradient_weight / total, dtype=kind, device=self.world.device)
            self._weights[key] = weight
        self.precision.backward(loss_sum, weight)

    def apply(self, *names: str) -> bool:  # noqa: C901  (the stages of a step, in their order)
        """Step the named optimizers, or all of them, with the gradients of this round; return whether they stepped.

        Several calls may use the same gradients. The norm of those that a call uses is kept in `norms`, under `/a+b`
        for the optimizers a and b, and under the empty text for all.

        All gradients are cleared before the next round, also those of other parameters: gradients that the loss of one
        network leaves in another must not reach that network's next step.
        Ranks: all; communicates only if the task's counts are tensors, in the first call of a round.

        Raises:
            DdpexpError: called inside of `micro_batch`; the workers have not summed the gradients; an optimizer does
            not exist, or has already used these gradients.
        """
        if self._inside:
            raise DdpexpError(
                "the task's train_step calls update.apply inside of `with update.micro_batch(last):`, at "
                "whose end the workers sum their gradients: the optimizer would see the gradients of this worker alone",
                suggestion="Call it after that block.",
            )
        if self.manual is not None:
            self._check_round()
        chosen = names or self._names
        if names or self._applied:
            check_names(chosen, self._applied, self.optimizers)
        optimizers = [self.optimizers[name] for name in chosen]
        if not self._checked and not self._applied:
            self._check_gradients(optimizers)
        if self._counts:
            self._scale_by_counts()
        self.late_starts.drop_gradients(self._step)
        if self._draws:
            seed_torch(seed_of(self.seed, OPTIMIZER, self._step, 0), self.world.device)
        if self.precision.skips:
            self.precision.unscale(*optimizers)
        if self.on_gradients is not None:
            self.on_gradients(optimizers)
        if self.clip_grad_norm is not None:
            norm = self.strategy.clip(_parameters(optimizers), self.clip_grad_norm)
            self.norms[self._suffix(chosen)] = self.strategy.norm_to_record(norm) if self.want_norm else norm
        elif self.want_norm:
            self.norms[self._suffix(chosen)] = self.strategy.gradient_norm(_parameters(optimizers))
        if self.clip_grad_value is not None:
            clip_values(_parameters(optimizers), self.clip_grad_value)
        self._applied += chosen
        stepped = self.precision.step(*optimizers)
        self.moved |= stepped
        if not stepped and self._undo is not None:
            self._undo.restore()
        return stepped

    def _suffix(self, chosen: Sequence[str]) -> str:
        return "" if len(chosen) == len(self._names) else f"/{'+'.join(chosen)}"

    def _begin_micro_batch(self) -> None:
        if self._applied:
            self._end_round()
        if self._passes_in_round == 0 and self._undo is not None:
            self._undo.take()
        if self._passes_in_round % self.plan.gradient_accumulation_steps == 0:
            self._numbers.clear()  # those of another step, or another pass over the micro-batches, may differ
        self._seed(*divmod(self._passes, self.plan.gradient_accumulation_steps))  # a manual task may do several turns
        self._passes += 1
        self._current = self._passes_in_round
        self._passes_in_round += 1
        self._position = 0
        self._inside = True

    def _seed(self, turn: int, micro_batch: int) -> None:
        """Seed the random numbers of a micro-batch."""
        place = (turn * self.plan.data_size + self.strategy.data.rank) * self.plan.gradient_accumulation_steps
        value = seed_of(self.seed, MODEL, self._step, place + micro_batch)
        if self.reduction == "exact" or self.strategy.data.size < self.world.world_size:  # ranks share a batch
            seed_everything(value)
        seed_torch(value, self.world.device)

    def _end_round(self) -> None:
        if self.precision.skips:
            self.precision.update()
        self.strategy.clear_gradient()
        self._applied = ()
        self._counts.clear()
        self._places.clear()
        self._passes_in_round, self._has_numbers = 0, False

    @property
    def _caller(self) -> str:
        return "the task's train_step" if self.manual is not None else "the task's step"

    def _check_number(self, count: int, position: int) -> None:
        """Check a count that is a number.

        It is assumed to be the count of every micro-batch of the step on every rank: see `MetricAccumulator`.
        """
        if not count > 0:
            raise DdpexpError(
                f"{self._caller} gave the count {count}: a number counts for every micro-batch, and divides the loss",
                suggestion="Return a tensor if a micro-batch may have nothing to count.",
            )
        expected = self._numbers.setdefault(position, count)
        if count != expected:
            gave = "gave update.backward" if self.manual is not None else "returned"
            raise DdpexpError(
                f"{self._caller} {gave} the count {count} after {expected}: a number counts for every micro-batch",
                suggestion="Return a tensor if the count depends on the data.",
            )

    def check(self) -> None:
        """Check what was left to a time when the host waits for the device anyway.

        Raises:
            DdpexpError: counts that are tensors have different totals in one step.
        """
        self._global_counts.check()

    def _scale_by_counts(self) -> None:
        """Rescale the gradient from the global batch size to the total of the counts.

        Ranks: all; communicates.
        """
        counted, data = stack_counts(self._counts, self.world.device), self.strategy.data
        codes = torch.tensor([turn * _MAX_CALLS + position for turn, position in self._places], dtype=torch.float64)
        each = counted.new_zeros(2, data.size, len(counted))
        if data.reports:
            each[:, data.rank] = torch.stack([counted, moved(codes, counted.device)])
        # Every data rank has a slot of its own, so that the sum has the same order everywhere.
        counts, places = self.world.sum(each).flatten(1)
        self.strategy.scale_gradient(self._global_counts.factor(counts, places, self.plan.global_batch_size))
        self._counts.clear()
        self._places.clear()

    def _check_round(self) -> None:
        """Check that a task's `train_step` has gone through all micro-batches, up to `last=True`."""
        if not self._summed:
            raise DdpexpError(
                "the task's train_step calls update.apply before the workers have summed their gradients",
                suggestion="Pass last=True with the last micro-batch of each pass over the batches.",
            )
        if self._passes_in_round % self.plan.gradient_accumulation_steps and self._has_numbers:
            raise DdpexpError(
                f"the task's train_step calls update.apply after {self._passes_in_round} micro-batches, where a step "
                f"has {self.plan.gradient_accumulation_steps}: a count that is a number stands for all of them, so "
                "the gradient would be divided by too much",
                suggestion="Go through all batches, or give update.backward a tensor as the count.",
            )

    def _check_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that gradients come from `backward`."""
        divided = bool(self._counts) or self._has_numbers
        if self.manual is not None and not divided and any(p.grad is not None for p in _parameters(optimizers)):
            raise own_backward(self.manual.train_step)


class _MicroBatch(AbstractContextManager[None]):
    """The context of a micro-batch; a class, because a generator takes four times as long."""

    def __init__(self, step: Step, strategy: AbstractContextManager[None]) -> None:
        self._step = step
        self._strategy = strategy
        self._autocast: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        step = self._step
        step.control.heartbeat()
        fault_point("forward")
        step._begin_micro_batch()
        self._strategy.__enter__()
        if step.precision.lowers:
            self._autocast = step.precision.autocast()
            self._autocast.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._step._inside = False
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        return self._strategy.__exit__(*error)


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
