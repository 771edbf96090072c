import math
from dataclasses import dataclass


@dataclass(frozen=True)
class InverseSquareRoot:
    warmup_steps: int

    def factor(self, step: int, num_steps: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return math.sqrt((self.warmup_steps + 1) / (step + 1))
