from collections.abc import Callable
from typing import Any

import torch

from ddpexp.distributed.world import World
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.replica import Replicas
from ddpexp_ordered import OrderedOptions


def build(
    options: OrderedOptions,
    world: World,
    factory: Callable[[], Any],
    *,
    trainer: Trainer,
    gradient_accumulation_steps: int,
    prepare: Callable[[Any], None],
) -> "Ordered":
    return Ordered(options.descending, world, factory, prepare)


class Ordered(Replicas):
    def __init__(
        self, descending: bool, world: World, factory: Callable[[], Any], prepare: Callable[[Any], None]
    ) -> None:
        super().__init__(world, factory, prepare=prepare)
        self.share_initial_weights(world)
        self.world, self.descending = world, descending

    def reduce_gradients(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is None:
                continue
            gradients = torch.zeros(self.world.world_size, *parameter.shape, device=self.world.device)
            gradients[self.world.rank] = parameter.grad
            self.world.sum(gradients)  # each rank fills one row: nothing is rounded here
            rows = gradients.flip(0) if self.descending else gradients
            parameter.grad.copy_(rows.cumsum(0)[-1])
