"""The model and the data of an example in double precision.

In fp32 a sum in another order changes the last bits, and fifty steps of a network with ReLU make per cents of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from ddpexp.data.datasets import Arrays, Splits


def model(of: str, **arguments: Any) -> Any:
    """Build the model, or the mapping of models, that the function `of` makes."""
    built = _named(of)(**arguments)
    return {name: part.double() for name, part in built.items()} if isinstance(built, Mapping) else built.double()


def data(of: str, **arguments: Any) -> Splits:
    """Load the sets that the function `of` loads."""
    splits = _named(of)(**arguments)
    return Splits(arrays(splits.train), {name: arrays(part) for name, part in splits.evals.items()})


def arrays(samples: Arrays) -> Arrays:
    """Return the samples with their floating-point numbers in double precision."""
    return Arrays(tuple(_double(tensor) for tensor in samples.tensors))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _named(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(import_module(module), function)
