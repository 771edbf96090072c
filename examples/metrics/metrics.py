"""Three kinds of points: AUROC, average precision, F1 of each class, the confusion matrix and perplexity."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision

import ddpexp
from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import EvalSums

CLASSES = ("left", "middle", "right")


def load(samples: int) -> Splits:
    rows = torch.randn(samples, 4)
    labels = (rows.sum(1) > -1).long() + (rows.sum(1) > 1).long()
    cut = samples // 5
    parts = {"test": slice(0, cut), "eval": slice(cut, 2 * cut), "train": slice(2 * cut, None)}
    arrays = {name: Arrays((rows[part], labels[part])) for name, part in parts.items()}
    return Splits(train=arrays["train"], evals={"eval": arrays["eval"], "test": arrays["test"]})


class Classify:
    def __init__(self) -> None:
        self.auroc = MulticlassAUROC(len(CLASSES))
        self.precision = MulticlassAveragePrecision(len(CLASSES))

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> EvalSums:
        rows, labels = batch
        scores = model(rows)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        predicted = scores.argmax(1)
        metrics: dict[str, Any] = {"accuracy": ((predicted == labels).sum(), len(labels))}  # a mean: sum and count
        if not model.training:
            pairs = labels * len(CLASSES) + predicted
            matrix = torch.bincount(pairs, minlength=len(CLASSES) ** 2).view(len(CLASSES), -1)
            metrics["confusion"] = matrix  # integers of any shape are added up
            metrics["auroc"] = ddpexp.metric_update(self.auroc, scores, labels)
            metrics["average_precision"] = ddpexp.metric_update(self.precision, scores, labels)
        return loss, len(labels), metrics

    def finish(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        loss, count = sums["loss"]
        confusion = sums["confusion"]  # rows: what they are; columns: what the model takes them for
        f1 = 2 * confusion.diagonal() / (confusion.sum(0) + confusion.sum(1))
        values = {f"f1/{name}": value for name, value in zip(CLASSES, f1, strict=True)}
        return {"perplexity": math.exp(loss / count), "f1": f1.mean(), **values}
