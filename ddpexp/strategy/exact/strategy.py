"""Exact reduction: sums over micro-batches in a fixed order, whichever rank computed which.

The weights are therefore bitwise identical at every number of workers that divides the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import nn

from ddpexp.distributed.world import World
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.exact.round import Round, trained_parameters
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.replica import Models, Replicas


class Exact(Replicas):
    """One replica on this rank, whose gradient is the sum of the gradients of all micro-batches.

    Each micro-batch starts without a gradient, and from the buffers before the step. Its gradient and its changes of
    the buffers are a leaf of the summation tree. After the last micro-batch the ranks exchange their partial sums.

    On GPUs the host waits for the device once per round, and only if several ranks have flags to exchange (for several
    models or `strategy.find_unused_parameters`), or if there are large or complex buffers that do not change.
    """

    norm_by_rows: ClassVar[bool] = True

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
        trained = trained_parameters(self.modules)
        self.share_initial_weights(world)
        self.round = Round(
            self.modules, trained, world, gradient_accumulation_steps=gradient_accumulation_steps,
            reduce_through=options.reduce_through, finds_unused=options.find_unused_parameters,
        )  # fmt: skip
        self.memory = self.round.memory
        self._leaves = {last: _Leaf(self.round, last) for last in (False, True)}

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of a micro-batch.

        After the last one of a round the parameters have their summed gradients.

        Ranks: all, equally often; communicates after the last one.

        Raises:
            DdpexpError: a parameter has no gradient, a gradient or buffer cannot be summed, or a round has another
            length.
        """
        return self._leaves[last]

    def synced_buffers(self) -> AbstractContextManager[None]:
        """Check the buffers, which are the same on all ranks, before they are evaluated or saved."""
        self.round.check_buffers()
        return super().synced_buffers()


class _Leaf(AbstractContextManager[None]):
    """The context of a micro-batch, whose gradient is a leaf of the tree.

    A class, because a generator takes four times as long.
    """

    def __init__(self, round_: Round, last: bool) -> None:
        self._round, self._last = round_, last

    def __enter__(self) -> None:
        self._round.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._round.close_leaf(self._last)
            if self._last:
                self._round.end()
