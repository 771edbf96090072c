"""What a run says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpexp.settings.node import Node
from ddpexp.train.report import _model, _numbers
from tests.fitting import TRAINER


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


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({}, "fp32"),
        ({"precision": "bf16", "compile": True}, "bf16, compiled"),
        ({"compile": "reduce-overhead", "compile_blocks": "Block"}, "fp32, compiled Block (reduce-overhead)"),
        ({"matmul_precision": "high"}, "fp32, matrix products in high precision"),
    ],
)
def test_the_headline_says_in_which_numbers_the_model_computes(keys: dict[str, Any], shown: str) -> None:
    assert _numbers(replace(TRAINER, **keys)) == shown
