"""One training as a point in the space of what may be combined, which points there are, and a few.

That cover all pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ddpexp.data.order import Permutation

GLOBAL_BATCH_SIZE, STEPS, SEED = 48, 10, 5
"""As in the recipe's YAML. Ten steps of 48 are two and a half epochs of 192 samples."""

MICRO_BATCH_SIZE_EXACT = 4
"""In `trainer.reduction=exact` micro-batches are the same at every number of workers.

12 of them, so 1, 2, 3 and 4 divide them.
"""


@dataclass(frozen=True)
class Case:
    """One training; each field is a dimension, its first value in `VALUES` the ordinary one."""

    workers: int = 1
    optimizer: str = "nesterov"
    accumulation: int = 1
    clip: float | None = None
    schedule: str = "constant"
    precision: str = "fp32"
    middle: str = "plain"
    weights: str = "free"
    embedding: str = "none"
    numbers: str = "fp32"
    task: str = "Plain"
    counts: str = "int"
    ema: float | None = None
    nonfinite: str = "stop"
    rest: int = 0
    reduction: str = "fast"
    log_every: int = 1

    @property
    def two(self) -> bool:
        """Whether there are two networks."""
        return self.task in ("Pair", "Game")

    @property
    def by_hand(self) -> bool:
        """Whether the task has a `train_step`."""
        return self.task in ("Twice", "Pair", "Game")

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward pass."""
        if self.reduction == "exact":
            return MICRO_BATCH_SIZE_EXACT
        return GLOBAL_BATCH_SIZE // (self.workers * self.accumulation)

    @property
    def num_train(self) -> int:
        """Samples to train on: whole global batches, or some more that each epoch leaves out."""
        return 4 * GLOBAL_BATCH_SIZE + self.rest

    @property
    def num_eval(self) -> int:
        """Samples to evaluate on: with a rest the workers have different numbers of them."""
        return 24 + self.rest

    @property
    def broken(self) -> bool:
        """Whether a sample is not a number."""
        return self.nonfinite == "broken"

    @property
    def allowed(self) -> bool:
        """Whether torch and the documentation allow the combination."""
        if (
            self.embedding == "sparse"
        ):  # torch: neither momentum nor weight decay nor half precision's scaler of sparse gradients
            if self.optimizer not in ("plain_sgd", "adagrad") or self.precision == "fp16" or self.numbers == "bf16":
                return False
            if self.reduction == "exact":  # refused: docs/exactness.md
                return False
        if self.numbers == "complex" and (self.reduction == "exact" or self.precision == "fp16"):
            return False  # refused: docs/exactness.md; torch scales no complex gradients
        if self.numbers in ("fp64", "bf16") and self.precision != "fp32":
            return False  # autocast is for fp32 weights
        return self.reduction == "fast" or self.accumulation == 1  # there it follows from the size of a micro-batch

    def words(self) -> list[str]:
        """Return its overrides."""
        overrides = {
            "trainer.gpus": self.workers,
            "optimizer": f"reference_{self.optimizer}",
            "trainer.micro_batch_size": self.micro_batch_size,
            "trainer.clip_grad_norm": self.clip,
            "scheduler": self.schedule,
            "trainer.precision": self.precision,
            "model.middle": self.middle,
            "model.weights": self.weights,
            "model.embedding": self.embedding,
            "model.numbers": self.numbers,
            "model.two": self.two,
            "task._target_": f"parts.{self.task}",
            "task.counts": self.counts,
            "trainer.ema_decay": self.ema,
            "trainer.nonfinite": "stop" if self.nonfinite == "stop" else "skip",
            "data.train": self.num_train,
            "data.test": self.num_eval,
            "data.broken": self.broken,
            "trainer.reduction": self.reduction,
            "trainer.log_every": self.log_every,
        }
        plain = {None: "null", True: "true", False: "false"}
        return [
            f"{key}={plain[value] if value is None or isinstance(value, bool) else value}"
            for key, value in overrides.items()
        ]

    def __str__(self) -> str:
        """Return what is not ordinary."""
        other = [
            f"{field.name}={value}" for field in fields(self) if (value := getattr(self, field.name)) != field.default
        ]
        return " ".join(other) or "ordinary"


VALUES: dict[str, tuple[Any, ...]] = {
    "workers": (1, 2, 3, 4),
    "optimizer": ("nesterov", "plain_sgd", "adam", "adam_decoupled", "rmsprop", "adagrad"),
    "accumulation": (1, 2, 4),
    "clip": (None, 0.2),
    "schedule": ("constant", "cosine", "onecycle"),
    "precision": ("fp32", "bf16", "fp16"),
    "middle": ("plain", "batchnorm", "dropout"),
    "weights": ("free", "tied", "frozen"),
    "embedding": ("none", "dense", "sparse"),
    "numbers": ("fp32", "fp64", "bf16", "complex"),
    "task": ("Plain", "Groups", "Twice", "Pair", "Game"),
    "counts": ("int", "tensor"),
    "ema": (None, 0.8),
    "nonfinite": ("stop", "skip", "broken"),
    "rest": (0, 7),
    "reduction": ("fast", "exact"),
    "log_every": (1, 4),
}

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def alone() -> list[Case]:
    """Return the ordinary case, and each value of each dimension by itself, at every number of workers."""
    ordinary = [Case(workers=workers) for workers in VALUES["workers"]]
    others = [
        case
        for name, values in VALUES.items()
        for value in values[1:]
        for workers in VALUES["workers"]
        if name != "workers"
        # A sparse gradient has no momentum, so that value comes with the optimizer that has none.
        for case in [
            Case(**{"workers": workers, name: value, **({"optimizer": "plain_sgd"} if value == "sparse" else {})})
        ]
    ]
    return ordinary + others


def pairwise() -> list[Case]:
    """Return few cases in which every allowed pair of values occurs; always the same ones.

    Greedy: each case starts from the first pair that is missing, and takes for one dimension after the other the value
    that brings the most missing pairs.
    """
    missing = dict.fromkeys(_pairs())
    cases: list[Case] = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in sorted(VALUES, key=lambda name: -len(VALUES[name])):
            if name not in chosen:
                fits = [value for value in VALUES[name] if _extends({**chosen, name: value})]
                # Ties go to the values in turn, so that none is preferred for standing first.
                turn = len(cases) % len(fits)
                chosen[name] = max(
                    fits[turn:] + fits[:turn],
                    key=lambda value: sum(_pair((name, value), known) in missing for known in chosen.items()),
                )
        case = Case(**chosen)
        cases.append(case)
        for first, second in itertools.combinations(chosen.items(), 2):
            missing.pop(_pair(first, second), None)
    return cases


def _pair(first: tuple[str, Any], second: tuple[str, Any]) -> Pair:
    return (first, second) if first[0] < second[0] else (second, first)


def _pairs() -> Iterator[Pair]:
    for first, second in itertools.combinations(VALUES, 2):
        for one, other in itertools.product(VALUES[first], VALUES[second]):
            if _extends({first: one, second: other}):
                yield _pair((first, one), (second, other))


def _extends(chosen: dict[str, Any]) -> bool:
    """Return whether a case with these values is allowed; a sparse embedding only needs an optimizer for it."""
    if "optimizer" in chosen:
        return Case(**chosen).allowed
    return any(Case(**chosen, optimizer=optimizer).allowed for optimizer in VALUES["optimizer"])


def spread(count: int) -> list[Case]:
    """Return so many allowed cases of the whole product, far from one another; always the same ones."""
    sizes = [len(values) for values in VALUES.values()]
    order = Permutation(math.prod(sizes), seed=0, epoch=0)
    places = np.unravel_index(order(np.arange(count * 20)), sizes)
    columns = [[values[number] for number in place] for values, place in zip(VALUES.values(), places, strict=True)]
    cases = [Case(**dict(zip(VALUES, row, strict=True))) for row in zip(*columns, strict=True)]
    return [case for case in cases if case.allowed][:count]
