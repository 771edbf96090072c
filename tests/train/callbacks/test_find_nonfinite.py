"""The first number that is not finite, named with its module, its step and its sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpexp.data.batches import TrainBatches
from ddpexp.train.callbacks.find_nonfinite import FindNonFinite
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.metrics import NonFiniteError
from tests.fitting import loop_alone
from tests.train.callbacks.test_hooks import fitting, points  # noqa: F401

BAD = 41  # a sample of the training set


class Faulty(nn.Module):
    """Divides by zero in a module of its own, or takes a root whose gradient is infinite, for one sample."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.first, self.fault, self.last = nn.Linear(4, 4), Fault(backward), nn.Linear(4, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        numbers, rows, _ = batch
        scores: torch.Tensor = self.last(self.fault(self.first(rows), numbers))
        return scores


class Fault(nn.Module):
    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        bad, result = numbers == BAD, rows.clone()
        result[bad] = result[bad] + ((rows[bad] * 0).sqrt() if self.backward else torch.inf)
        return result


class Sums:
    def step(self, model: nn.Module, batch: Any) -> Any:
        loss = nn.functional.cross_entropy(model(batch), batch[2], reduction="sum")
        return loss, len(batch[2]), {}


def found(points: Any, tmp_path: Path, factory: Any, **keys: Any) -> str:  # noqa: F811
    callbacks = Callbacks({"find": FindNonFinite()})
    loop, _ = loop_alone(points, tmp_path, Sums(), 4, factory, callbacks=callbacks, checkpoint_every=0, **keys)
    with pytest.raises(NonFiniteError) as caught:
        loop.fit()
    assert all(bool(parameter.isfinite().all()) for parameter in loop.run.strategy.parameters())
    return str(caught.value)


@pytest.mark.parametrize("keys", [{}, {"micro_batch_size": 6}, {"micro_batch_size": 6, "reduction": "exact"}])
@pytest.mark.parametrize("backward", [False, True])
def test_module_step_and_sample_are_named(
    points: Any,  # noqa: F811
    tmp_path: Path,
    backward: bool,
    keys: dict[str, Any],
) -> None:
    loop, _ = loop_alone(points, tmp_path, points.Sides(), 4)
    assert isinstance(loop.run.train, TrainBatches)
    step = next(number for number, block in enumerate(loop.run.train.indices(0, 4), start=1) if BAD in block)
    message = found(points, tmp_path, lambda: Faulty(backward), **keys)
    what = (
        "the gradient at the output of model.first (Linear) is not finite ("
        if backward
        else "the output of model.fault (Fault) is not finite ("
    )
    assert message.startswith(f"callbacks.find: {what}")
    assert message.endswith(f"in step {step}, for sample {BAD} of 96 in `train`.")


def test_infinities_may_be_meant() -> None:
    seen: list[str] = []
    for infinite in (True, False):
        callback = FindNonFinite(infinite)
        callback._report = lambda values, bad, what, has_rows: seen.append(what)  # type: ignore
        callback._look(torch.tensor([1.0, -torch.inf]), f"masked {infinite}")
        callback._look(torch.tensor([torch.nan]), f"nan {infinite}")
        callback._look(torch.tensor([1]), "whole numbers")
    assert seen == ["masked True", "nan True", "nan False"]


def test_a_sound_run_is_the_same_with_it(points: Any, tmp_path: Path) -> None:  # noqa: F811
    loop, _, _ = fitting(points, tmp_path, FindNonFinite())
    loop.fit()
    alone, _ = loop_alone(points, tmp_path, points.Sides(), 8)
    alone.fit()
    weights, expected = (one.run.strategy.modules["model"].state_dict() for one in (loop, alone))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
