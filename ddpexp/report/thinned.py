"""Thin out what is too much for a page: the points of a curve, and equally spaced items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Curve:
    """A curve.

    Attributes:
        steps: In their order.
        values: At these steps.
        means: Of each two points the mean of all values that they stand for; empty if no point was left out.
    """

    steps: Sequence[int]
    values: Sequence[float]
    means: Sequence[float] = ()

    @classmethod
    def of(cls, steps: Sequence[int], values: Sequence[float]) -> Curve:
        """Return the finite values in the order of their steps, of a step that was repeated the last one."""
        if not all(map(math.isfinite, values)) or sorted(set(steps)) != steps:
            last = dict(zip(steps, values, strict=True))
            points = sorted((step, value) for step, value in last.items() if math.isfinite(value))
            steps, values = [step for step, _ in points], [value for _, value in points]
        return cls(steps, values)

    def thinned(self, most: int) -> Curve:
        """Return at most about `most` points: least and greatest of equal spans, so that spikes stay, and the last.

        A span stands for two points, which are one and the same where it has a single value.
        """
        if len(self.steps) <= most:
            return self
        spans = max(1, most // 2 - 1)
        ends = [number * (len(self.steps) - 1) // spans for number in range(spans + 1)] + [len(self.steps)]
        kept, means = [], []
        for begin, end in pairwise(ends):
            values = self.values[begin:end]
            kept += sorted((begin + values.index(min(values)), begin + values.index(max(values))))
            means.append(sum(values) / len(values))
        return Curve([self.steps[number] for number in kept], [self.values[number] for number in kept], means)


def spaced(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items at equal distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[number * (len(items) - 1) // (most - 1)] for number in range(most)]
