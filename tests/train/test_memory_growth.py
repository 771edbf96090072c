"""Memory that grows without end is named from a series of sizes; caches that fill and noise are not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ddpexp.train.memory_growth import GrowthWatch, Point, growth_of, point_of
from ddpexp.train.verdict import verdict_of


def series(size: Callable[[float], float], steps: int = 2000, every: int = 10, epoch: int = 200) -> list[Point]:
    """Return the points of a run whose memory is a function of the step, with noise of 4 MiB."""
    draw = random.Random(0)
    return [
        Point(step, step / epoch, size(step) + draw.uniform(0, 1 / 256), 8.0) for step in range(every, steps + 1, every)
    ]


LEAKS: dict[str, Callable[[float], float]] = {
    "steady": lambda step: 1 + step / 10_000,
    "saw": lambda step: 1 + step / 10_000 + 0.05 * (step % 100) / 100,
    "each epoch": lambda step: 1 + 0.03 * (step // 200),
}
SOUND: dict[str, Callable[[float], float]] = {
    "constant": lambda step: 2.0,
    "saw": lambda step: 2 + 0.3 * (step % 300) / 300,
    "a cache that fills in the first epoch": lambda step: 1 + min(step, 200) / 50,
    "pages that become its own": lambda step: 3 - 2 * 0.995**step,
    "evaluations": lambda step: 1 + (1.5 if step % 200 < 20 else 0),
    "little": lambda step: 1 + step / 100_000,
    "once": lambda step: 1 + (step > 1500),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_named(name: str) -> None:
    growth = growth_of(series(LEAKS[name]))
    assert growth is not None
    assert growth.since < 600
    assert growth.now > growth.before


@pytest.mark.parametrize("name", SOUND)
def test_other_memory_is_not(name: str) -> None:
    assert growth_of(series(SOUND[name])) is None


def test_in_the_first_epoch_only_what_fills_the_machine_is_named() -> None:
    points = series(LEAKS["steady"], steps=10_000, epoch=100_000)
    assert growth_of(points) is None
    assert growth_of(points, steps_to_do=10_000) is None  # 8 GiB last for 80,000 steps
    for num_workers, left in ((1, 80_000), (4, 20_000)):
        found = growth_of(points, num_workers, steps_to_do=left * 1.2)
        assert found is not None
        assert found.steps_left == pytest.approx(left, rel=0.1)


def test_it_is_said_once_and_soon() -> None:
    watch = GrowthWatch(1, 100_000)
    said = [(point.step, text) for point in series(LEAKS["steady"], steps=20_000) if (text := watch.add(point))]
    assert len(said) == 1
    assert said[0][0] <= 1200
    assert "the memory of a worker grows without end" in said[0][1]
    quiet = GrowthWatch(1, 100_000)
    assert not any(map(quiet.add, series(SOUND["saw"], steps=20_000)))


def test_the_verdict_names_it_from_the_records() -> None:
    records = [
        {"step": p.step, "epoch": p.epoch, "memory/host": p.size, "memory/available": p.available, "times/forward": 0.0}
        for p in series(LEAKS["steady"])
    ]
    assert point_of({"step": 1.0}) is None
    verdict = verdict_of(records)
    assert verdict is not None
    assert verdict.phase == "memory"
    assert verdict.factor > 1.1
    assert "grows without end" in verdict.sentence({}, {})
