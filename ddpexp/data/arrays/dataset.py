"""Arrays and tables for training: rows gathered from mapped files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.data.arrays.store import check_unchanged
from ddpexp.data.base import LABELS, IndexData
from ddpexp.data.datasets import Splits, map_npy
from ddpexp.data.schema import Schema
from ddpexp.distributed.transfers import moved, rows

_WIDE = (torch.float64, torch.int64, torch.int32)  # numbers that float32 may not hold


def load(prepared: Mapping[str, Any]) -> Splits:
    """Map what `ddpexp.data.arrays.prepare.prepare` has checked.

    Shapes: a batch is inputs (batch, *shape) of data.dtype and targets, which are classes (batch,) int64 or numbers
    (batch, ...) float32; of data without targets it is the inputs alone, in a tuple.

    Raises:
        RefusedError: a file has changed since.
    """
    check_unchanged(prepared["sources"])
    form = form_of(Schema.read(prepared["schema"]), prepared.get("divisor"))
    parts = {name: _part(Path(prepared["folder"]), part, form) for name, part in prepared["parts"].items()}
    if "train" not in parts:  # to predict for
        whole = parts["eval"]
        if whole.targets is None and (value := prepared["placeholder"]) is not None:
            whole = replace(whole, targets=torch.full((len(whole),), value))
        return Splits(train=whole, evals={"eval": whole})
    return Splits(train=parts.pop("train"), evals=parts)


@dataclass(frozen=True)
class Form:
    """How inputs as stored become those of a batch. Shapes: all but dtype (num_features,), or a number for all."""

    dtype: torch.dtype
    mean: Tensor | None = None
    std: Tensor | None = None
    fill: Tensor | None = None  # in place of missing values, which are stored as NaN

    def __call__(self, inputs: Tensor) -> Tensor:
        """Fill and standardize, in float64 where float32 may lack digits of what is stored. Shapes: (batch, ...)."""
        if self.mean is None and self.fill is None:
            return inputs.to(self.dtype)
        numbers = torch.float64 if inputs.dtype in _WIDE and self.dtype.is_floating_point else self.dtype
        inputs = inputs.to(numbers)
        if self.fill is not None:
            inputs = torch.where(inputs.isnan(), self.fill.to(inputs.device, numbers), inputs)
        if self.mean is not None and self.std is not None:
            inputs = (inputs - self.mean.to(inputs.device, numbers)) / self.std.to(inputs.device, numbers)
        return inputs.to(self.dtype)

    def to(self, device: torch.device) -> Form:
        """Return the same on the device."""
        tensors = {name: getattr(self, name) for name in ("mean", "std", "fill")}
        return replace(self, **{name: one.to(device) for name, one in tensors.items() if one is not None})


def form_of(schema: Schema, divisor: float | None) -> Form:
    """Return how the inputs of a data set become those of a batch; `divisor` is that of pixels."""
    scale = _vector(schema.mean), _vector(schema.std)
    if divisor:
        scale = torch.zeros(()), torch.tensor(divisor)
    return Form(getattr(torch, schema.dtype), *scale, _vector(schema.in_place_of_missing()))


@dataclass(frozen=True)
class Rows(IndexData):
    """Inputs and targets as stored, and how they become batches.

    Shapes: inputs (num_samples, ...), targets (num_samples, ...), groups (num_samples,).
    """

    inputs: Tensor
    targets: Tensor | None
    form: Form
    groups: NDArray[np.int64] | None = None
    schema: Schema | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor, ...]:
        """Gather rows as stored."""
        tensors = (self.inputs,) if self.targets is None else (self.inputs, self.targets)
        return tuple(rows(tensor, indices, pinned) for tensor in tensors)

    def stage(self, batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Move rows to the device, and convert and standardize them there. Shapes: as in `load`."""
        return self.form(moved(batch[0], device)), *(moved(targets, device) for targets in batch[1:])

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the class of each sample as `labels` or `targets`, and the groups as any other column."""
        if name not in LABELS:
            return self.groups
        is_class = self.targets is not None and self.targets.dtype == torch.int64
        return self.targets.cpu().numpy() if self.targets is not None and is_class else None

    @property
    def num_bytes(self) -> int:
        """Return the size of inputs and targets."""
        tensors = (self.inputs, self.targets) if self.targets is not None else (self.inputs,)
        return sum(tensor.nbytes for tensor in tensors)

    def to(self, device: torch.device) -> Rows:
        """Return the same rows on the device."""
        targets = self.targets.to(device) if self.targets is not None else None
        return replace(self, inputs=self.inputs.to(device), targets=targets, form=self.form.to(device))


def _vector(values: Sequence[float] | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def _part(folder: Path, part: Mapping[str, Any], form: Form) -> Rows:
    targets = map_npy(folder / part["targets"]) if part["targets"] else None
    groups = np.asarray(np.load(folder / part["groups"])) if part["groups"] else None
    return Rows(map_npy(folder / part["inputs"]), targets, form, groups)
