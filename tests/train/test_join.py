"""What a rank sets up in its process before it joins the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ddpexp.train.join import choose_algorithms
from tests.fitting import TRAINER


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put torch's settings back."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_matrix_products_and_cudnn_follow_the_trainer_section() -> None:
    choose_algorithms(replace(TRAINER, matmul_precision="high", cudnn_benchmark=True))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == ("high", True)
    choose_algorithms(TRAINER)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == ("highest", False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize("exported", [None, ":16:8"])
def test_deterministic_algorithms_get_cublas_workspace_unless_it_is_exported(
    monkeypatch: pytest.MonkeyPatch, exported: str | None
) -> None:
    if exported is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", exported)
    choose_algorithms(replace(TRAINER, deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (exported or ":4096:8")
