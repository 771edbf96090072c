"""recipe=tabular: its metrics are those of their definitions, and its predictions are in the units of the targets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recipes.tabular import Periodic, Predict, ResNet


class Fixed(nn.Module):
    """Return outputs whatever the inputs."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outputs


def test_classes_are_counted_by_class() -> None:
    guesses, labels = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 0, 0, 0, 1, 2])
    scores = torch.nn.functional.one_hot(guesses, 4).float() * 9
    loss, count, metrics = Predict(4).step(Fixed(scores).eval(), (torch.zeros(6, 1), labels))
    assert float(loss) == pytest.approx(-float(scores.log_softmax(1)[torch.arange(6), labels].sum()), rel=1e-5)
    assert (count, int(metrics["accuracy"][0])) == (6, 4)  # type: ignore[index]
    found = Predict(4).finish(metrics)
    assert found["balanced_accuracy"] == pytest.approx((3 / 4 + 0 + 1) / 3)  # class 3 does not occur
    assert found["f1"] == pytest.approx((6 / 7 + 0 + 2 / 3) / 3)
    assert "confusion" not in Predict(4).step(Fixed(scores).train(), (torch.zeros(6, 1), labels))[2]


def test_numbers_are_predicted_in_their_units() -> None:
    task = Predict(2, target_mean=[100.0, 0.0], target_std=[10.0, 1.0])
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 2.0]])
    targets = torch.tensor([[110.0, 0.0], [95.0, 1.0], [90.0, 1.0]])
    model = Fixed(outputs).eval()
    loss, count, metrics = task.step(model, (torch.zeros(3, 1), targets))
    assert float(loss) == pytest.approx((0.5**2 + 1) / 2)
    assert count == 3
    values = task.predict(model, (torch.zeros(3, 1),))["value"]
    torch.testing.assert_close(values, torch.tensor([[110.0, 0], [100, 1], [90, 2]]))
    found = task.finish(metrics)
    assert found["rmse"] == pytest.approx(float((values - targets).square().mean().sqrt()))
    residual, total = (values - targets).square().sum(0), (targets - targets.mean(0)).square().sum(0)
    assert found["r2"] == pytest.approx(float((1 - residual / total).mean()))
    assert float(metrics["mae"][0]) / 3 == pytest.approx(float((values - targets).abs().mean()))  # type: ignore[index]


def test_a_column_of_numbers_is_one_of_several() -> None:
    model, task = Fixed(torch.zeros(3, 1)), Predict(1, [2.0], [1.0])
    assert float(task.step(model, (torch.zeros(3, 1), torch.tensor([1.0, 2.0, 3.0])))[0]) == 2


def test_embedded_numbers_do_not_mix() -> None:
    embed = Periodic(3, frequencies=4, width=5)
    inputs = torch.randn(2, 3)
    other = inputs.clone()
    other[:, 1] += 1
    same = (embed(inputs) == embed(other)).view(2, 3, 5)
    assert same[:, [0, 2]].all()
    assert not same[:, 1].all()
    assert ResNet(3, 2, width=8, depth=1, frequencies=4)(inputs).shape == (2, 2)
