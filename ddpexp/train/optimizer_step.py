"""An optimizer step in progress: what the run loop, a strategy and a task's own `train_step` work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpexp.compat.autograd import call_after_backward
from ddpexp.distributed.phases import BACKWARD, COLLECTIVE, FORWARD, OTHER, UPDATE
from ddpexp.distributed.rng import LOSS, MODEL, OPTIMIZER, MicroBatchSeeds, seed_everything, seed_of, seeder
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.replica import clip_values
from ddpexp.system.fault_injection import fault_point
from ddpexp.task import HasTrainStep, NamedSums, Sums
from ddpexp.train.counts import GlobalCounts
from ddpexp.train.freezing import LateStarts
from ddpexp.train.global_loss import GlobalLoss
from ddpexp.train.loss_counts import LossCounts
from ddpexp.train.losses import PREFIX, combined, pairs_of, tensor_counts
from ddpexp.train.passes import passes
from ddpexp.train.round import Round
from ddpexp.train.run import TrainingRun
from ddpexp.train.task_checks import (
    check_loss,
    check_names,
    check_sums,
    check_unchanged,
    gradients_of,
    named,
    own_backward,
)
from ddpexp.train.task_step import function_of, global_loss_of, wants_progress
from ddpexp.train.undo import Undo


class Step:
    """The optimizer step in progress; implements `ddpexp.task.OptimizerStep`.

    A step consists of rounds: micro-batches add gradients, and one or several calls of `apply` use them. The gradients
    are cleared when the next round begins, or when the step ends.

    Attributes:
        step: The number of this step. Units: steps, from 0.
        norms: The gradient norms of the last step, before clipping; see `apply`.
        moved: Whether an optimizer has changed parameters in the last step.
        models: The wrapped module that the task trains, or the mapping of modules.
        heartbeat: Tells the supervisor of progress within the step.
        autocasts: Whether the forward pass has another precision.
        manual: The task, if it has a `train_step` of its own.
        marks_wait: Whether a backward pass marks where DDP waits for the sums of gradients.
        checks: Whether this is the first step of a start, in which the task is checked.
        loss_counts: The counts of several losses over the global batch.
        times: Where the time of the step goes.
        micro_batch_in_progress: The micro-batch whose forward or backward pass is in progress.
    """

    def __init__(self, run: TrainingRun, on_gradients: Callable[[Sequence[Optimizer]], None] | None = None) -> None:
        """Look at the task and the optimizers once: the checks are slow.

        `on_gradients` is called before optimizers use the gradients.
        """
        self.run = run
        self.step = 0
        self.norms: dict[str, Tensor] = {}
        self.moved = False
        self.times = run.world.times
        self.manual = run.task if isinstance(run.task, HasTrainStep) else None
        self.checks = True
        run.strategy.has_single_passes = self.manual is None
        self.marks_wait = self.manual is None and run.strategy.waits_in_backward
        self.micro_batch_in_progress: MicroBatch | None = None
        self.plan = run.train.plan
        self.turn_length = self.plan.gradient_accumulation_steps  # micro-batches of this rank
        self.num_micro_batches = self.turn_length * self.plan.data_size  # of the global batch
        self._first = self.turn_length * run.strategy.data.rank  # of this rank in the global batch
        self._seed = run.options.seed
        seeds = MicroBatchSeeds(self._seed, MODEL, range(self._first, self._first + self.turn_length))
        self._seeds_from = seeds.from_step
        self._seeds = seeds.of_steps(0, 1)[0]  # of the micro-batches of this step
        self._next_seeds = seeds.from_step(1)
        self.heartbeat = run.control.status.heartbeat
        self.autocasts = run.precision.lowers
        self.models = run.strategy.train_model
        self._seed_torch = seeder(run.world.device)
        self._undo = Undo(run.strategy.modules) if run.precision.skips else None
        self._caller = "the task's step" if self.manual is None else "the task's train_step"  # for errors
        self._global_counts = GlobalCounts(self._caller)
        self.loss_counts = LossCounts(run, self._seed_in_turn)
        task: Any = run.task
        has_step = hasattr(task, "step")
        self.task_step: Any = run.task_step if has_step else partial(_without_step, task)
        self._global_loss: GlobalLoss | None = None
        self._preparations: list[Callable[[list[Any]], None]] = []  # before the strategy's part of a step
        self._before_update: list[Callable[[Sequence[Optimizer]], None]] = []  # when the gradients are complete
        if (has_step or global_loss_of(task) is not None) and wants_progress(task):
            self._preparations.append(lambda _: run.current.set(self.step))
        if Compilation.records_graphs(run.options):
            # Once a step: torch would let each micro-batch overwrite the gradients that the ones before have left in
            # the memory of its graphs. Source: https://github.com/pytorch/pytorch/issues/169545
            self._preparations.append(lambda _: torch.compiler.cudagraph_mark_step_begin())  # type: ignore[no-untyped-call]
        if self.loss_counts.is_early:
            self._preparations.append(self.loss_counts.add_up)
        if self.manual is None and not has_step:
            self._preparations.append(self._begin_global_loss)
            self._begin_global_loss([])  # what a start refuses, it refuses before the first step
        self._names = tuple(run.optimizers)
        self._optimizers = list(run.optimizers.values())
        late_starts = LateStarts.of(run.options, run.strategy.modules, run.strategy.single)
        if late_starts.entries:
            self._preparations.append(lambda _: late_starts.report(self.step))
            self._before_update.append(lambda _: late_starts.drop_gradients(self.step))
        if not all(type(optimizer).__module__.startswith("torch.optim.") for optimizer in self._optimizers):
            self._before_update.append(self._seed_optimizers)  # which may draw random numbers; torch's own do not
        if run.precision.skips:
            self._before_update.append(lambda optimizers: run.precision.unscale(*optimizers))
        if on_gradients is not None:
            self._before_update.append(on_gradients)
        self._clips = run.options.clip_grad_norm is not None or run.options.clip_grad_value is not None
        seeds_host = run.options.reduction == "exact" or run.strategy.data.size < run.world.world_size
        self._seed_all = self._seed_host_and_torch if seeds_host else self._seed_torch
        self.loss_weights: dict[tuple[int, torch.dtype], Tensor] = {}  # by the total and the type of the loss
        self._with_norm = False
        self._num_micro_batches = 0  # of this step so far
        self._round = Round(self._caller)
        self._kind: type[MicroBatch] = MicroBatch
        self._update: Callable[..., bool] = run.precision.step

    @property
    def num_steps(self) -> int:
        """Return the number of steps of the whole run."""
        return self.run.num_steps

    @property
    def world(self) -> World:
        """Return rank, device and collectives."""
        return self.run.world

    def take(self, step: int, micro_batches: list[Any], with_norm: bool) -> list[Sums]:
        """Do one optimizer step; return the sums of each micro-batch, or those of a manual task's whole step.

        `norms` holds what is recorded if it is computed `with_norm`; otherwise what clipping has computed, if anything.

        Units: steps, from 0. Ranks: all; communicates.

        Raises:
            DdpexpError: gradients that no optimizer has used.
        """
        if step != self.step + 1:
            self._next_seeds = self._seeds_from(step)
        self.step = step
        self._seeds = next(self._next_seeds)
        self.norms = {}
        self.moved = False
        self._with_norm = with_norm
        self._num_micro_batches = 0
        self.loss_counts.micro_batches = micro_batches
        for prepare in self._preparations:
            prepare(micro_batches)
        if self.manual is None:
            sums = self.run.strategy.train_step(self, micro_batches)
        else:
            sums = self._take_manually(self.manual, micro_batches)
        self.checks = False
        if self._round.begun:
            self._end_round()
        return sums

    def _take_manually(self, task: HasTrainStep, micro_batches: list[Any]) -> list[Sums]:
        sums = task.train_step(self, micro_batches)
        if self.checks:
            check_sums(sums, task.train_step, trains=False)
        if self._round.has_counts and not self._round.applied:
            raise DdpexpError(
                "the task's train_step calls backward without a later update.apply: its gradients are lost",
                suggestion="Call update.apply() for the optimizers that are to use them.",
            )
        return [sums]

    def micro_batch(self, last: bool) -> MicroBatch:
        """Return the next micro-batch, whose context encloses its forward and backward passes.

        The last one reduces the gradient. The forward pass runs in the precision of the run. Random numbers inside are
        a function of seed, step and micro-batch, independent of earlier draws. Ranks: all, equally often; communicates
        in the last one.
        """
        number = self._num_micro_batches
        self._num_micro_batches = number + 1
        return self._kind(self, number, bool(last))

    def backward(self, micro_batches: Sequence[Any]) -> Sums:
        """Go through the micro-batches as without a `train_step`; return their sums. Ranks: all; communicates.

        Raises:
            DdpexpError: there are none.
        """
        if not micro_batches:
            raise DdpexpError(
                "the task's train_step gives update.backward no micro-batches",
                suggestion="Give it the batches that train_step gets.",
            )
        if global_loss_of(self.run.task) is not None:
            self._begin_global_loss(micro_batches)
        self.loss_counts.micro_batches = micro_batches
        self.loss_counts.is_ordered = True
        sums = passes(self, micro_batches)
        self.loss_counts.is_ordered = False
        return sums

    def _begin_global_loss(self, micro_batches: Sequence[Any]) -> None:
        if self._global_loss is None:
            task: Any = self.run.task
            self._global_loss = GlobalLoss(task, self.run, self._seed_in_turn, self._seed_loss)
            self.task_step = self._global_loss.step
        self._global_loss.begin(micro_batches)

    def begin_pass(self, last: bool) -> Round:
        """Begin a pass over a micro-batch; return the round that it belongs to."""
        current = self._round
        if current.applied:
            self._end_round()
            current = self._round
        begun = current.begun
        if not begun:
            if self._undo is not None:
                self._undo.take()
        elif not begun % self.turn_length:
            current.begin_turn()
        current.begun = begun + 1
        current.is_reduced = last
        return current

    def _end_round(self) -> None:
        if self._undo is not None:
            self.run.precision.update()
        self.run.strategy.clear_gradient()
        self._round = Round(self._caller)

    def seed(self, number: int) -> None:
        """Seed the random numbers of a micro-batch of this step; a manual task may take several turns through them."""
        if number < self.turn_length:
            value = self._seeds[number]
        else:
            turn, position = divmod(number, self.turn_length)
            value = seed_of(self._seed, MODEL, self.step, turn * self.num_micro_batches + self._first + position)
        self._seed_all(value)

    def _seed_host_and_torch(self, value: int) -> None:
        seed_everything(value)
        self._seed_torch(value)

    def _seed_in_turn(self, position: int) -> None:
        """Seed the random numbers of a micro-batch of the turn in progress. Units: from 0, of this rank."""
        assert self.micro_batch_in_progress is not None
        current = self.micro_batch_in_progress.number
        self.seed(current - current % self.turn_length + position)

    def _seed_optimizers(self, _: Sequence[Optimizer]) -> None:
        self._seed_torch(seed_of(self._seed, OPTIMIZER, self.step, 0))

    def _seed_loss(self) -> None:
        """Seed the random numbers of a loss over the global batch, which all ranks draw alike."""
        self._seed_torch(seed_of(self._seed, LOSS, self.step, 0))

    def add_loss_weight(self, total: int, dtype: torch.dtype) -> Tensor:
        """Return the factor of a loss that is divided by `total`, on the device, and remember it."""
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        weight = torch.tensor(self.run.strategy.gradient_weight / total, dtype=kind, device=self.run.world.device)
        self.loss_weights[total, dtype] = weight
        return weight

    def mark_wait_after_backward(self, _gradient: Tensor) -> None:
        """In the backward pass that begins, mark where DDP waits for the sums of gradients."""
        call_after_backward(lambda: self.times.begin(COLLECTIVE))

    def apply(self, *names: str) -> bool:
        """Step the named optimizers, or all of them, with the gradients of this round; return whether they stepped.

        Several calls may use the same gradients. The norm of those that a call uses is kept in `norms`, under `/a+b`
        for the optimizers a and b, and under the empty text for all.

        All gradients are cleared before the next round, also those of other parameters: gradients that the loss of one
        network leaves in another must not reach that network's next step.
        Ranks: all; communicates only if the task's counts are tensors, in the first call of a round.

        Raises:
            DdpexpError: called inside of a micro-batch; the workers have not summed the gradients; an optimizer does
            not exist, or has already used these gradients.
        """
        self.times.begin(UPDATE)
        used = self._round
        if self.manual is not None or self.micro_batch_in_progress is not None:
            self._check_complete(used)
        chosen, optimizers = self._names, self._optimizers
        if names or used.applied:
            chosen = names or self._names
            check_names(chosen, used.applied, self.run.optimizers)
            optimizers = [self.run.optimizers[name] for name in chosen]
        if self.checks and not used.applied:
            self._check_gradients(used, optimizers)
        if used.tensors:
            self._scale_by_counts(used)
        for prepare in self._before_update:
            prepare(optimizers)
        if self._clips or self._with_norm:
            self._clip(optimizers, "" if len(chosen) == len(self._names) else f"/{'+'.join(chosen)}")
        used.applied += chosen
        if self._update(*optimizers):
            stepped = self.moved = True
        else:
            stepped = False
            if self._undo is not None:
                self._undo.restore()
        self.times.begin(OTHER)
        return stepped

    def _clip(self, optimizers: Sequence[Optimizer], suffix: str) -> None:
        """Clip the gradients as configured, and note their norm under the suffix if there is one or it is wanted."""
        options, strategy = self.run.options, self.run.strategy
        if options.clip_grad_norm is not None:
            norm = strategy.clip(_parameters(optimizers), options.clip_grad_norm)
            self.norms[suffix] = strategy.norm_to_record(norm) if self._with_norm else norm
        elif self._with_norm:
            self.norms[suffix] = strategy.gradient_norm(_parameters(optimizers))
        if options.clip_grad_value is not None:
            clip_values(_parameters(optimizers), options.clip_grad_value)

    def check(self) -> None:
        """Check what was left to a time when the host waits for the device anyway.

        Raises:
            DdpexpError: counts that are tensors have different totals in one step.
        """
        self._global_counts.check()

    def _scale_by_counts(self, used: Round) -> None:
        """Rescale the gradient from the global batch size to the total of the counts.

        Ranks: all; communicates.
        """
        every = used.gathered_counts(self.run.strategy.data, self.run.world)
        self.run.strategy.scale_gradient(self._global_counts.factor(*every, self.plan.global_batch_size))
        used.tensors.clear()

    def _check_complete(self, used: Round) -> None:
        """Check that `apply` is called after a task has gone through all micro-batches, up to `last=True`."""
        if self.micro_batch_in_progress is not None:
            raise DdpexpError(
                "the task's train_step calls update.apply inside of `with update.micro_batch(last):`, at "
                "whose end the workers sum their gradients: the optimizer would see the gradients of this worker alone",
                suggestion="Call it after that block.",
            )
        if not used.is_reduced:
            raise DdpexpError(
                "the task's train_step calls update.apply before the workers have summed their gradients",
                suggestion="Pass last=True with the last micro-batch of each pass over the batches.",
            )
        if used.begun % self.turn_length and used.has_numbers:
            raise DdpexpError(
                f"the task's train_step calls update.apply after {used.begun} micro-batches, where a step "
                f"has {self.turn_length}: a count that is a number stands for all of them, so "
                "the gradient would be divided by too much",
                suggestion="Go through all batches, or give backward a tensor as the count.",
            )

    def _check_gradients(self, used: Round, optimizers: Sequence[Optimizer]) -> None:
        """Check that gradients come from `MicroBatch.backward`."""
        if self.manual is not None and not used.has_counts and any(p.grad is not None for p in _parameters(optimizers)):
            raise own_backward(self.manual.train_step)


class MicroBatch(AbstractContextManager["MicroBatch"]):
    """The context of the passes over a micro-batch; implements `ddpexp.task.MicroBatch`.

    Entered again it is another pass, with the same random numbers. A class, because a generator takes four times as
    long.

    Attributes:
        number: The position among this rank's micro-batches of the step. Units: from 0.
    """

    _round: Round  # of the pass that began last
    _pass: int  # its number in the round. Units: from 1
    _num_losses: int  # calls of `backward` in the pass in progress
    _strategy: AbstractContextManager[None]
    _autocast: AbstractContextManager[object] | None = None

    def __init__(self, step: Step, number: int, last: bool) -> None:
        """Stand for a micro-batch of a step; the `last` one of a round reduces the gradients."""
        self.number = number
        self._step = step
        self._last = last

    def __enter__(self) -> MicroBatch:
        """Begin a pass: forward and backward."""
        step = self._step
        step.heartbeat()
        fault_point("forward")
        step.times.begin(FORWARD)
        self._round = current = step.begin_pass(self._last)
        self._pass = current.begun
        self._num_losses = 0
        step.seed(self.number)
        step.micro_batch_in_progress = self
        self._strategy = strategy = step.run.strategy.micro_batch(self._last)
        strategy.__enter__()
        if step.autocasts:
            self._autocast = step.run.precision.autocast()
            self._autocast.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        """End the pass; the last one of a round reduces the gradients. Ranks: all; communicates in the last one."""
        self._step.micro_batch_in_progress = None
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        return self._strategy.__exit__(*error)

    def repeat(self, last: bool) -> MicroBatch:
        """Return a further pass over this micro-batch, with the same random numbers: see `ddpexp.task.MicroBatch`."""
        return MicroBatch(self._step, self.number, bool(last))

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Return a context for a backward pass after the block of the micro-batch has ended.

        For a pipeline, which begins further micro-batches before that; inside there is one call of `backward`.
        """
        self._step.heartbeat()
        self._num_losses = 0
        self._step.micro_batch_in_progress = self
        yield
        self._step.micro_batch_in_progress = None

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Return a context for a further forward pass, which draws the random numbers of the first."""
        with self.backward_pass(), self._step.run.precision.autocast():
            self._step.seed(self.number)
            yield

    def forward(self, batch: Any) -> Sums:
        """Return the task's sums for the micro-batch; the sums of the first step are checked."""
        step = self._step
        sums = self._checked_sums(batch) if step.checks else step.task_step(step.models, batch)
        return sums if len(sums) == 3 else self._combined(sums)

    def _checked_sums(self, batch: Any) -> Any:
        step, run = self._step, self._step.run
        before = gradients_of(run.strategy.parameters())
        sums = step.task_step(step.models, batch)
        check_unchanged(before, run.strategy.parameters(), function_of(run.task))
        check_sums(sums, function_of(run.task), trains=True)
        if len(sums) == 2:
            step.loss_counts.check_equal(batch, tensor_counts(sums[0]))
        return sums

    def _combined(self, sums: NamedSums) -> Sums:
        """Return one loss that stands for several, with a count of 1, and each of them among the metrics.

        Ranks: all; communicates if a total is not known yet.
        """
        losses, metrics = sums
        current, loss_counts = self._round, self._step.loss_counts
        counts = tensor_counts(losses)
        if counts and not current.factors:
            current.factors = loss_counts.factors(counts)
        loss_counts.check_names(counts, current.factors)
        for name, loss in losses.items():
            if name not in counts:
                current.add_number(loss[1], PREFIX + name)  # type: ignore[arg-type]
                loss_counts.numbers.add(PREFIX + name)
        return combined(losses, current.factors), 1, {**metrics, **pairs_of(losses)}

    def backward(self, loss_sum: Tensor, count: int | Tensor, name: str = "loss") -> None:
        """Add the gradient of `loss_sum / (count over the global batch)`: see `ddpexp.task.MicroBatch`. Ranks: all.

        Raises:
            DdpexpError: called outside of the micro-batch; a count is 0 or changes; numbers are mixed with tensors.
        """
        fault_point("backward")
        step = self._step
        step.times.begin(BACKWARD)
        if step.micro_batch_in_progress is not self:
            raise DdpexpError(
                "the task's train_step calls backward outside of `with update.micro_batch(last):`, at whose "
                "end the workers sum their gradients: this call belongs to no micro-batch",
                suggestion="Enclose it.",
            )
        if step.checks and step.manual is not None:
            check_loss(loss_sum, count, step=step.manual.train_step)
        current = self._round
        self._num_losses = position = self._num_losses + 1
        if position > 1 and name == "loss":
            name = f"loss {position}"
        if isinstance(count, Tensor):
            current.add_tensor(count.detach(), name, turn=(self._pass - 1) // step.turn_length)
            total = step.plan.global_batch_size  # provisional: see Step._scale_by_counts
        else:
            current.add_number(count, name)
            total = count * step.num_micro_batches
        weight = step.loss_weights.get((total, loss_sum.dtype))
        if weight is None:
            weight = step.add_loss_weight(total, loss_sum.dtype)
        if self._last and step.marks_wait:
            loss_sum.register_hook(step.mark_wait_after_backward)  # type: ignore[no-untyped-call]
        step.run.precision.backward(loss_sum, weight)


def _without_step(task: HasTrainStep, model: Any, batch: Any) -> Sums:
    raise DdpexpError(
        "calls update.backward or micro_batch.forward, which call the task's step, and the task has none",
        suggestion="Add step(self, model, batch), or compute the loss in train_step and give it to "
        "micro_batch.backward. A loss over the global batch, of embed and loss, needs update.backward.",
        place=named(task.train_step),
    )


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
