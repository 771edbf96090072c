"""A loss over all samples of the global batch, of a task with `embed` and `loss`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddpexp.compat.autograd import version
from ddpexp.compat.modules import BatchNorm
from ddpexp.errors import DdpexpError
from ddpexp.system.text import first_few
from ddpexp.task import HasEmbed, Sums
from ddpexp.train.losses import are_named, combined, pairs_of, tensor_counts
from ddpexp.train.run import TrainingRun
from ddpexp.train.task_checks import check_sums, named, shown
from ddpexp.train.task_step import with_progress
from ddpexp.train.undo import on_copies


class GlobalLoss:
    """The loss of the global batch, of which each micro-batch of a rank has a share with the right gradient.

    The embeddings of all micro-batches are computed without gradients and gathered. Every rank computes the loss of
    all of them, and its slopes. Then each micro-batch passes through the model again, with the same random numbers:
    its embeddings times their slopes have the gradient of the loss, for the memory of one micro-batch. With one
    micro-batch a rank, one pass does for both.
    Source: Gao et al., "Scaling deep contrastive learning batch size under memory limited setup", 2021.
    """

    def __init__(
        self, task: HasEmbed, run: TrainingRun, seed: Callable[[int], None], seed_loss: Callable[[], None]
    ) -> None:
        """Look at the task once, and say what it costs.

        `seed` seeds the random numbers of one of this rank's micro-batches, `seed_loss` those of the loss.

        Raises:
            DdpexpError: several ranks share a micro-batch, or ranks share statistics of several micro-batches.
        """
        self._task = task
        self._run = run
        self._seed = seed
        self._seed_loss = seed_loss
        self._starts_alike = run.options.reduction == "exact"  # each micro-batch, from the buffers before the step
        self._embed = with_progress(task.embed, run.current)
        self._loss = with_progress(task.loss, run.current)
        self._micro_batches: Sequence[Any] = []  # of this rank in the step in progress
        self._known = _Known()
        self._checks = True
        if run.strategy.data.size != run.world.world_size:
            raise DdpexpError(
                "computes a loss over the global batch, and with strategy.tp_size several workers share a micro-batch",
                suggestion="Use strategy.tp_size=1.",
                place=named(task.loss),
            )
        self._check_statistics()

    def _check_statistics(self) -> None:
        """Say how often a micro-batch passes through the model, and on what its normalization depends."""
        run, plan = self._run, self._run.train.plan
        modules = [module for root in run.strategy.modules.values() for module in root.modules()]
        if plan.gradient_accumulation_steps == 1:
            return
        if any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            raise DdpexpError(
                "computes a loss over the global batch of several micro-batches a worker, and SyncBatchNorm has the "
                "statistics of those that workers have at the same time: the loss would depend on their number",
                suggestion=f"Use trainer.micro_batch_size={plan.global_batch_size // plan.data_size}, or BatchNorm or "
                "GroupNorm in its place.",
                place=named(self._task.loss),
            )
        if run.world.is_rank_zero:
            normalizes = any(isinstance(module, BatchNorm) for module in modules)
            logging.getLogger("ddpexp").info(
                f"the loss is that of {plan.global_batch_size:,} samples at once: each of "
                f"{plan.gradient_accumulation_steps} micro-batches of a worker passes through the model twice, first "
                f"without gradients{'; BatchNorm normalizes each micro-batch by itself' if normalizes else ''}"
            )

    def begin(self, micro_batches: Sequence[Any]) -> None:
        """Begin a step."""
        self._checks = not self._micro_batches
        self._micro_batches = micro_batches

    def step(self, model: Any, batch: Any) -> Sums:
        """Return this micro-batch's share of the loss, as the `step` of a task does. Ranks: all; communicates.

        Raises:
            DdpexpError: the task's functions return something else than they should.
        """
        number = next(number for number, other in enumerate(self._micro_batches) if other is batch)
        if number == 0 and len(self._micro_batches) > 1:
            self._known = self._loss_of(model, self._embedded(model))
            self._seed(number)  # the loss may draw random numbers
        returned = self._embed(model, batch)
        own = _tensors(returned, self._task)
        if len(self._micro_batches) == 1:
            self._known = self._loss_of(model, [returned])
        elif self._checks:
            self._check_repeated(own, self._known.embedded[number])
        return self._share(number, own)

    def _embedded(self, model: Any) -> list[Any]:
        """Return what the task's `embed` returns for each micro-batch, from passes without effects."""
        modules, device = self._run.strategy.modules, self._run.world.device
        with torch.no_grad(), on_copies(modules, device):
            returned = []
            for number, batch in enumerate(self._micro_batches):
                self._seed(number)
                with on_copies(modules, device) if self._starts_alike else nullcontext():
                    returned.append(self._embed(model, batch))
        return returned

    def _loss_of(self, model: Any, returned: Sequence[Any]) -> _Known:
        """Compute the loss of all ranks' embeddings, given those of this rank's micro-batches, and its slopes."""
        world = self._run.world
        embedded = [[tensor.detach() for tensor in _tensors(one, self._task)] for one in returned]
        leaves, firsts = [], []
        by_tensor = list(zip(*embedded, strict=True))
        rows_of_ranks = world.rows_of_ranks([sum(map(len, parts)) for parts in by_tensor])
        for parts, rows in zip(by_tensor, rows_of_ranks, strict=True):
            firsts.append(sum(rows[: world.rank]))
            leaf = world.gather(torch.cat(parts), rows)
            leaves.append(leaf.requires_grad_(leaf.is_floating_point()))
        parameters = [p for p in self._run.strategy.parameters() if p.requires_grad]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            self._seed_loss()
            sums = self._called(model, _like(returned[0], iter(leaves)))
            if self._checks:
                check_sums(sums, self._task.loss, trains=True)
            loss, metrics = _mean_of(sums)
            gradients = self._run.precision.gradients(loss, [*inputs, *parameters])
        slopes_of_leaves = iter(gradients)
        slopes = [next(slopes_of_leaves) if leaf.requires_grad else None for leaf in leaves]
        read = [(p, gradient) for p, gradient in zip(parameters, slopes_of_leaves, strict=True) if gradient is not None]
        return _Known(loss.detach(), metrics, list(_cut(slopes, firsts, embedded)), read, embedded)

    def _called(self, model: Any, embeddings: Any) -> Any:
        before = self._versions()
        try:
            sums = self._loss(model, embeddings)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise DdpexpError(
                "reads a parameter of the model, of which strategy=fsdp gives each worker some rows",
                suggestion="Multiply the embeddings by it in the model's forward, or use strategy=ddp.",
                place=named(self._task.loss),
            ) from error
        changed = [name for name, version_of in self._versions().items() if before.get(name) != version_of]
        if changed and self._starts_alike:
            raise DdpexpError(
                f"changes the buffer {first_few(changed)}, and trainer.reduction=exact adds up what all micro-batches "
                "change, so that it would be changed once for each worker",
                suggestion="Use trainer.reduction=fast.",
                place=named(self._task.loss),
            )
        return sums

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Return what tells whether a buffer has changed, by its name; in the first step of a start."""
        modules = self._run.strategy.modules if self._checks else {}
        return {
            f"{model}.{name}": (id(buffer), version(buffer))
            for model, module in modules.items()
            for name, buffer in module.named_buffers()
        }

    def _share(self, number: int, own: Sequence[Tensor]) -> Sums:
        """Return a micro-batch's share of the loss: all shares have its gradient, and the first one its value."""
        known, divisor = self._known, len(self._micro_batches) * self._run.world.world_size  # of the loop
        is_first = float(number == 0 and self._run.world.is_rank_zero)
        pairs = [
            (tensor, slope)
            for tensor, slope in zip(own, known.slopes[number], strict=True)
            if slope is not None and tensor.requires_grad
        ]
        pairs += [(parameter, gradient * is_first) for parameter, gradient in known.parameters]
        if not pairs:
            raise DdpexpError("returned nothing that requires a gradient", place=named(self._task.embed))
        tensors, slopes = zip(*pairs, strict=True)
        value = _WithSlopes.apply(known.value, is_first * divisor, slopes, divisor, *tensors)  # type: ignore[no-untyped-call]
        return value, 1, {name: (total * is_first, n * is_first) for name, (total, n) in known.metrics.items()}

    def _check_repeated(self, own: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        rtol = 5e-2 if self._run.precision.lowers else 1e-3
        for tensor, other in zip(own, before, strict=True):
            if tensor.shape != other.shape or not torch.allclose(tensor, other, rtol, rtol / 100, equal_nan=True):
                raise DdpexpError(
                    "returned other values for the same micro-batch, weights and random numbers: the loss over the "
                    "global batch takes its slopes from a first pass and its gradient from a second one",
                    suggestion="Let it depend on nothing else: not on attributes that it sets, on buffers that loss "
                    "changes, or on a generator of its own.",
                    place=named(self._task.embed),
                )


class _WithSlopes(torch.autograd.Function):
    """A value whose gradient with respect to some tensors is known; both times a factor."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, factor: float, slopes: Sequence[Tensor], factor_of_slopes: int, *tensors: Tensor
    ) -> Tensor:
        """Return the value."""
        ctx.slopes, ctx.factor = slopes, factor_of_slopes
        return value * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the slopes, which autograd brings into the precision of the tensors."""
        gradient = gradient * ctx.factor
        return None, None, None, None, *[slope * gradient for slope in ctx.slopes]


@dataclass(frozen=True)
class _Known:
    """The loss of the global batch in the step in progress."""

    value: Tensor = field(default_factory=lambda: torch.zeros(()))
    metrics: Mapping[str, Any] = field(default_factory=dict)  # sums and counts
    slopes: Sequence[Sequence[Tensor | None]] = ()  # for each micro-batch, of each of its embeddings
    parameters: Sequence[tuple[Tensor, Tensor]] = ()  # that the loss itself reads, with their gradients
    embedded: Sequence[Sequence[Tensor]] = ()  # for each micro-batch, from the first pass


def _mean_of(sums: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of the global batch, and the sums and counts that are recorded beside it."""
    losses, metrics = (sums[0], {**sums[1], **pairs_of(sums[0])}) if are_named(sums) else ({"": sums[:2]}, sums[2])
    counts = tensor_counts(losses)
    factors = {name: torch.where(count != 0, 1 / count.double(), 0.0) for name, count in counts.items()}
    return combined(losses, factors), {name: (_number(total), _number(n)) for name, (total, n) in metrics.items()}


def _number(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _cut(
    slopes: Sequence[Tensor | None], firsts: Sequence[int], embedded: Sequence[Sequence[Tensor]]
) -> Iterator[list[Tensor | None]]:
    """Yield the slopes of each of this rank's micro-batches, whose rows begin at `firsts`."""
    begins = list(firsts)
    for parts in embedded:
        cut = []
        for position, (slope, part) in enumerate(zip(slopes, parts, strict=True)):
            begin = begins[position]
            cut.append(None if slope is None else slope[begin : begin + len(part)])
            begins[position] = begin + len(part)
        yield cut


def _tensors(returned: Any, task: HasEmbed) -> list[Tensor]:
    """Return the tensors that `embed` has returned.

    Raises:
        DdpexpError: it is something else than tensors with a row for each sample.
    """
    values = [returned]
    if isinstance(returned, tuple | list | Mapping):
        values = list(returned.values() if isinstance(returned, Mapping) else returned)
    for value in values or [None]:
        if not isinstance(value, Tensor) or not value.dim():
            raise DdpexpError(
                f"returned {shown(value)}, where a tensor with a row for each sample belongs, or a tuple or mapping of "
                "such tensors",
                place=named(task.embed),
            )
    return values


def _like(returned: Any, tensors: Iterator[Tensor]) -> Any:
    """Return tensors in the form in which `embed` returns them."""
    if isinstance(returned, Tensor):
        return next(tensors)
    if isinstance(returned, Mapping):
        return {name: next(tensors) for name in returned}
    return tuple(tensors)
