"""Optimizer steps: gradients of every kind, several losses and networks, and steps that are left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Ddpexp
from tests.fitting import Once, fit_alone, near
from tests.points import Recipe, weights

CODE = """\
class Words(nn.Module):
    # A table of which a step sees some rows, several of them more than once.
    def __init__(self, sparse=True, **options):
        super().__init__()
        self.table = nn.Embedding(16, 4, sparse=sparse)
        self.out = nn.Linear(4, 2)

    def forward(self, ids):
        return self.out(self.table(ids % 11))


class Reads(Sides):
    # The table's rows, with an optimizer that takes sparse gradients.
    def optimizers(self, model, make):
        return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}

    def step(self, model, batch):
        return super().step(lambda rows: model(batch[0]), batch)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("updates"), environ), CODE)


@pytest.fixture(scope="module")
def points(recipe: Recipe) -> Any:
    return recipe.module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    """Train in this process, alone: `fit(task, num_steps=8, factory=Net, evals=..., **trainer keys)`."""
    return partial(fit_alone, points, tmp_path)


def norms(once: Once) -> list[float]:
    return [record["train/grad_norm"] for record in once.records if "train/grad_norm" in record]


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_sparse_gradients_are_measured_clipped_and_checked_as_dense_ones(
    points: Any, fit: Callable[..., Once], nonfinite: str
) -> None:
    keys = {"log_every": 1, "clip_grad_norm": 0.3, "micro_batch_size": 12, "nonfinite": nonfinite}
    found = fit(points.Reads(), factory=points.Words, **keys)
    expected = fit(points.Reads(), factory=partial(points.Words, sparse=False), **keys)
    assert near(found.weights, expected.weights, 1e-6)
    assert norms(found) == pytest.approx(norms(expected), rel=1e-5)
    assert min(norms(found)) < 0.3 < max(norms(found))


@pytest.mark.parametrize("size", [2, 3])
def test_sparse_gradients_train_at_every_world_size(points: Any, fit: Callable[..., Once], recipe: Recipe, size: int) -> None:
    words = ("task._target_=points.Reads", "model._target_=points.Words", "~model.hidden", "~model.dropout", "scheduler=cosine")
    done = recipe(*words, f"trainer.gpus={size}", "trainer.log_every=1", "trainer.clip_grad_norm=0.3")
    assert done.code == 0, done.err
    alone = fit(points.Reads(), factory=points.Words, log_every=1, clip_grad_norm=0.3)
    assert near(weights(done), alone.weights, 1e-5)
    found = [record["train/grad_norm"] for record in done.metrics() if "train/grad_norm" in record]
    assert found == pytest.approx(norms(alone), rel=1e-4)


class Mixed(nn.Module):
    """Three layers, each with its own kind of number."""

    def __init__(self, *kinds: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2, dtype=kind) for kind in kinds)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = [layer(rows.to(next(layer.parameters()).dtype)) for layer in self.layers]
        return torch.stack([(one.abs() if one.is_complex() else one).double() for one in found]).sum(0)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize(
    "kinds",
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.complex64, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.complex128, torch.float64, torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_of_mixed_kinds_of_numbers_have_one_norm(
    points: Any, fit: Callable[..., Once], kinds: tuple[torch.dtype, ...], limit: float | None
) -> None:
    seen: list[float] = []

    def watched(parameters: Any) -> torch.optim.Optimizer:
        mine = list(parameters)
        optimizer = torch.optim.SGD(mine, lr=0.05)

        def look(*_: Any) -> None:
            wide = [torch.view_as_real(p.grad.resolve_conj()) if p.grad.is_complex() else p.grad for p in mine]
            seen.append(float(torch.cat([one.double().flatten() for one in wide]).norm()))

        optimizer.register_step_pre_hook(look)
        return optimizer

    once = fit(
        points.Sides(), factory=partial(Mixed, *kinds), make=watched, log_every=1, clip_grad_norm=limit, eval_every=0,
    )  # fmt: skip
    tolerance = 5e-3 if limit and torch.bfloat16 in kinds else 1e-5
    assert seen == pytest.approx([min(norm, limit or norm) for norm in norms(once)], rel=tolerance)
    assert max(norms(once)) > 0.5
