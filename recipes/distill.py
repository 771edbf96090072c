"""A small network learns from a large one: the teacher is frozen, and part of the model that a run trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from ddpexp.task import Sums


class Distilled(nn.Module):
    """A student and the teacher, whose weights `run.init_from` loads and checkpoints hold."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        """Freeze the teacher."""
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Distilled:
        """Switch the student; the teacher always computes as in evaluation."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the student's scores, in training with the teacher's. Shapes: (batch, classes) each."""
        scores = self.student(inputs)
        if not self.training:
            return scores  # type: ignore[no-any-return]
        with torch.no_grad():
            return scores, self.teacher(inputs)


@dataclass(frozen=True)
class Distill:
    """Cross entropy with the labels and divergence from the teacher, in the proportion `alpha`.

    Source: Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network", 2015.
    """

    temperature: float = 4.0
    alpha: float = 0.9

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.temperature > 0:
            raise ValueError(f"task.temperature={self.temperature} divides the scores: use a number above 0, such as 4")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"task.alpha={self.alpha} is the teacher's share of the loss: use 0 to 1")

    def step(self, model: Distilled, batch: Sequence[Tensor]) -> Sums:
        """Return sums over the batch; in evaluation the loss is the cross entropy alone. Shapes: labels (batch,)."""
        inputs, labels = batch
        found = model(inputs)
        scores, taught = found if isinstance(found, tuple) else (found, None)
        if taught is not None and taught.shape != scores.shape:
            raise ValueError(
                f"the teacher has scores for {taught.shape[1]} classes and the student for {scores.shape[1]}: give "
                "both models the same number of classes"
            )
        loss = functional.cross_entropy(scores.float(), labels, reduction="sum")
        count = len(labels)
        metrics = {"accuracy": ((scores.argmax(1) == labels).sum(), count)}
        if taught is not None:
            soft, wanted = ((one.float() / self.temperature).log_softmax(1) for one in (scores, taught))
            # Times the square of the temperature, so that gradients keep their size when it changes.
            divergence = functional.kl_div(soft, wanted, reduction="sum", log_target=True) * self.temperature**2
            loss = (1 - self.alpha) * loss + self.alpha * divergence
            metrics["agreement"] = ((scores.argmax(1) == taught.argmax(1)).sum(), count)
        return loss, count, metrics

    def predict(self, model: Distilled, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the student's class and the probability of each. Shapes: (batch,), (batch, classes)."""
        probability = model.student(batch[0]).float().softmax(1)
        return {"label": probability.argmax(1), "probability": probability}
