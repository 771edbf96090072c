"""Optimizer steps in which forward pass, loss and backward pass of a micro-batch are one graph: trainer.compile_step.

The strategy reduces the gradients afterwards, as those of several backward passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.compat import operators
from ddpexp.compat.compiler import on_compiled, prepare_steps
from ddpexp.compat.dispatch import tree_map_only
from ddpexp.errors import RefusedError
from ddpexp.system.fault_injection import fault_point
from ddpexp.task import HasCounts, HasTrainStep, Sums
from ddpexp.train.combined_optimizer import is_sparse
from ddpexp.train.compiled_update import CompiledUpdate, obstacle
from ddpexp.train.losses import PREFIX, combined, pairs_of, tensor_counts
from ddpexp.train.optimizer_step import MicroBatch, Step
from ddpexp.train.run import TrainingRun
from ddpexp.train.task_checks import check_sums, check_unchanged, gradients_of, named
from ddpexp.train.task_step import function_of, global_loss_of
from ddpexp.train.torch_rates import TorchRates
from ddpexp.train.undo import on_copies
from ddpexp.train.whole_graph import KEY, whole_graph

_MODEL_ALONE = "Use trainer.compile=true trainer.compile_step=false, which compiles the model alone."


class CompiledStep(Step):
    """A step whose micro-batches are graphs.

    Attributes:
        compute: Computes a micro-batch.
        parameters: Those that get gradients.
        memory: Makes gradients independent of one another.
        has_counts: Whether the task tells its counts before a forward pass.
    """

    def __init__(self, run: TrainingRun, on_gradients: Callable[[Sequence[Optimizer]], None] | None = None) -> None:
        """Look at the task, the models and torch.

        Raises:
            RefusedError: a graph of a micro-batch is not possible with them.
        """
        check_run(run)
        super().__init__(run, on_gradients)
        trained = (parameter for parameter in run.strategy.parameters() if parameter.requires_grad)
        self.parameters = list(dict.fromkeys(trained))  # a tied one once
        self.memory = _OwnMemory(run.strategy.modules)
        self.has_counts = isinstance(run.task, HasCounts)
        self.compute = whole_graph(_computation(self))
        self._kind = _CompiledMicroBatch
        updates = [_update_of(name, optimizer, run) for name, optimizer in run.optimizers.items()]
        self._update = lambda *_optimizers: run.precision.step(*updates)  # `apply` is called for all of them


class Computed(NamedTuple):
    """The result of the graph of a micro-batch."""

    sums: Sums
    numbers: dict[str, int]  # counts of named losses that are numbers
    gradients: Sequence[Tensor | None]


class _CompiledMicroBatch(MicroBatch):
    """A pass over a micro-batch, whose backward pass is done with its forward pass."""

    _step: CompiledStep

    def forward(self, batch: Any) -> Sums:
        """Return the task's sums, and add the gradients to those of the parameters."""
        step, current = self._step, self._round
        if step.checks and self.number == 0:
            self._check(batch)
        # What tensors count must be known before the backward pass.
        factors = step.loss_counts.from_batches() if step.has_counts else {}
        if self._autocast is None:
            sums, numbers, gradients = step.compute(batch, factors)
        else:
            with torch.autocast(step.run.world.device.type, enabled=False):  # the graph has its own
                sums, numbers, gradients = step.compute(batch, factors)
        gradients = step.memory.separated(gradients, batch)
        for name, count in numbers.items():
            current.add_number(count, PREFIX + name)
            step.loss_counts.numbers.add(PREFIX + name)
        if self._pass == 1:
            for parameter, gradient in zip(step.parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            _add(step.parameters, gradients)
        return sums

    def backward(self, loss_sum: Tensor, count: int | Tensor, name: str = "loss") -> None:
        """Note what the gradients count: they are there already."""
        fault_point("backward")
        current = self._round
        if isinstance(count, Tensor):
            current.add_tensor(count, name, turn=0)
        else:
            current.add_number(count, name)

    def _check(self, batch: Any) -> None:
        """Pass a micro-batch forward as the task is written, without effects: what it returns is checked.

        Raises:
            DdpexpError: it is not what the contract says.
            RefusedError: counts are not known before the backward pass.
        """
        step = self._step
        run, function = step.run, function_of(step.run.task)
        before = gradients_of(step.parameters)
        with on_copies(run.strategy.modules, run.world.device):
            sums = step.task_step(run.strategy.eval_model, batch)
        check_unchanged(before, step.parameters, function)
        check_sums(sums, function, trains=True)
        if len(sums) == 2 and (counts := tensor_counts(sums[0])):
            step.loss_counts.check_equal(batch, counts)
            step.loss_counts.check_names(counts, step.loss_counts.factors(counts))


def check_run(run: TrainingRun) -> None:
    """Check that micro-batches of a run can be graphs.

    Raises:
        RefusedError: the task takes its steps itself, or has a loss over the global batch; gradients would be sparse or
            complex; torch is too old.
    """
    if isinstance(run.task, HasTrainStep):
        raise _refused(
            "decides by itself when gradients are computed, and a graph is of one micro-batch",
            _MODEL_ALONE,
            named(run.task.train_step),
        )
    if (task := global_loss_of(run.task)) is not None:
        raise _refused(
            "is a loss over the global batch, and a graph is of one micro-batch", _MODEL_ALONE, named(task.loss)
        )
    off = "Leave trainer.compile_step=false."
    for model, root in run.strategy.modules.items():
        for name, layer in root.named_modules():
            if is_sparse(layer):
                raise _refused(
                    f"does not support sparse gradients, such as those of {model}.{name}",
                    "Build it with sparse=False, or leave trainer.compile_step=false.",
                )
        for name, parameter in root.named_parameters():
            if parameter.is_complex():
                raise _refused(f"does not support complex gradients, such as that of {model}.{name}", off)
    if not prepare_steps():
        raise _refused(
            f"needs torch 2.13 or later, whose compiler traces torch.autograd.grad, and this is {torch.__version__}",
            _MODEL_ALONE,
        )


def _update_of(name: str, optimizer: Optimizer, run: TrainingRun) -> Any:
    """Return an optimizer with a compiled step, or as it is; the log says why."""
    reason = obstacle(optimizer, isinstance(run.schedule, TorchRates) and run.schedule.cycles)
    if reason is None:
        return CompiledUpdate(optimizer)  # type: ignore[arg-type]
    if run.world.is_rank_zero:
        which = "the optimizer" if len(run.optimizers) == 1 else f"the optimizer {name!r}"
        logging.getLogger("ddpexp").info(
            f"{KEY}=true: the update is not compiled, since {which} ({type(optimizer).__name__}) {reason}"
        )
    return optimizer


def _computation(step: CompiledStep) -> Callable[[Any, Mapping[str, Tensor]], Computed]:
    """Return the function of a micro-batch, and of the factors of its losses, that is compiled."""
    # In variables of their own: at each call torch checks that what the graph was made of is still the same.
    run, model, parameters = step.run, step.run.strategy.eval_model, step.parameters
    task_step, autocast, device = step.task_step, run.precision.autocast, run.world.device
    global_batch_size, num_micro_batches = step.plan.global_batch_size, step.num_micro_batches
    gradient_weight = run.strategy.gradient_weight

    def compute(batch: Any, factors: Mapping[str, Tensor]) -> Computed:
        numbers: dict[str, int] = {}
        with autocast():
            sums = task_step(model, batch)
            if len(sums) == 3:
                loss, count, metrics = sums
            else:
                losses, metrics = sums
                loss, count, metrics = combined(losses, factors), 1, {**metrics, **pairs_of(losses)}
                numbers = {name: one[1] for name, one in losses.items() if not isinstance(one[1], Tensor)}
        # As `MicroBatch.backward` divides it.
        divisor = global_batch_size if isinstance(count, Tensor) else count * num_micro_batches
        dtype = torch.float64 if loss.dtype == torch.float64 else torch.float32
        weight = torch.full((), gradient_weight / divisor, dtype=dtype, device=device)
        if loss.dtype != dtype:
            gradients = torch.autograd.grad(loss * weight, parameters, allow_unused=True)
        else:
            gradients = torch.autograd.grad(loss, parameters, weight, allow_unused=True)
        laid_out = [_laid_out(one, parameter) for one, parameter in zip(gradients, parameters, strict=True)]
        pairs = {name: (_detached(total), _detached(one)) for name, (total, one) in metrics.items()}
        return Computed((loss.detach(), _detached(count), pairs), numbers, laid_out)

    return compute


def _laid_out(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return a gradient whose elements have memory each, in the order of those of the parameter."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device).copy_(
        gradient
    )


class _OwnMemory:
    """Gives each gradient memory of its own, since clipping and sums change it in place.

    Of a + b a graph returns the same tensor twice, and of a * b it may return its input. Which ones is the same in
    every call of a graph, so that it is enough to look where something was compiled.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Watch compilations from now on."""
        self._models = models
        self._is_new = True
        self._shared: set[int] = set()  # the positions of gradients that are copied
        on_compiled(self._note)

    def _note(self, _arguments: Any) -> None:
        self._is_new = True

    def separated(self, gradients: Sequence[Tensor | None], batch: Any) -> Sequence[Tensor | None]:
        """Return the gradients, those that share memory copied."""
        if self._is_new:
            self._look(gradients, batch)
        if not self._shared:
            return gradients
        return [
            gradient.clone() if gradient is not None and position in self._shared else gradient
            for position, gradient in enumerate(gradients)
        ]

    def _look(self, gradients: Sequence[Tensor | None], batch: Any) -> None:
        self._is_new = False
        models = self._models.values()
        seen = {_address(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
        tree_map_only(Tensor, lambda tensor: seen.add(_address(tensor)), batch)
        for position, gradient in enumerate(gradients):
            if gradient is not None and gradient.numel():
                if (address := _address(gradient)) in seen:
                    self._shared.add(position)
                seen.add(address)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@torch.no_grad()
def _add(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to those that parameters have."""
    sums, terms = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            sums.append(parameter.grad)
            terms.append(gradient)
    if sums:
        operators.foreach_add_(sums, terms)


def _refused(reason: str, suggestion: str, place: str | None = None) -> RefusedError:
    return RefusedError(reason, key=KEY, value=True, suggestion=suggestion, place=place)
