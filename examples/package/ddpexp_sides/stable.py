from dataclasses import dataclass


@dataclass(frozen=True)
class Stable:
    decay: float

    def factor(self, step: int, num_steps: int) -> float:
        return min(1.0, (num_steps - step) / (self.decay * num_steps))
