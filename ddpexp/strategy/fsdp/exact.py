"""Sharded data parallelism whose gradients are summed in the tree of `trainer.reduction=exact`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.exact.round import Round, trained_parameters
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.replica import Models
from ddpexp.task import OptimizerStep, Sums


class ExactFSDP(FSDP):
    """A share of the model on this rank, whose gradient is the sum of the gradients of all micro-batches.

    Gradients are reduced after each micro-batch, and their partial sums kept. Buffers change as in `Exact`.
    """

    norm_by_rows: ClassVar[bool] = True

    def __init__(
        self,
        options: FSDPOptions,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        compilation: Compilation | None = None,
        prepare: Callable[[Models], None] = lambda models: None,
        gradient_accumulation_steps: int,
    ) -> None:
        """Build the model and keep this rank's share; see `FSDP`. Ranks: all; communicates."""
        super().__init__(
            options, world, factory, compilation=compilation, prepare=prepare,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )  # fmt: skip
        self.gradient_weight = 1.0
        trained = trained_parameters(self.modules)
        self._cut = [p for _, _, p in trained if isinstance(p, DTensor)]
        self.round = Round(
            self.modules, [entry for entry in trained if not isinstance(entry[2], DTensor)], world,
            gradient_accumulation_steps=gradient_accumulation_steps, reduce_through=options.reduce_through,
            memory=self._sharding.memory,
        )  # fmt: skip
        self.memory = self.round.memory
        self._uses = dict.fromkeys(self.modules, 0)  # micro-batches of this round that gave a model gradients
        self._previous_gradients: dict[nn.Parameter, Tensor] = {}  # of earlier rounds of this step

    def train_step(self, step: OptimizerStep, micro_batches: Sequence[Any]) -> list[Sums]:
        """Go through the micro-batches, of one backward pass each, then step the optimizers."""
        for tree in self._sharding.trees:
            tree.sums_at_once = True
        return super().train_step(step, micro_batches)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Return a context for forward and backward of a micro-batch.

        After the last one of a round the parameters have their summed gradients.

        Ranks: all, equally often; communicates.

        Raises:
            DdpexpError: a parameter has no gradient, a buffer cannot be summed, or a round has another length.
        """
        if self.round.done == 0:
            self._uses = dict.fromkeys(self.modules, 0)
            self._previous_gradients = {p: p.grad for p in self._cut if p.grad is not None}
            for p in self._cut:
                p.grad = None
        self.round.begin()
        yield
        for model in self.modules:
            self._uses[model] += self._check_gradients(model)
        self.round.close_leaf(last)
        if last:
            self._check_uses()
        for tree in self._sharding.trees:
            tree.end_micro_batch()
        if last:
            self.round.end()
            self._add_previous()
        else:
            for p in self._cut:
                p.grad = None

    def _check_uses(self) -> None:
        partly = [name for name, count in self._uses.items() if 0 < count < self.round.micro_batches_per_rank]
        if partly and self._cut:
            raise DdpexpError(
                f"{', '.join(partly)} got gradients in some micro-batches of the step and none in others, "
                "which trainer.reduction=exact cannot sum with strategy=fsdp",
                suggestion="If that is meant, use strategy=ddp strategy.find_unused_parameters=true.",
            )

    @torch.no_grad()
    def _add_previous(self) -> None:
        for p, previous in self._previous_gradients.items():
            if p.grad is not None:
                previous.add_(p.grad)
            p.grad = previous
        self._previous_gradients = {}

    @contextmanager
    def synced_buffers(self) -> Iterator[None]:
        """Check the buffers, which are the same on all ranks, before they are evaluated or saved."""
        self.round.check_buffers()
        yield

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return nothing: every rank has the same buffers."""
        return {}
