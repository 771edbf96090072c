"""The sums of a round: gradients and changes of buffers, over all micro-batches in one tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.compat import operators
from ddpexp.distributed.transfers import is_host, moved
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.strategy.comm.flat import Layout
from ddpexp.strategy.comm.reduce import ALIGNED
from ddpexp.strategy.comm.shared_memory import SharedMemory
from ddpexp.strategy.exact.buffers import BufferDelta, Buffers, BufferSlot, ConstantBuffers, always_summed
from ddpexp.strategy.exact.exchange import OverMemory, exchange_for
from ddpexp.strategy.exact.tree import Partial
from ddpexp.strategy.replica import Models, unused
from ddpexp.system.text import first_few

TrainedParameter: TypeAlias = "tuple[str, str, nn.Parameter]"
"""Its name, the name of its model, and the parameter."""


class Round:
    """Gradients and buffers of this rank's micro-batches, each of which is a leaf of the summation tree.

    Every micro-batch starts without a gradient, and from the buffers before the round. After the last one the ranks
    exchange their partial sums.
    """

    def __init__(
        self,
        models: Models,
        trained: Sequence[TrainedParameter],
        world: World,
        *,
        gradient_accumulation_steps: int,
        reduce_through: str,
        memory: SharedMemory | None = None,
        finds_unused: bool = False,
    ) -> None:
        """Sum the gradients of the parameters `trained`, and all buffers of the models.

        `memory` is what the ranks share already, if they do. Ranks: all; communicates without it.
        """
        self._world = world
        self._trained = trained
        self._summed = [p for _, _, p in trained]
        self._parameters = [p for _, _, p in named_parameters(models)]
        self._frozen = [(name, p) for name, _, p in named_parameters(models) if not p.requires_grad]
        self._finds_unused = finds_unused
        self._counts = bool(trained) and (finds_unused or len(models) > 1)
        self._buffers = Buffers(models)
        tensors = [*(p for _, _, p in trained), *(slot.start for slot in self._buffers.slots)]
        self._dtype = sum_dtype(models)
        self.micro_batches_per_rank = gradient_accumulation_steps
        self._num_leaves = gradient_accumulation_steps * world.world_size
        num_bytes = sum(tensor.numel() * self._dtype.itemsize + ALIGNED for tensor in tensors)
        self.exchange = exchange_for(self._num_leaves, num_bytes, reduce_through, world, memory)
        self.memory = self.exchange.memory if isinstance(self.exchange, OverMemory) else None
        self.done = 0  # micro-batches of this round
        self._use_counts: list[int] = []  # by unit, in how many micro-batches of this round this rank has used it
        self._previous_gradients: dict[nn.Parameter, Tensor] = {}  # of earlier rounds of this step
        num_gradients = sum(p.numel() for _, _, p in trained)
        self._lay_out_leaf(always_summed(self._buffers.slots, num_gradients, world.device))

    def _lay_out_leaf(self, changing: Sequence[BufferSlot]) -> None:
        """Define a leaf: gradients, changes of the buffers that are not constant, and flags.

        There is a flag for each unit (whether it was used) and for each constant buffer (whether it changed). A unit
        gets either all its gradients or none: a model, or with `find_unused_parameters` a parameter.
        """
        self._delta = BufferDelta(changing, self._dtype)
        constant = [slot for slot in self._buffers.slots if slot not in changing]
        self._constant = ConstantBuffers(constant, self._buffers, self._world.device)
        names = [name if self._finds_unused else model for name, model, _ in self._trained]
        numbers: dict[str, int] = {}
        self._unit_of = [numbers.setdefault(name, len(numbers)) for name in names]
        self._units = list(numbers)
        flags = torch.empty((len(self._units) if self._counts else 0) + len(constant))
        self._layout = Layout([*(p for _, _, p in self._trained), *(slot.start for slot in self._delta.slots), flags])
        self._partial = self._new_partial(self._layout)

    def _new_partial(self, layout: Layout) -> Partial:
        return Partial(lambda: torch.zeros(layout.length, dtype=self._dtype, device=self._world.device))

    def begin(self) -> None:
        """Begin a micro-batch."""
        if not self.done:
            self._begin_round()

    @torch.no_grad()
    def _begin_round(self) -> None:
        self._previous_gradients = {p: p.grad.clone() for _, _, p in self._trained if p.grad is not None}
        for p in self._parameters:
            p.grad = None
        self._buffers.begin()
        self._delta.begin()
        self._constant.begin()
        self._use_counts = [0] * len(self._units)

    @torch.no_grad()
    def close_leaf(self, last: bool) -> None:
        """Move gradients and buffer changes into a leaf; clear the gradients and restore the buffers.

        Raises:
            DdpexpError: a parameter has no gradient, a gradient or buffer cannot be summed, or the round has another
            length.
        """
        leaf = self._partial.room()
        views = self._layout.views(leaf)
        used = self._take_gradients(views)
        if self._buffers.slots:
            self._take_buffers(views)
        if self._counts:
            for unit in used:
                self._use_counts[unit] += 1
            flags = torch.tensor([float(unit in used) for unit in range(len(self._units))], dtype=leaf.dtype)
            views[-1][: len(flags)].copy_(moved(flags, leaf.device))
        self._partial.close(self._world.rank * self.micro_batches_per_rank + self.done)
        self.done += 1
        if self.done != self.micro_batches_per_rank and (last or self.done > self.micro_batches_per_rank):
            raise DdpexpError(
                f"the task's train_step went through {self.done} micro-batches{' up to last=True' if last else ''}, "
                f"where trainer.reduction=exact sums over {self.micro_batches_per_rank} on each worker",
                suggestion="Go through all batches once, and pass last=True with the last of them.",
            )

    def _take_gradients(self, views: Sequence[Tensor]) -> set[int]:
        """Move the gradients into a leaf; return which units have any."""
        gradients = {}
        empty = []
        for number, p in enumerate(self._summed):
            if (gradient := p.grad) is None:
                empty.append(number)
                continue
            gradients[number] = gradient
            p.grad = None
        used = {self._unit_of[number] for number in gradients} if empty else set(self._unit_of)
        if empty:
            self._check_missing(empty, used)
            operators.foreach_zero_([views[number] for number in empty])
        if gradients:
            self._check_dense(gradients)
            operators.foreach_copy_([views[number] for number in gradients], list(gradients.values()))
        self._check_frozen()
        return used

    def _check_missing(self, empty: Sequence[int], used: set[int]) -> None:
        if self._finds_unused:
            return
        missing = [
            self._trained[number][0]
            for number in empty
            if self._summed[number].requires_grad and (self._unit_of[number] in used or not self._counts)
        ]
        if missing:
            raise unused(missing)

    def _check_dense(self, gradients: Mapping[int, Tensor]) -> None:
        for number, gradient in gradients.items():
            if gradient.layout is not torch.strided:
                raise DdpexpError(
                    f"the gradient of {self._trained[number][0]} is sparse, and trainer.reduction=exact sums dense "
                    "ones, of one size in every micro-batch",
                    suggestion="Build the layer with sparse=False, or use trainer.reduction=fast.",
                )

    def _check_frozen(self) -> None:
        for name, p in self._frozen:
            if p.grad is not None:
                raise DdpexpError(
                    f"{name} has a gradient, but was frozen when the model was built, so "
                    "trainer.reduction=exact does not sum it",
                    suggestion="Build it with requires_grad=True, and freeze it afterwards.",
                )

    def _take_buffers(self, views: Sequence[Tensor]) -> None:
        """Move the buffer changes into a leaf, and restore the buffers."""
        slots = self._delta.slots
        self._delta.write([slot.now() for slot in slots], views[len(self._trained) : -1])
        self._buffers.restore(slots)
        self._constant.take(views[-1][views[-1].numel() - len(self._constant.slots) :])

    @torch.no_grad()
    def end(self) -> None:
        """Finish the sum over all ranks; assign the gradients and the buffers. Ranks: all; communicates.

        Raises:
            DdpexpError: some micro-batches used a parameter and others did not, or a buffer has no mean.
        """
        self.done = 0
        self._buffers.check()
        views = self._sum(self._partial, self._layout)
        on_host = is_host(self._world.device)
        if not on_host:
            self._delta.check()  # what the round before has left: on a GPU its flag has arrived by now
        self._delta.read(views[len(self._trained) : -1], self._num_leaves)
        if on_host:
            self._delta.check()
        used, changed = self._read_flags(views[-1])
        self._assign_gradients(views, used)
        if changed:
            self._delta.check()
            self._sum_first_changes(changed)
            self._lay_out_leaf([*self._delta.slots, *changed])

    def _read_flags(self, flags: Tensor) -> tuple[Sequence[float], list[BufferSlot]]:
        """Return how many micro-batches have used each unit, and the constant buffers that one has changed.

        The host waits for the device if it does not know the answer.
        """
        if not self._counts:
            used: Sequence[float] = [self._num_leaves] * len(self._units)
        elif self._world.world_size == 1:
            used = self._use_counts
        else:
            used = flags[: len(self._units)].tolist()
        if not self._constant.slots:
            return used, []
        counts = flags[flags.numel() - len(self._constant.slots) :].tolist()
        return used, [slot for slot, count in zip(self._constant.slots, counts, strict=True) if count]

    def check_buffers(self) -> None:
        """Check the buffers that the last round assigned."""
        self._delta.check()

    def _assign_gradients(self, views: Sequence[Tensor], used: Sequence[float]) -> None:
        partly = [name for name, count in zip(self._units, used, strict=True) if 0 < count < self._num_leaves]
        if partly and not self._finds_unused:
            raise DdpexpError(
                f"{first_few(partly)} got gradients in some micro-batches of the step and none in others",
                suggestion="If that is meant, use strategy.find_unused_parameters=true.",
            )
        for (_, _, p), view, unit in zip(self._trained, views, self._unit_of, strict=False):
            previous = self._previous_gradients.get(p)
            if used[unit] and p.requires_grad:
                gradient = view.to(p.dtype)
                p.grad = gradient if previous is None else previous.add_(gradient)
            else:
                p.grad = previous
        self._previous_gradients = {}

    def _sum_first_changes(self, slots: Sequence[BufferSlot]) -> None:
        """Sum the buffers that changed for the first time on some rank, for which the leaves had no room."""
        delta = BufferDelta(slots, self._dtype)
        delta.begin()
        layout = Layout([slot.start for slot in delta.slots])
        partial = self._new_partial(layout)
        for number in range(self.micro_batches_per_rank):
            changes = self._constant.changes(number)
            leaf = partial.room()
            delta.write([changes.get(slot, slot.saved) for slot in delta.slots], layout.views(leaf))
            partial.close(self._world.rank * self.micro_batches_per_rank + number)
        delta.read(self._sum(partial, layout), self._num_leaves)
        delta.check()

    def _sum(self, partial: Partial, layout: Layout) -> list[Tensor]:
        partial_sums = partial.take()
        if layout.length:
            self.exchange.sum(partial_sums)
        return layout.views(partial_sums[0])


def sum_dtype(models: Models) -> torch.dtype:
    """Return the dtype of the sums: float64 if the models train or keep any number in it."""
    tensors: Iterable[Tensor] = [
        tensor
        for module in models.values()
        for tensor in (*module.buffers(), *(p for p in module.parameters() if p.requires_grad))
    ]
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def trained_parameters(models: Models) -> list[TrainedParameter]:
    """Return each trained parameter once, with its name and that of its model.

    Raises:
        RefusedError: one is lazy or complex.
    """
    by_id: dict[int, TrainedParameter] = {}
    for name, model, p in named_parameters(models):
        if is_lazy(p):
            raise RefusedError(
                f"{name} has no shape before the first forward pass",
                suggestion="Give the layer its sizes for trainer.reduction=exact.",
            )
        if p.is_complex():
            raise RefusedError(
                f"{name} is complex, which trainer.reduction=exact does not sum",
                suggestion="Use trainer.reduction=fast.",
            )
        if p.requires_grad:
            by_id.setdefault(id(p), (name, model, p))
    return list(by_id.values())


def named_parameters(models: Models) -> Iterator[TrainedParameter]:
    """Yield each parameter of each model, with its name and that of its model."""
    for model, module in models.items():
        for name, p in module.named_parameters():
            yield f"{model}.{name}", model, p
