"""A column of a table, a class or numbers, predicted from the others by a residual network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from ddpexp.task import EvalSums


class Periodic(nn.Module):
    """Each number as cosines and sines of learned frequencies, mixed by a layer of its own.

    Source: Gorishniy, Rubachev and Babenko, "On embeddings for numerical features in tabular deep learning", 2022.
    """

    def __init__(self, num_features: int, frequencies: int, width: int, scale: float = 0.1) -> None:
        """Build with `frequencies` per feature, drawn with the standard deviation `scale`."""
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(num_features, frequencies) * scale)
        self.mix = nn.Parameter(torch.randn(num_features, 2 * frequencies, width) / math.sqrt(2 * frequencies))

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed. Shapes: (batch, num_features) -> (batch, num_features * width)."""
        angles = 2 * math.pi * self.frequencies * inputs[..., None]
        waves = torch.cat((angles.cos(), angles.sin()), -1)
        return functional.relu(torch.einsum("nfw,fwo->nfo", waves, self.mix)).flatten(1)


class Block(nn.Module):
    """Two layers whose result is added to their input."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        """Build it."""
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Compute. Shapes: (batch, width) -> the same."""
        return x + self.down(self.dropout(functional.relu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A residual network for rows of numbers.

    Source: Gorishniy et al., "Revisiting deep learning models for tabular data", 2021.
    """

    fsdp_blocks = ("Block",)

    def __init__(
        self,
        num_features: int,
        num_outputs: int,
        width: int = 128,
        depth: int = 3,
        dropout: float = 0.1,
        frequencies: int = 0,
    ) -> None:
        """Build it; with `frequencies` above 0 each feature is embedded by `Periodic` first."""
        super().__init__()
        embedded = 8
        self.embed = Periodic(num_features, frequencies, embedded) if frequencies else None
        self.input = nn.Linear(num_features * (embedded if frequencies else 1), width)
        self.blocks = nn.Sequential(*(Block(width, 2 * width, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute. Shapes: (batch, num_features) -> (batch, num_outputs)."""
        x = inputs if self.embed is None else self.embed(inputs)
        return self.head(functional.relu(self.norm(self.blocks(self.input(x)))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Predict:
    """Cross entropy where targets are classes, else the squared error of numbers in units of their standard deviation.

    `target_mean` and `target_std` are those of the targets that are trained on; None where they are classes.
    """

    num_outputs: int
    target_mean: Sequence[float] | None = None
    target_std: Sequence[float] | None = None
    label_smoothing: float = 0.0

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> EvalSums:
        """Return sums over the batch. Shapes: inputs (batch, features), targets (batch[, columns])."""
        inputs, targets = batch
        outputs = model(inputs).float()
        if targets.dtype == torch.int64:
            return self._of_classes(outputs, targets, model.training)
        return self._of_numbers(outputs, targets.view(len(targets), -1), model.training)

    def _of_classes(self, scores: Tensor, labels: Tensor, training: bool) -> EvalSums:
        smoothing = self.label_smoothing if training else 0.0
        loss = functional.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
        guesses = scores.argmax(1)
        metrics: dict[str, Any] = {"accuracy": ((guesses == labels).sum(), len(labels))}
        if not training:
            places = labels * self.num_outputs + guesses
            metrics["confusion"] = torch.bincount(places, minlength=self.num_outputs**2)
        return loss, len(labels), metrics

    def _of_numbers(self, outputs: Tensor, targets: Tensor, training: bool) -> EvalSums:
        mean, std = self._scale(targets.device)
        wanted = (targets - mean) / std
        errors = outputs - wanted
        count = len(targets)
        metrics: dict[str, Any] = {"mae": ((errors.abs() * std).mean(1).sum(), count)}
        if not training:
            metrics["columns"] = (torch.stack([errors.square().sum(0), wanted.sum(0), wanted.square().sum(0)]), count)
        return errors.square().mean(1).sum(), count, metrics

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return what is no mean: balanced accuracy and F1 over the classes, or RMSE and R2 over the columns."""
        if "confusion" in sums:
            table = sums["confusion"].view(self.num_outputs, self.num_outputs).double()
            right, of_class, guessed = table.diag(), table.sum(1), table.sum(0)
            there = of_class > 0
            f1 = 2 * right / (of_class + guessed).clamp(min=1)
            balanced = (right / of_class.clamp(min=1))[there].mean()
            return {"balanced_accuracy": float(balanced), "f1": float(f1[there].mean())}
        (squares, total, total_squares), count = sums["columns"]
        _, std = self._scale(torch.device("cpu"))
        spread = (total_squares / count - (total / count).square()).clamp(min=0)
        r2 = torch.where(spread > 0, 1 - squares / count / spread.clamp(min=1e-30), torch.nan)
        return {"rmse": float((squares / count * std.double().square()).mean().sqrt()), "r2": float(r2.mean())}

    def predict(self, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the class and the probability of each, or the numbers. Shapes: (batch,), (batch, outputs)."""
        outputs = model(batch[0]).float()
        if self.target_mean is None:
            probability = outputs.softmax(1)
            return {"label": probability.argmax(1), "probability": probability}
        mean, std = self._scale(outputs.device)
        return {"value": outputs * std + mean}

    def _scale(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the numbers. Shapes: (targets,) each."""
        mean = self.target_mean if self.target_mean is not None else [0.0] * self.num_outputs
        std = self.target_std if self.target_std is not None else [1.0] * self.num_outputs
        return torch.tensor(list(mean), device=device), torch.tensor(list(std), device=device)
