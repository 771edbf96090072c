"""Exact reduction: the sum over micro-batches in one order, whichever rank computed which.

So the weights are the same to the bit at every number of workers that divides the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.strategy.comm.flat import Layout
from ddpexp.strategy.comm.reduce import ALIGNED
from ddpexp.strategy.exact.buffers import BufferDelta, Buffers, Place
from ddpexp.strategy.exact.exchange import OverMemory, exchange_for
from ddpexp.strategy.exact.tree import Partial
from ddpexp.strategy.options import Options
from ddpexp.strategy.replica import Models, Replica, check_same_models, listed, take_rank_zeros, unused


class Exact:
    """One replica on this rank, whose gradient is the sum of every micro-batch's own.

    A micro-batch starts without gradient and from the buffers as they were before the step. What it leaves, gradient
    and change of buffers, is a leaf of the tree. When the last one is done, the ranks exchange what they have summed.

    On GPUs the host waits for the device once a round where there is something to agree on: several models,
    `strategy.find_unused_parameters`, buffers of whole numbers; and once a micro-batch for each buffer that is
    constant.
    """

    def __init__(
        self,
        options: Options,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        channels_last: bool = False,
        compile: bool = False,
        prepare: Callable[[Models], None] = lambda models: None,
        gradient_accumulation_steps: int,
    ) -> None:
        """Build the model on this rank's device, before any optimizer is made.

        `prepare` sees it then, to load weights into it.

        Ranks: all; communicates rank zero's weights to the others.
        """
        self._replica = Replica.build(
            options, world, factory, channels_last=channels_last, compile=compile, prepare=prepare
        )
        self.single, self.modules = self._replica.single, self._replica.modules
        self.gradient_weight = 1.0
        self._world = world
        self._parameters = _trained(self.modules)
        self._frozen = [(name, p) for name, _, p in _named(self.modules) if not p.requires_grad]
        self._finds_unused = options.find_unused_parameters
        self._counts = options.find_unused_parameters or len(self.modules) > 1
        if world.world_size > 1:
            check_same_models(self.modules, world)
            own = [tensor for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers())]
            take_rank_zeros([tensor.detach() for tensor in own], world)
        self._buffers = Buffers(self.modules)
        tensors = [*(p for _, _, p in self._parameters), *(place.start for place in self._buffers.places)]
        self._dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        self._each = gradient_accumulation_steps
        self._num_leaves = gradient_accumulation_steps * world.world_size
        num_bytes = sum(tensor.numel() * self._dtype.itemsize + ALIGNED for tensor in tensors)
        self._exchange = exchange_for(self._num_leaves, num_bytes, options, world)
        self.memory = self._exchange.memory if isinstance(self._exchange, OverMemory) else None
        self._done = 0  # micro-batches of this round
        self._earlier: dict[nn.Parameter, Tensor] = {}  # gradients that earlier rounds of the step have left
        self._late: list[
            dict[Place, Tensor]
        ] = []  # what the round's micro-batches have made of buffers that stood still so far
        self._arrange([])

    @property
    def train_model(self) -> Any:
        """Return what a task's training step calls: the module, compiled or not, or the mapping of them."""
        return self._replica.of(self._replica.compiled)

    @property
    def eval_model(self) -> Any:
        """Return the bare module, or the mapping of them."""
        return self._replica.of(self.modules)

    def train(self, mode: bool) -> None:
        """Switch every module between training and evaluation."""
        for module in self._replica.compiled.values():
            module.train(mode)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Enclose forward and backward of a micro-batch.

        After the last one of a round the parameters have their gradients.

        Ranks: all, equally often; communicates after the last one.

        Raises:
            DdpexpError: a parameter without a gradient, a gradient or a buffer that cannot be summed, a round of
            another length.
        """
        if self._done == 0:
            self._begin()
        yield
        self._close_leaf()
        if self._done != self._each and (last or self._done > self._each):
            raise DdpexpError(
                f"the task's train_step went through {self._done} micro-batches{' up to last=True' if last else ''}, "
                f"where trainer.reduction=exact sums over {self._each} on each worker: go through all batches once, "
                "and say last=True with the last of them."
            )
        if last:
            self._end()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every module."""
        yield from self._replica.parameters

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, on the device. Ranks.

        The same value on all, without communication.
        """
        return self._replica.gradient_norm(parameters)

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Scale the gradient down to `limit` and return its norm before that."""
        return self._replica.clip(parameters, limit)

    def clear_gradient(self) -> None:
        """Forget every gradient."""
        self._replica.clear_gradient()

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient in place."""
        self._replica.scale_gradient(factor)

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Give the bare model in evaluation mode; its buffers are the same on every rank anyway."""
        self.train(False)
        try:
            yield self.eval_model
        finally:
            self.train(True)

    def synced_buffers(self) -> AbstractContextManager[None]:
        """Do nothing: every rank's buffers are rank zero's."""
        return nullcontext()

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return no buffers: every rank's are the same."""
        return {}

    def _arrange(self, moving: Sequence[Place]) -> None:
        """Lay a leaf out: gradients, changes of the buffers that move, and flags.

        Which units were used, which buffers moved first.

        A unit is what has gradients altogether or not at all: a model, or with `find_unused_parameters` a parameter.
        """
        self._movement = BufferDelta(moving, self._dtype)
        self._still = [place for place in self._buffers.places if place not in moving]
        names = [name if self._finds_unused else model for name, model, _ in self._parameters]
        numbers: dict[str, int] = {}
        self._unit_of = [numbers.setdefault(name, len(numbers)) for name in names]
        self._units = list(numbers)
        flags = torch.empty((len(self._units) if self._counts else 0) + len(self._still))
        self._layout = Layout(
            [*(p for _, _, p in self._parameters), *(one.start for one in self._movement.places), flags]
        )
        self._partial = self._sums(self._layout)

    def _sums(self, layout: Layout) -> Partial:
        return Partial(lambda: torch.zeros(layout.length, dtype=self._dtype, device=self._world.device))

    @torch.no_grad()
    def _begin(self) -> None:
        self._earlier = {p: p.grad.clone() for _, _, p in self._parameters if p.grad is not None}
        self._replica.clear_gradient()
        self._buffers.begin()
        self._movement.begin()
        self._late.clear()

    @torch.no_grad()
    def _close_leaf(self) -> None:
        """Take gradients and buffers as a leaf; leave no gradient, and the buffers as they were."""
        leaf = self._partial.room()
        views = self._layout.views(leaf)
        used = self._take_gradients(views)
        late = self._take_buffers(views)
        if views[-1].numel():
            flags = [float(unit in used) for unit in range(len(self._units))] if self._counts else []
            views[-1].copy_(torch.tensor(flags + [float(place in late) for place in self._still]))
        self._late.append(late)
        self._partial.close(self._world.rank * self._each + self._done)
        self._done += 1

    def _take_gradients(self, views: Sequence[Tensor]) -> set[int]:
        """Move the gradients into a leaf, and return which units have any."""
        gradients, places, empty = [], [], []
        used, missing = set(), []
        for (name, _, p), view, unit in zip(self._parameters, views, self._unit_of, strict=False):
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
            places.append(view)
            used.add(unit)
            p.grad = None
        if (
            missing
            and not self._finds_unused
            and (names := [name for name, u in missing if u in used or not self._counts])
        ):
            raise unused(names)
        self._check_still_frozen()
        if gradients:
            torch._foreach_copy_(places, gradients)
        if empty:
            torch._foreach_zero_(empty)
        return used

    def _check_still_frozen(self) -> None:
        for name, p in self._frozen:
            if p.grad is not None:
                raise DdpexpError(
                    f"{name} has a gradient, but was frozen when the model was built, so trainer.reduction=exact does "
                    "not sum it. Build it with requires_grad=True, and freeze it afterwards."
                )

    def _take_buffers(self, views: Sequence[Tensor]) -> dict[Place, Tensor]:
        """Move what the buffers have become into a leaf; return what has become of those that stood still so far."""
        self._buffers.check()
        places = self._movement.places
        self._movement.write([place.now() for place in places], views[len(self._parameters) : -1])
        late = {place: now.clone() for place in self._still if not torch.equal(now := place.now(), place.kept)}
        self._buffers.restore([*places, *late])
        return late

    @torch.no_grad()
    def _end(self) -> None:
        """Finish the sum over all ranks: give the parameters their gradients and the buffers their values."""
        self._done = 0
        views = self._sum(self._partial, self._layout)
        flags = views[-1].tolist() if views[-1].numel() else []
        used = flags[: len(self._units)] if self._counts else [float(self._num_leaves)] * len(self._units)
        self._movement.read(views[len(self._parameters) : -1], self._num_leaves)
        self._give_gradients(views, used)
        late = [
            place for place, count in zip(self._still, flags[len(flags) - len(self._still) :], strict=True) if count
        ]
        if late:
            self._sum_late(late)
            self._arrange([*self._movement.places, *late])

    def _give_gradients(self, views: Sequence[Tensor], used: Sequence[float]) -> None:
        partly = [name for name, count in zip(self._units, used, strict=True) if 0 < count < self._num_leaves]
        if partly and not self._finds_unused:
            raise DdpexpError(
                f"{listed(partly)} got gradients in some micro-batches of the step and none in others. If that is "
                "meant, use strategy.find_unused_parameters=true."
            )
        for (_, _, p), view, unit in zip(self._parameters, views, self._unit_of, strict=False):
            earlier = self._earlier.get(p)
            if used[unit] and p.requires_grad:
                own = view.to(p.dtype)
                p.grad = own if earlier is None else earlier.add_(own)
            else:
                p.grad = earlier
        self._earlier = {}

    def _sum_late(self, places: Sequence[Place]) -> None:
        """Sum the buffers that have moved for the first time on some rank, which the leaves had no room for."""
        movement = BufferDelta(places, self._dtype)
        movement.begin()
        layout = Layout([one.start for one in movement.places])
        partial = self._sums(layout)
        for number, found in enumerate(self._late):
            leaf = partial.room()
            movement.write([found.get(place, place.kept) for place in movement.places], layout.views(leaf))
            partial.close(self._world.rank * self._each + number)
        movement.read(self._sum(partial, layout), self._num_leaves)

    def _sum(self, partial: Partial, layout: Layout) -> list[Tensor]:
        mine = partial.take()
        self._exchange.sum(mine)
        return layout.views(mine[0])


def _trained(models: Models) -> list[tuple[str, str, nn.Parameter]]:
    """Return each parameter that is trained, once, with its name and that of its model."""
    found: dict[int, tuple[str, str, nn.Parameter]] = {}
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
            found.setdefault(id(p), (name, model, p))
    return list(found.values())


def _named(models: Models) -> Iterator[tuple[str, str, nn.Parameter]]:
    for model, module in models.items():
        for name, p in module.named_parameters():
            yield f"{model}.{name}", model, p
