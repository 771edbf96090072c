"""Memory that grows without end, found in a series of sizes. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ddpexp.settings.metrics import MEMORY
from ddpexp.system.text import binary_size_text

_GIB = 1 << 30
_LEAST_POINTS, _LEAST_STEPS = 20, 100
_MOST_POINTS = 200
_SETTLING = 0.1  # of the steps, at the start: libraries and caches get what they need
_EPOCHS = 3  # done, before a growth that the machine has room for is named
_FORESIGHT = 10  # times the steps in which it was seen to grow: further ahead it may end by itself
_PARTS = 5  # of the steps after that: the least size of each is above that of the one before
_LEAST_GROWTH, _LEAST_PART = 1 / 16, 0.05  # GiB, and of the size: less is no reason to do anything
LEAKS = "tensors kept in a list (keep .item()) and Python objects that a data set keeps are the usual reasons"
_STEADY = 0.5  # of the mean growth from part to part: caches that fill up grow less at the end


@dataclass(frozen=True)
class Point:
    """The memory of the largest worker after a step. Units: epochs done, GiB."""

    step: float
    epoch: float
    size: float
    available: float


@dataclass(frozen=True)
class Growth:
    """Memory that has grown steadily. Units: steps, GiB."""

    since: int
    steps: int
    before: float
    now: float
    steps_left: float  # until all memory is used, if nothing changes

    def sentence(self) -> str:
        """Return it in words."""
        grown, now = (binary_size_text(round(size * _GIB)) for size in (self.now - self.before, self.now))
        return (
            f"the memory of a worker grows without end: since step {self.since:,} by {grown}, to {now}; at this rate "
            f"none is left after about {float(f'{max(1, self.steps_left):.2g}'):,.0f} more steps; {LEAKS}"
        )


def point_of(record: Mapping[str, float]) -> Point | None:
    """Return the point of a record; None if it has none."""
    size = record.get(f"{MEMORY}host_greatest", record.get(f"{MEMORY}host"))
    available = record.get(f"{MEMORY}available_least", record.get(f"{MEMORY}available"))
    if size is None or available is None:
        return None
    return Point(record["step"], record.get("epoch", 0.0), size, available)


def growth_of(points: Sequence[Point], num_workers: int = 1, steps_to_do: float = 0) -> Growth | None:
    """Return how memory grows, if that is worth a sentence.

    It is if the growth continues for two epochs after the first one, in which caches fill, or if it uses up all memory
    within the `steps_to_do`. `num_workers` share a machine's memory, and grow alike.
    """
    later = [point for point in points if point.epoch >= 1]
    if later and later[-1].epoch >= _EPOCHS and (found := _steady(later, num_workers)) is not None:
        return found
    found = _steady(points, num_workers)
    is_near = found is not None and found.steps_left < min(steps_to_do, _FORESIGHT * found.steps)
    return found if is_near else None


def _steady(points: Sequence[Point], num_workers: int) -> Growth | None:
    begin = points[0].step + _SETTLING * (points[-1].step - points[0].step) if points else 0
    points = [point for point in points if point.step >= begin]
    if len(points) < _LEAST_POINTS or (steps := points[-1].step - begin) < _LEAST_STEPS:
        return None
    parts: list[list[float]] = [[] for _ in range(_PARTS)]
    for point in points:
        parts[min(_PARTS - 1, int((point.step - begin) / steps * _PARTS))].append(point.size)
    if not all(parts):
        return None
    floors = [min(part) for part in parts]
    rises = [after - before for before, after in pairwise(floors)]
    grown = floors[-1] - floors[0]
    mean = grown / len(rises)
    if min(rises) <= 0 or grown < max(_LEAST_GROWTH, _LEAST_PART * floors[0]) or rises[-1] < _STEADY * mean:
        return None
    a_step = mean * _PARTS / steps * num_workers
    return Growth(int(begin), int(steps), floors[0], points[-1].size, points[-1].available / a_step)


class GrowthWatch:
    """Watches the memory in the records of a start, and says once that it grows without end."""

    def __init__(self, num_workers: int, num_steps: int) -> None:
        """Take how many workers share a machine, and the last step of the run."""
        self._num_workers, self._num_steps = num_workers, num_steps
        self._points: list[Point] = []
        self._told = False

    def add(self, point: Point) -> str:
        """Take the point of a record; return a sentence if there is something new to say."""
        if self._told:
            return ""
        self._points.append(point)
        if len(self._points) > _MOST_POINTS:
            del self._points[1::2]
        if point.size - self._points[0].size < _LEAST_GROWTH:
            return ""
        found = growth_of(self._points, self._num_workers, self._num_steps - point.step)
        self._told = found is not None
        return "" if found is None else found.sentence()
