from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.options import Options

if TYPE_CHECKING:
    from ddpexp.distributed.world import World
    from ddpexp.strategy.base import Strategy


@dataclass(frozen=True)
class OrderedOptions(Options):
    kind: Literal["ordered"]
    descending: bool

    def build(
        self,
        world: "World",
        factory: Callable[[], Any],
        *,
        trainer: Trainer,
        gradient_accumulation_steps: int,
        prepare: Callable[[Any], None],
    ) -> "Strategy":
        from ddpexp_ordered.strategy import Ordered  # imports torch: only workers do

        return Ordered(self.descending, world, factory, prepare)
