"""A pretrained model with a new head: any of torchvision, timm or transformers by its name, or one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Finetuned(nn.Module):
    """A model whose last linear layer is replaced by a new `head`; the rest is `backbone`.

    Shapes: what the model takes, images (batch, channels, height, width) or tokens (batch, length) int64, -> (batch,
    num_classes).
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        head: str | None = None,
        dropout: float = 0.0,
        pad_token: int | None = None,
    ) -> None:
        """Replace the layer named `head`, by default the last linear one; tokens that are `pad_token` are masked.

        Raises: ValueError, if there is no such layer.
        """
        super().__init__()
        name, layer = _last_linear(backbone) if head is None else (head, _named(backbone, head))
        self.backbone, self.pad_token = backbone, pad_token
        parent, _, own = name.rpartition(".")
        setattr(backbone.get_submodule(parent), own, nn.Identity())
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(layer.in_features, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the score of each class."""
        if inputs.is_floating_point() or self.pad_token is None:
            found = self.backbone(inputs)
        else:
            found = self.backbone(inputs, attention_mask=(inputs != self.pad_token).long())
        return self.head(self.dropout(_features(found)))  # type: ignore[no-any-return]


def _features(found: Any) -> Tensor:
    """Return what a model computes before its head; models of transformers return it as `logits`."""
    if isinstance(found, Mapping):
        found = found["logits"]
    if not isinstance(found, Tensor) or found.dim() != 2:
        shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"the model returns {shown} where (batch, features) is needed: choose one that classifies, such as "
            "AutoModelForSequenceClassification, or name its last layer with model.head"
        )
    return found


def _last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear) and name]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layer, so there is no head to replace: use a model that classifies"
        )
    return found[-1]


def _named(model: nn.Module, name: str) -> nn.Linear:
    modules = dict(model.named_modules())
    layer = modules.get(name)
    if not isinstance(layer, nn.Linear):
        last = [key for key, module in modules.items() if isinstance(module, nn.Linear)][-3:]
        raise ValueError(
            f"model.head={name} names no linear layer of {type(model).__name__}: its last ones are {', '.join(last)}"
        )
    return layer
