"""A kind of data: waves, whose frequency is to be found."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.data.schema import Field, Schema
from ddpexp.errors import RefusedError


@dataclass(frozen=True)
class Waves(IndexData):
    """Waves of some frequencies. Shapes: frequencies (num_samples,). Units: waves in a sample."""

    frequencies: Tensor
    length: int

    def __len__(self) -> int:
        return len(self.frequencies)

    def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """Return waves and their frequencies. Shapes: (batch, length) and (batch, 1)."""
        frequencies = self.frequencies[indices, None]
        times = torch.arange(self.length) / self.length
        return torch.sin(2 * math.pi * frequencies * times), frequencies


def prepare(samples: int, length: int) -> dict[str, Any]:
    """Describe the data, once, before any worker starts."""
    if samples < 2:
        raise RefusedError(key="data.samples", value=samples, suggestion="Use 2 or more.")
    if length < 1:
        raise RefusedError(key="data.length", value=length, suggestion="Use 1 or more.")
    schema = Schema((length,), (Field(None, "number"),), "float32", (Field("frequency", "number"),), num_outputs=1)
    return {
        "name": "waves",
        "hash": hashlib.sha256(f"{samples} {length}".encode()).hexdigest(),
        "num_train": samples,
        "num_test": samples // 2,
        "note": f"{samples} waves of {length} points",
        "schema": schema.as_json(),
        "facts": schema.facts(),
        "length": length,
    }


def load(prepared: Mapping[str, Any]) -> Splits:
    """Return the sets, in each worker."""
    train, test = (Waves(torch.rand(prepared[key]) * 4, prepared["length"]) for key in ("num_train", "num_test"))
    return Splits(train=train, evals={"eval": test})
