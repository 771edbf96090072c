"""Adapters of trainer.lora in files of weights: found by their names, and merged into the layers that they are for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path

import torch
import yaml
from torch import Tensor

from ddpexp.checkpoint.format import is_checkpoint, open_checkpoint
from ddpexp.checkpoint.headers import Entry
from ddpexp.checkpoint.source import Source
from ddpexp.config.build import build
from ddpexp.errors import RefusedError
from ddpexp.settings.parameters import LoRA
from ddpexp.system.yaml_text import load_yaml

_FACTOR = re.compile(r"(.+)\.lora_[AB]\.weight")


def is_factor(name: str) -> bool:
    """Return whether a tensor is one of the two matrices of an adapter."""
    return _FACTOR.fullmatch(name) is not None


def layers_with_adapters(names: Iterable[str]) -> list[str]:
    """Return the layers for which there is an adapter, in the order of the names."""
    found = [match[1] for name in names if (match := _FACTOR.fullmatch(name))]
    return list(dict.fromkeys(found))


def lora_of(weights: Path) -> LoRA:
    """Return trainer.lora of the run that wrote a file of weights in a checkpoint.

    Raises:
        RefusedError: the file is not in a checkpoint, or that has no such configuration.
    """
    folder = weights if weights.is_dir() else weights.resolve().parent
    try:
        text = open_checkpoint(folder).config if is_checkpoint(folder) else None
        tree = load_yaml(text)["trainer"]["lora"] if text is not None else None
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        tree = None
    if tree is None:
        raise RefusedError(
            "holds adapters, but their scale (alpha / rank) is stored in the configuration of their run",
            suggestion="Name the directory of that run, or its checkpoint.",
            place=weights.name,
        )
    return build(LoRA, tree, "trainer.lora")


class Merged(Source):
    """Weights to which the adapters of some layers are added; these adapters themselves are left out."""

    def __init__(self, entries: Mapping[str, Entry], layers: Iterable[str], scale: float) -> None:
        """Merge the adapters of `layers`; `scale` is alpha / rank."""
        super().__init__(entries)
        self._layers, self._scale = set(layers), scale
        self.entries = {
            name: entry
            for name, entry in entries.items()
            if not ((match := _FACTOR.fullmatch(name)) and match[1] in self._layers)
        }
        self._all = entries

    def read(self, name: str, first_row: int | None = None, num_rows: int = 0) -> Tensor:
        """Return a tensor, or some of its rows, with what its adapter adds."""
        tensor = self._read(self._all[name], first_row, num_rows)
        layer = name.removesuffix(".weight")
        if layer not in self._layers or layer == name:
            return tensor
        first, second = (self._read(self._all[f"{layer}.lora_{letter}.weight"], None, 0) for letter in "AB")
        dtype = _dtype_of_sum(tensor, first, second)
        # Of all rows: the product of some alone, which BLAS computes by another kernel, may differ in the last bits.
        product = second.to(dtype) @ first.to(dtype)
        added = product if first_row is None else product[first_row : first_row + num_rows]
        return (tensor.to(dtype) + added * self._scale).to(tensor.dtype)


def _dtype_of_sum(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which tensors are added: at least fp32, and that of a tensor which is more precise."""
    wide = [tensor.dtype for tensor in tensors if tensor.dtype.itemsize >= torch.float32.itemsize]
    return reduce(torch.promote_types, wide, torch.float32)
