"""L-BFGS without a line search against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpexp.train.lbfgs import LBFGS

NUM_STEPS = 40  # rounding grows from step to step


def trained(make: Any, num_steps: int, rates: Any = lambda step: 0.5) -> tuple[list[float], nn.Module]:
    """Fit a sine; return the loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = make(model.parameters())
    inputs = torch.linspace(-3, 3, 64, dtype=torch.float64)[:, None]
    losses = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        return loss

    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = rates(step)
        losses.append(float(closure().detach()))
        arguments = [closure] if isinstance(optimizer, torch.optim.LBFGS) else []
        optimizer.step(*arguments)
    return losses, model


@pytest.mark.parametrize("history_size", [1, 5, 100])
@pytest.mark.parametrize("rates", [lambda step: 0.5, lambda step: 0.9 ** (step // 10)])
def test_steps_are_those_of_torch_with_one_iteration_each(history_size: int, rates: Any) -> None:
    expected, reference = trained(
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=1, history_size=history_size, tolerance_grad=0.0,
                                             tolerance_change=0.0), NUM_STEPS, rates,
    )  # fmt: skip
    losses, model = trained(lambda parameters: LBFGS(parameters, lr=0.5, history_size=history_size), NUM_STEPS, rates)
    assert losses == pytest.approx(expected, rel=1e-7)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
    assert losses[-1] < 0.2 * losses[0]  # it learns something


def test_parameters_without_a_gradient_stay_and_what_is_not_convex_is_not_remembered() -> None:
    used, unused = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))
    optimizer = LBFGS([used, unused], lr=1.0, history_size=3)
    for gradient in (1.0, 2.0, 3.0):  # it grows where the parameter shrinks
        used.grad = torch.tensor([gradient])
        optimizer.step()
    assert float(unused.detach()) == 1.0
    assert "changes" not in optimizer.state[used]
    optimizer.step()
    assert unused not in optimizer.state
