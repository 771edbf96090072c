"""An example of a family of losses, its plain program, and how far the weights of the two are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.data.base import IndexData
from ddpexp.distributed import rng

GLOBAL_BATCH_SIZE, NUM_TRAIN, NUM_EVAL, SEED = 24, 96, 24, 0
"""Every number of workers divides the batch; four steps are an epoch."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """What a plain program is told: how long it trains, and into how many micro-batches the random numbers divide.

    A plain program takes the global batch at once wherever it can. But random numbers (dropout, noise) belong to a
    micro-batch, by its number in the global batch, and so does the normalization of BatchNorm.
    """

    num_steps: int
    micro_batch_size: int

    def micro_batches(self, data: IndexData, step: int) -> list[tuple[Tensor, ...]]:
        """Return the samples of a step, cut into micro-batches."""
        epoch, within = divmod(step * GLOBAL_BATCH_SIZE, NUM_TRAIN)
        indices = data.order(SEED, epoch)(np.arange(within, within + GLOBAL_BATCH_SIZE))
        return [data.gather(part, CPU) for part in torch.split(torch.from_numpy(indices), self.micro_batch_size)]

    def batch(self, data: IndexData, step: int) -> tuple[Tensor, ...]:
        """Return the samples of a step."""
        return tuple(torch.cat(parts) for parts in zip(*self.micro_batches(data, step), strict=True))

    def seeded(self, data: IndexData, step: int, turn: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the micro-batches of a step, each with its random numbers; a further turn through them has others."""
        batches = self.micro_batches(data, step)
        for number, batch in enumerate(batches):
            torch.manual_seed(rng.seed_of(SEED, rng.MODEL, step, turn * len(batches) + number))
            yield batch


@dataclass(frozen=True)
class Family:
    """An example, and the program that a researcher would write for one process.

    `plain` trains as the setting says and returns tensors by the names of the checkpoint's file and of the tensor
    in it, such as `model.head.weight`, and `model.ema.head.weight` for the moving average.
    """

    name: str
    plain: Callable[[Setting], Mapping[str, Tensor]]
    overrides: tuple[str, ...] = ()  # beside the sizes: what the plain program has, and the recipe's file has not
    sizes: tuple[str, ...] = (f"data.train={NUM_TRAIN}", f"data.test={NUM_EVAL}")
    tolerance: float = 1e-6  # of the largest difference in a tensor, in parts of its largest value


def tensors_of(model: nn.Module, name: str = "model") -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, by their names in a checkpoint."""
    return {f"{name}.{key}": value.detach().clone() for key, value in model.state_dict().items()}


def last_tensors(run: Path) -> dict[str, Tensor]:
    """Return what the last checkpoint of a run has of its models and their averages."""
    folder = complete_checkpoints(run / "checkpoints")[0]
    return {
        f"{path.stem}.{name}": value
        for path in folder.glob("*.safetensors")
        if not path.name.startswith("state.")
        for name, value in load_file(path).items()
    }


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference in each tensor, in parts of its largest value; infinite if it is not there."""
    return {name: _error(found.get(name), expected.get(name)) for name in sorted({*found, *expected})}


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None or found.shape != expected.shape:
        return float("inf")
    apart, largest = (found.double() - expected.double()).abs().max(), expected.double().abs().max()
    return 0.0 if float(apart) == 0 else float(apart / largest)
