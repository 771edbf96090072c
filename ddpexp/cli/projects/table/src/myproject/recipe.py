"""A column of a table, a class or a number: the model and the task of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from ddpexp.task import Sums


class Net(nn.Sequential):
    """Two hidden layers. Shapes: (batch, num_features) -> (batch, num_outputs)."""

    def __init__(self, num_features: int, num_outputs: int, width: int) -> None:
        """Build it with `width` units in each hidden layer."""
        hidden = nn.Sequential(nn.Linear(num_features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        super().__init__(hidden, nn.Linear(width, num_outputs))


@dataclass(frozen=True)
class Predict:
    """Cross entropy and accuracy of a class; of a number its squared error, in units of its standard deviation."""

    target_mean: Sequence[float] | None  # of the rows that are trained on; None where the target is a class
    target_std: Sequence[float] | None
    target_columns: Sequence[str]

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Return sums over the batch, in training and in evaluation: ddpexp divides by the counts of all workers."""
        inputs, targets = batch
        outputs = model(inputs)
        if self.target_mean is None or self.target_std is None:
            loss = functional.cross_entropy(outputs, targets, reduction="sum")
            return loss, len(targets), {"accuracy": ((outputs.argmax(1) == targets).sum(), len(targets))}
        mean, std = inputs.new_tensor(self.target_mean), inputs.new_tensor(self.target_std)
        errors = outputs - (targets.view(len(targets), -1) - mean) / std
        return errors.square().mean(1).sum(), len(targets), {"mae": ((errors.abs() * std).mean(1).sum(), len(targets))}

    def predict(self, model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a row for each sample, for `ddpexp predict`: its class and the chance of each, or its numbers."""
        outputs = model(batch[0])
        if self.target_mean is None or self.target_std is None:
            probability = outputs.softmax(1)
            return {"label": probability.argmax(1), "probability": probability}
        values = outputs * outputs.new_tensor(self.target_std) + outputs.new_tensor(self.target_mean)
        return dict(zip(self.target_columns, values.unbind(1), strict=True))
