"""Exact reduction: sums over micro-batches in a fixed order, whichever rank computed which.

The weights are therefore bitwise identical at every number of workers that divides the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.distributed.transfers import is_host, moved
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.strategy.comm.flat import Layout
from ddpexp.strategy.comm.reduce import ALIGNED
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.exact.buffers import BufferDelta, Buffers, BufferSlot, ConstantBuffers, always_summed
from ddpexp.strategy.exact.exchange import OverMemory, exchange_for
from ddpexp.strategy.exact.tree import Partial
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.replica import Models, Replicas, unused
from ddpexp.system.text import first_few


class Exact(Replicas):
    """One replica on this rank, whose gradient is the sum of the gradients of all micro-batches.

    Each micro-batch starts without a gradient, and from the buffers before the step. Its gradient and its changes of
    the buffers are a leaf of the summation tree. After the last micro-batch the ranks exchange their partial sums.

    On GPUs the host waits for the device once per round, and only if several ranks have flags to exchange (for several
    models or `strategy.find_unused_parameters`), or if there are large or complex buffers that do not change.
    """

    def __init__(
        self,
        options: DDPOptions,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        channels_last: bool = False,
        compilation: Compilation | None = None,
        prepare: Callable[[Models], None] = lambda models: None,
        gradient_accumulation_steps: int,
    ) -> None:
        """Build the model on this rank's device, before any optimizer is built.

        `prepare` gets the modules, for example to load weights into them.

        Ranks: all; broadcasts rank zero's weights.
        """
        super().__init__(
            world, factory, channels_last=channels_last, compilation=compilation, sync_batchnorm=options.sync_batchnorm,
            prepare=prepare, shard_optimizer=options.shard_optimizer,
        )  # fmt: skip
        self._world = world
        self._trained = _trained(self.modules)
        self._frozen = [(name, p) for name, _, p in _named(self.modules) if not p.requires_grad]
        self._finds_unused = options.find_unused_parameters
        self._counts = options.find_unused_parameters or len(self.modules) > 1
        self.share_initial_weights(world)
        self._buffers = Buffers(self.modules)
        tensors = [*(p for _, _, p in self._trained), *(slot.start for slot in self._buffers.slots)]
        self._dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        self._micro_batches_per_rank = gradient_accumulation_steps
        self._num_leaves = gradient_accumulation_steps * world.world_size
        num_bytes = sum(tensor.numel() * self._dtype.itemsize + ALIGNED for tensor in tensors)
        self._exchange = exchange_for(self._num_leaves, num_bytes, options, world)
        self.memory = self._exchange.memory if isinstance(self._exchange, OverMemory) else None
        self._done = 0  # micro-batches of this round
        self._use_counts: list[int] = []  # by unit, in how many micro-batches of this round this rank has used it
        self._previous_gradients: dict[nn.Parameter, Tensor] = {}  # of earlier rounds of this step
        num_gradients = sum(p.numel() for _, _, p in self._trained)
        self._lay_out_leaf(always_summed(self._buffers.slots, num_gradients, world.device))

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Return a context for forward and backward of a micro-batch.

        After the last one of a round the parameters have their summed gradients.

        Ranks: all, equally often; communicates after the last one.

        Raises:
            DdpexpError: a parameter has no gradient, a gradient or buffer cannot be summed, or a round has another
            length.
        """
        if self._done == 0:
            self._begin()
        yield
        self._close_leaf()
        if self._done != self._micro_batches_per_rank and (last or self._done > self._micro_batches_per_rank):
            raise DdpexpError(
                f"the task's train_step went through {self._done} micro-batches{' up to last=True' if last else ''}, "
                f"where trainer.reduction=exact sums over {self._micro_batches_per_rank} on each worker: go through "
                "all batches once, and pass last=True with the last of them."
            )
        if last:
            self._end()

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

    @torch.no_grad()
    def _begin(self) -> None:
        self._previous_gradients = {p: p.grad.clone() for _, _, p in self._trained if p.grad is not None}
        self.clear_gradient()
        self._buffers.begin()
        self._delta.begin()
        self._constant.begin()
        self._use_counts = [0] * len(self._units)

    @torch.no_grad()
    def _close_leaf(self) -> None:
        """Move gradients and buffer changes into a leaf; clear the gradients and restore the buffers."""
        leaf = self._partial.room()
        views = self._layout.views(leaf)
        used = self._take_gradients(views)
        self._take_buffers(views)
        if self._counts:
            for unit in used:
                self._use_counts[unit] += 1
            flags = torch.tensor([float(unit in used) for unit in range(len(self._units))], dtype=leaf.dtype)
            views[-1][: len(flags)].copy_(moved(flags, leaf.device))
        self._partial.close(self._world.rank * self._micro_batches_per_rank + self._done)
        self._done += 1

    def _take_gradients(self, views: Sequence[Tensor]) -> set[int]:
        """Move the gradients into a leaf; return which units have any."""
        gradients, targets, empty = [], [], []
        used, missing = set(), []
        for (name, _, p), view, unit in zip(self._trained, views, self._unit_of, strict=False):
            if p.grad is None:
                empty.append(view)
                if p.requires_grad:
                    missing.append((name, unit))
                continue
            if p.grad.layout is not torch.strided:
                raise DdpexpError(
                    f"the gradient of {name} is sparse, and trainer.reduction=exact sums dense ones, of one size in "
                    "every micro-batch. Build the layer with sparse=False, or use trainer.reduction=fast."
                )
            gradients.append(p.grad)
            targets.append(view)
            used.add(unit)
            p.grad = None
        if (
            missing
            and not self._finds_unused
            and (names := [name for name, u in missing if u in used or not self._counts])
        ):
            raise unused(names)
        self._check_frozen()
        if gradients:
            torch._foreach_copy_(targets, gradients)
        if empty:
            torch._foreach_zero_(empty)
        return used

    def _check_frozen(self) -> None:
        for name, p in self._frozen:
            if p.grad is not None:
                raise DdpexpError(
                    f"{name} has a gradient, but was frozen when the model was built, so trainer.reduction=exact does "
                    "not sum it. Build it with requires_grad=True, and freeze it afterwards."
                )

    def _take_buffers(self, views: Sequence[Tensor]) -> None:
        """Move the buffer changes into a leaf, and restore the buffers."""
        self._buffers.check()
        slots = self._delta.slots
        self._delta.write([slot.now() for slot in slots], views[len(self._trained) : -1])
        self._buffers.restore(slots)
        self._constant.take(views[-1][views[-1].numel() - len(self._constant.slots) :])

    @torch.no_grad()
    def _end(self) -> None:
        """Finish the sum over all ranks; assign the gradients and the buffers."""
        self._done = 0
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

    def synced_buffers(self) -> AbstractContextManager[None]:
        """Check the buffers, which are the same on all ranks, before they are evaluated or saved."""
        self._delta.check()
        return super().synced_buffers()

    def _assign_gradients(self, views: Sequence[Tensor], used: Sequence[float]) -> None:
        partly = [name for name, count in zip(self._units, used, strict=True) if 0 < count < self._num_leaves]
        if partly and not self._finds_unused:
            raise DdpexpError(
                f"{first_few(partly)} got gradients in some micro-batches of the step and none in others. If that is "
                "meant, use strategy.find_unused_parameters=true."
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
        for number in range(self._micro_batches_per_rank):
            changes = self._constant.changes(number)
            leaf = partial.room()
            delta.write([changes.get(slot, slot.saved) for slot in delta.slots], layout.views(leaf))
            partial.close(self._world.rank * self._micro_batches_per_rank + number)
        delta.read(self._sum(partial, layout), self._num_leaves)
        delta.check()

    def _sum(self, partial: Partial, layout: Layout) -> list[Tensor]:
        partial_sums = partial.take()
        self._exchange.sum(partial_sums)
        return layout.views(partial_sums[0])


def _trained(models: Models) -> list[tuple[str, str, nn.Parameter]]:
    """Return each trained parameter once, with its name and that of its model."""
    by_id: dict[int, tuple[str, str, nn.Parameter]] = {}
    for name, model, p in _named(models):
        if is_lazy(p):
            raise RefusedError(
                f"{name} has no shape before the first forward pass. Give the layer its sizes for "
                "trainer.reduction=exact."
            )
        if p.is_complex():
            raise RefusedError(
                f"{name} is complex, which trainer.reduction=exact does not sum. Use trainer.reduction=fast."
            )
        if p.requires_grad:
            by_id.setdefault(id(p), (name, model, p))
    return list(by_id.values())


def _named(models: Models) -> Iterator[tuple[str, str, nn.Parameter]]:
    for model, module in models.items():
        for name, p in module.named_parameters():
            yield f"{model}.{name}", model, p
