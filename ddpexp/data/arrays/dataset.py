"""Arrays and tables for training: rows gathered from mapped files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.data.arrays.store import changed
from ddpexp.data.datasets import Splits
from ddpexp.distributed.transfers import gathered
from ddpexp.errors import RefusedError


def load(prepared: Mapping[str, Any]) -> Splits:
    """Map what `ddpexp.data.arrays.prepare.prepare` has checked.

    Shapes: a batch is inputs (batch, *shape) of data.dtype and targets, which are classes (batch,) int64 or numbers
    (batch, ...) float32; of data without targets it is the inputs alone, in a tuple.

    Raises:
        RefusedError: a file has changed since.
    """
    if problem := changed(prepared["sources"]):
        raise RefusedError(problem)
    facts, dtype = prepared["facts"], getattr(torch, prepared["dtype"])
    scale = (torch.tensor(facts["mean"]), torch.tensor(facts["std"])) if prepared["standardize"] else None
    if divisor := prepared.get("divisor"):
        scale = torch.zeros(()), torch.tensor(divisor)
    parts = {name: _part(Path(prepared["folder"]), part, dtype, scale) for name, part in prepared["parts"].items()}
    if "train" not in parts:  # to predict for
        whole = parts["eval"]
        if whole.targets is None and (value := prepared["placeholder"]) is not None:
            whole = replace(whole, targets=torch.full((len(whole),), value))
        return Splits(train=whole, evals={"eval": whole})
    return Splits(train=parts.pop("train"), evals=parts)


@dataclass(frozen=True)
class Rows:
    """Inputs and targets as stored, and how they become batches.

    Shapes: inputs (num_samples, ...), targets (num_samples, ...), groups (num_samples,), mean and std (num_features,).
    """

    inputs: Tensor
    targets: Tensor | None
    dtype: torch.dtype
    scale: tuple[Tensor, Tensor] | None = None  # mean and standard deviation of each column
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def gather(self, indices: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Gather rows as stored; convert and standardize them on the device. Shapes: as in `load`."""
        inputs = gathered(self.inputs, indices, device).to(self.dtype)
        if self.scale is not None:
            mean, std = (values.to(device, self.dtype) for values in self.scale)
            inputs = (inputs - mean) / std
        return (inputs,) if self.targets is None else (inputs, gathered(self.targets, indices, device))

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the class of each sample as `labels` or `targets`, and the groups as any other column."""
        if name not in ("labels", "targets"):
            return self.groups
        is_class = self.targets is not None and self.targets.dtype == torch.int64
        return self.targets.cpu().numpy() if self.targets is not None and is_class else None

    @property
    def labels(self) -> NDArray[Any] | None:
        """Return the class of each sample, if there are classes."""
        return self.column("labels")

    @property
    def num_bytes(self) -> int:
        """Return the size of inputs and targets."""
        tensors = (self.inputs, self.targets) if self.targets is not None else (self.inputs,)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def to(self, device: torch.device) -> Rows:
        """Return the same rows on the device."""
        scale = None if self.scale is None else (self.scale[0].to(device), self.scale[1].to(device))
        targets = self.targets.to(device) if self.targets is not None else None
        return replace(self, inputs=self.inputs.to(device), targets=targets, scale=scale)


def _part(folder: Path, part: Mapping[str, Any], dtype: torch.dtype, scale: tuple[Tensor, Tensor] | None) -> Rows:
    def mapped(name: str) -> Tensor:
        # Mapped copy-on-write, although nothing writes to it, because torch wants a writable array.
        return torch.from_numpy(np.load(folder / name, mmap_mode="c"))

    targets = mapped(part["targets"]) if part["targets"] else None
    groups = np.asarray(np.load(folder / part["groups"])) if part["groups"] else None
    return Rows(mapped(part["inputs"]), targets, dtype, scale, groups)
