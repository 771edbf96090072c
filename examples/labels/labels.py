"""Labels that are rare: several of them a sample, or one of classes of very different sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import EvalSums

Rows = tuple[Tensor, Tensor]  # Shapes: (batch, 8), and (batch, labels) 0 or 1, or (batch,) classes


def draw(count: int, seed: int, labels: int) -> Rows:
    """Draw rows, and what holds for each: of the first label for about one in two rows, of each next one for fewer."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 8, generator=generator)
    noise = torch.randn(count, labels, generator=generator) * 0.3
    return rows, (rows[:, :labels] + noise > torch.arange(labels) * 0.6).float()


def first_of(rows: Rows) -> Rows:
    """Make classes of labels: the rarest that holds, else class 0."""
    inputs, labels = rows
    return inputs, (labels * torch.arange(1, labels.shape[1] + 1)).amax(1).long()


def prepare(train: int, test: int, labels: int) -> dict[str, Any]:
    """Return the weights by which the rare ones count as much as the frequent ones, as facts of the training data."""
    several = draw(train, 0, labels)
    holds, classes = several[1].sum(0), torch.bincount(first_of(several)[1], minlength=labels + 1)
    facts = {
        "positive_weights": ((train - holds) / holds).tolist(),
        "class_weights": (train / (len(classes) * classes)).tolist(),
    }
    return {"name": "rows with labels", "train": train, "test": test, "labels": labels, "facts": facts}


def load_labels(prepared: Mapping[str, Any]) -> Splits:
    train, test = (draw(prepared[part], seed, prepared["labels"]) for seed, part in enumerate(("train", "test")))
    return Splits(Arrays(train), {"eval": Arrays(test)})


def load_classes(prepared: Mapping[str, Any]) -> Splits:
    train, test = (draw(prepared[part], seed, prepared["labels"]) for seed, part in enumerate(("train", "test")))
    return Splits(Arrays(first_of(train)), {"eval": Arrays(first_of(test))})


class SeveralLabels:
    """Each label by itself: a sample may have all of them, or none."""

    def __init__(self, positive_weights: Sequence[float]) -> None:
        self.positive_weights = torch.tensor(positive_weights)

    def step(self, model: nn.Module, batch: Rows) -> EvalSums:
        inputs, labels = batch
        scores = model(inputs).float()
        weights = self.positive_weights.to(scores.device)
        loss = functional.binary_cross_entropy_with_logits(scores, labels, pos_weight=weights, reduction="sum")
        found = scores > 0
        metrics: dict[str, Any] = {"all_right": ((found == labels.bool()).all(1).sum(), len(labels))}
        if not model.training:
            right = (found & labels.bool()).sum(0)
            metrics["right_found_there"] = torch.stack([right, found.sum(0), labels.long().sum(0)])
        return loss, labels.numel(), metrics  # the mean over samples and labels, as BCEWithLogitsLoss has it

    def finish(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        right, found, there = sums["right_found_there"]
        f1 = 2 * right / (found + there)
        return {"f1": f1.mean(), **{f"f1/{number}": value for number, value in enumerate(f1)}}

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        probability = model(batch[0]).sigmoid()
        return {"labels": probability > 0.5, "probability": probability}


class WeightedClasses:
    """One class a sample; the loss is `CrossEntropyLoss(weight)` of the whole global batch."""

    def __init__(self, class_weights: Sequence[float]) -> None:
        self.class_weights = torch.tensor(class_weights)

    def step(self, model: nn.Module, batch: Rows) -> EvalSums:
        inputs, labels = batch
        scores = model(inputs).float()
        weights = self.class_weights.to(scores.device)
        loss = functional.cross_entropy(scores, labels, weights, reduction="sum")
        metrics: dict[str, Any] = {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}
        if not model.training:
            right = torch.bincount(labels[scores.argmax(1) == labels], minlength=len(weights))
            metrics["right_there"] = torch.stack([right, torch.bincount(labels, minlength=len(weights))])
        return loss, weights[labels].sum(), metrics  # a mean over weights: the count depends on the samples

    def finish(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        right, there = sums["right_there"]
        return {"balanced_accuracy": (right / there).mean()}
