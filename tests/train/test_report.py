"""What a run says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpexp.settings.node import Node
from ddpexp.train.metrics import nonfinite_error
from ddpexp.train.report import _model, _numbers, best_seen
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
        ({"compile_step": True}, "fp32, compiled steps"),
        ({"matmul_precision": "high"}, "fp32, matrix products in high precision"),
    ],
)
def test_the_headline_says_in_which_numbers_the_model_computes(keys: dict[str, Any], shown: str) -> None:
    assert _numbers(replace(TRAINER, **keys)) == shown


@pytest.mark.parametrize(
    ("stopped", "node", "expected"),
    [
        ("callbacks.stop: no better", {"monitor": "eval/loss", "mode": "min"}, "eval/loss 0.25 at step 20"),
        ("callbacks.stop: no better", {"monitor": "eval/accuracy", "mode": "max"}, "eval/accuracy 90.00% at step 10"),
        ("callbacks.stop: no better", {"monitor": "eval/f1", "mode": "max"}, None),
        ("callbacks.other: enough", {"monitor": "eval/loss", "mode": "min"}, None),
        ("callbacks.stop: enough", {"after": 3}, None),
        ("trainer.max_seconds=30 reached", {"monitor": "eval/loss", "mode": "min"}, None),
        (None, {"monitor": "eval/loss", "mode": "min"}, None),
    ],
)
def test_the_best_value_that_a_callback_has_seen_is_named(
    tmp_path: Path, stopped: str | None, node: dict[str, Any], expected: str | None
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 5, "train/loss": 0.1}\n{"step": 10, "eval/loss": 0.5, "eval/accuracy": 0.9}\n'
        '{"step": 20, "eval/loss": 0.25, "eval/accuracy": 0.8}\n{"step": 30, "eval/loss": null}\n'
    )
    assert best_seen(path, {"stop": Node("mine.Stop", node)}, stopped) == expected


def test_a_loss_that_is_not_finite_names_what_finds_its_module() -> None:
    assert "callbacks=find_nonfinite" in nonfinite_error("train/loss", float("nan"), 3).suggestion
