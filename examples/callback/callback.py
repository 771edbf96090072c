from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ddpexp import Callback, RunView


class UpdateSize(Callback):
    """Records how much a step changes each tensor relative to its size, and ends a run whose weights stand still."""

    def __init__(self, every: int, smallest: float) -> None:  # the keys below callbacks.update_size
        self.every, self.smallest = every, smallest
        self.before: dict[str, Tensor] = {}
        self.still = 0  # times in a row that no tensor changed by `smallest`

    def on_gradients(self, run: RunView) -> None:  # before the optimizer's step
        if (run.step + 1) % self.every == 0:
            self.before = {name: parameter.detach().clone() for name, parameter in run.parameters()}

    def on_step(self, run: RunView) -> None:
        if run.step % self.every:
            return
        sizes = {
            f"update_size/{name}": float((parameter.detach() - self.before[name]).norm() / parameter.norm())
            for name, parameter in run.parameters()
        }
        run.logger.scalars(run.step, run.epoch, sizes)  # records on rank zero alone
        self.still = self.still + 1 if max(sizes.values()) < self.smallest else 0
        if self.still == 3:
            run.stop(f"no tensor has changed by {self.smallest:g} of its size in three records")

    def state_dict(self) -> Mapping[str, Any]:  # in each checkpoint
        return {"still": self.still}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.still = state["still"]
