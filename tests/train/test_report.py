"""What a run says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from ddpexp.config.instantiate import Node
from ddpexp.train.report import _model


@pytest.mark.parametrize(
    ("target", "kwargs", "shown"),
    [
        ("timm.create_model", {"model_name": "vit_tiny_patch16_224", "pretrained": False}, "vit_tiny_patch16_224"),
        ("torchvision.models.get_model", {"name": "resnet18"}, "resnet18"),
        ("transformers.AutoModel.from_pretrained", {"pretrained_model_name_or_path": "gpt2"}, "gpt2"),
        ("torchvision.models.resnet18", {"num_classes": 10}, "resnet18"),
        ("mine.Net", {"name": 3, "width": 8}, "Net"),
        ("mine.create_model", {}, "create_model"),
    ],
)
def test_a_model_is_called_by_its_own_name(target: str, kwargs: dict[str, Any], shown: str) -> None:
    assert _model(Node(target, kwargs)) == shown
