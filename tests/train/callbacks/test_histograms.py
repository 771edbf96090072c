"""Histograms of weights and gradients: which, when, of which numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpexp.loggers.base import Logger
from ddpexp.train.callbacks.histograms import Histograms
from tests.train.callbacks.test_hooks import fitting, points  # noqa: F401

NAMES = [f"model.{number}.{kind}" for number in (0, 3) for kind in ("bias", "weight")]


class Keeps(Logger):
    """Keeps the histograms."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], Tensor] = {}

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        assert (name, step) not in self.kept
        self.kept[name, step] = values.clone()


@pytest.mark.parametrize(("every", "steps"), [("epoch", [4, 8]), (3, [3, 6])])
def test_they_are_of_the_reduced_gradient_before_clipping_and_of_the_new_weights(
    points: Any,  # noqa: F811
    tmp_path: Path,
    every: Any,
    steps: list[int],
) -> None:
    loop, _, _ = fitting(
        points, tmp_path, Histograms(every), steps=steps[-1], clip_grad_norm=0.01, micro_batch_size=6, log_every=1
    )
    loop.logger = keeps = Keeps()
    norms: dict[int, float] = {}
    keeps.scalars = lambda step, epoch, values: norms.update(  # type: ignore[method-assign]
        {step: values["train/grad_norm"]} if "train/grad_norm" in values else {}
    )
    loop.fit()
    assert sorted(keeps.kept) == sorted(
        (f"{kind}/{name}", step) for kind in ("gradients", "weights") for name in NAMES for step in steps
    )
    for step in steps:
        gradient = torch.cat([keeps.kept[f"gradients/{name}", step].flatten() for name in NAMES])
        assert float(gradient.norm()) == pytest.approx(norms[step], rel=1e-5)
        assert norms[step] > 0.01
    for name, parameter in nn.ModuleDict(loop.run.strategy.modules).named_parameters():
        assert torch.equal(keeps.kept[f"weights/{name}", steps[-1]], parameter.detach().flatten())


def test_what_is_not_finite_is_left_out(points: Any, tmp_path: Path) -> None:  # noqa: F811
    loop, _, _ = fitting(points, tmp_path, Histograms(1, gradients=False), steps=1, nonfinite="skip")
    loop.logger = keeps = Keeps()
    weight, bias = list(loop.run.strategy.parameters())[:2]
    with torch.no_grad():
        weight.view(-1)[0], bias[:] = torch.nan, torch.inf
    loop.fit()
    assert len(keeps.kept["weights/model.0.weight", 1]) == weight.numel() - 1
    assert ("weights/model.0.bias", 1) not in keeps.kept


@pytest.mark.parametrize(("every", "warns"), [(9, True), (8, False), ("epoch", False)])
def test_a_period_longer_than_the_run_is_reported(
    points: Any,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    every: Any,
    warns: bool,
) -> None:
    loop, _, _ = fitting(points, tmp_path, Histograms(every), steps=8)
    loop.fit()
    expected = "callbacks.c0.every=9: nothing is recorded, since the run ends at step 8. Use fewer steps, such as callbacks.c0.every=1."
    assert [line for line in caplog.messages if "histograms" in line or "c0" in line] == [expected] * warns
