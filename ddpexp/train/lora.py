"""Low-rank adapters on linear layers, `trainer.lora`: the model is frozen, and small matrices beside it are trained.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from ddpexp.errors import RefusedError
from ddpexp.settings.parameters import LoRA
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.replica import modules_of
from ddpexp.system.text import first_few

_KEY = "trainer.lora.match"


class Factor(nn.Module):
    """One of the two matrices of an adapter."""

    def __init__(self, weight: Tensor) -> None:
        """Train `weight`. Shapes: (out, in)."""
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, rows: Tensor) -> Tensor:
        """Multiply. Shapes: (*, in) to (*, out)."""
        return functional.linear(rows, self.weight)


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: its weight stays, and B A times alpha / rank is added to it in effect.

    The adapter's parameters are `lora_A.weight` and `lora_B.weight`, as the peft library calls them.
    """

    lora_A: Factor
    lora_B: Factor
    lora_scale: float
    lora_dropout: float

    def forward(self, input: Tensor) -> Tensor:
        """Return what the layer and its adapter compute."""
        rows = functional.dropout(input, self.lora_dropout, self.training) if self.lora_dropout else input
        added: Tensor = super().forward(input) + self.lora_B(self.lora_A(rows)) * self.lora_scale
        return added


def add_adapters(model: Any, trainer: Trainer) -> None:
    """Freeze a module, or a mapping of them, and add the adapters that `trainer.lora` asks for.

    The first values of an adapter depend on trainer.seed and its name alone.

    Raises:
        RefusedError: a pattern matches no linear layer, or one whose weight is used without calling it.
    """
    lora = trainer.lora
    if lora is None:
        return
    models = modules_of(model)
    modules = {
        (path if len(models) == 1 else f"{name}.{path}"): module
        for name, root in models.items()
        for path, module in root.named_modules()
        if path
    }
    chosen = _chosen(modules, lora)
    for root in models.values():
        root.requires_grad_(False)
    for name, layer in chosen.items():
        _adapt(layer, name, lora, trainer.seed)
    for root in models.values():
        for module in root.modules():
            if isinstance(module, nn.TransformerEncoderLayer) and chosen.keys() & _names_below(modules, module):
                module.activation_relu_or_gelu = (
                    0  # no fast path in evaluation, which uses weights without their layers
                )
    _train_too(models, lora)


def _chosen(modules: Mapping[str, nn.Module], lora: LoRA) -> dict[str, nn.Linear]:
    """Return the layers that get adapters, by name."""
    chosen: dict[str, nn.Linear] = {}
    for pattern in lora.patterns:
        matched = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        layers = {name: module for name, module in matched.items() if isinstance(module, nn.Linear)}
        value = f"[{pattern}]"
        if not matched:
            names = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
            raise RefusedError(
                f"matches no module of the model. Its linear layers are {first_few(names) or 'none'}",
                key=_KEY,
                value=value,
            )
        if not layers:
            name, module = next(iter(matched.items()))
            raise RefusedError(
                f"matches no torch.nn.Linear, for which adapters are: {name} is a {type(module).__name__}",
                key=_KEY,
                value=value,
            )
        for name, layer in layers.items():
            _check_layer(name, layer, value)
        chosen |= layers
    return chosen


def _check_layer(name: str, layer: nn.Linear, value: str) -> None:
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        raise RefusedError(
            f"matches {name}, whose weight torch.nn.MultiheadAttention uses without calling the layer, so an adapter "
            "there "
            "would do nothing",
            key=_KEY,
            value=value,
            suggestion="Match other layers, such as those after the attention.",
        )
    if type(layer).forward is not nn.Linear.forward or is_lazy(layer.weight):
        raise RefusedError(
            f"matches {name}, a {type(layer).__name__} with "
            f"{'sizes that its first batch decides' if is_lazy(layer.weight) else 'a forward method of its own'}, but "
            "adapters are for plain torch.nn.Linear",
            key=_KEY,
            value=value,
            suggestion="Match other layers.",
        )


def _adapt(layer: nn.Linear, name: str, lora: LoRA, seed: int) -> None:
    """Make a layer one with an adapter; its parameters keep their names."""
    weight, bound = layer.weight, 1 / math.sqrt(layer.in_features)
    generator = torch.Generator().manual_seed(_seed(seed, name))
    first = torch.empty(lora.rank, layer.in_features, device="meta" if weight.is_meta else "cpu")
    if not weight.is_meta:
        first.uniform_(-bound, bound, generator=generator)
    layer.__class__ = LoRALinear
    assert isinstance(layer, LoRALinear)
    layer.lora_A = Factor(first.to(weight.device, weight.dtype))
    layer.lora_B = Factor(torch.zeros(layer.out_features, lora.rank, device=weight.device, dtype=weight.dtype))
    layer.lora_scale, layer.lora_dropout = lora.scale, lora.dropout


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def _names_below(modules: Mapping[str, nn.Module], root: nn.Module) -> set[str]:
    inner = set(map(id, root.modules()))
    return {name for name, module in modules.items() if id(module) in inner}


def _train_too(models: Mapping[str, nn.Module], lora: LoRA) -> None:
    """Train the parameters that trainer.lora.train names, as a whole."""
    parameters = {
        (path if len(models) == 1 else f"{name}.{path}"): parameter
        for name, root in models.items()
        for path, parameter in root.named_parameters(remove_duplicate=False)
    }
    for pattern in lora.trained:
        matched = [parameter for name, parameter in parameters.items() if fnmatchcase(name, pattern)]
        if not matched:
            raise RefusedError(
                f"matches no parameter of the model, such as {first_few(list(parameters), 3)}",
                key="trainer.lora.train",
                value=f"[{pattern}]",
            )
        for parameter in matched:
            parameter.requires_grad_(True)
