"""Times of the training thread: each moment belongs to one phase, whatever the order of the marks."""

from __future__ import annotations

import random

import pytest
import torch

from ddpexp.distributed import times as module
from ddpexp.distributed.phases import (
    BACKWARD,
    CHECKPOINT,
    COLLECTIVE,
    DATA,
    EVALUATION,
    FORWARD,
    OTHER,
    PHASES,
    RECORD,
    UPDATE,
)
from ddpexp.distributed.times import MOST_STEPS, Times

CPU = torch.device("cpu")


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self.times = Times()
        self.times.start(CPU)

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_step_is_divided_into_its_phases(clock: Clock) -> None:
    times = clock.times
    for _ in range(3):
        for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4)):
            times.begin(phase)
            clock.spend(seconds)
        with times.collective:
            clock.spend(8)
        clock.spend(16)  # the backward pass continues
        times.begin(UPDATE)
        clock.spend(32)
        times.end_step()
        clock.spend(64)
    with times.apart(RECORD):
        clock.spend(128)
        window = times.take()
    assert window.num_steps == 3
    assert window.collectives == [8, 8, 8]
    shown = {PHASES[number]: seconds for number, seconds in enumerate(window.phases) if seconds}
    assert shown == {
        "data": 3, "forward": 6, "backward": 60, "collective": 24, "optimizer": 96, "other": 192,
    }  # fmt: skip
    times.end_step()
    with times.apart(RECORD):
        assert times.take().phases[RECORD] == 128  # of the record before, which had not ended


def test_what_is_done_apart_belongs_to_one_phase(clock: Clock) -> None:
    times = clock.times
    with times.apart(EVALUATION):
        times.begin(FORWARD)
        clock.spend(1)
        with times.collective:
            clock.spend(2)
        with times.apart(CHECKPOINT):
            clock.spend(4)
        clock.spend(8)
    clock.spend(16)
    with times.collective:
        clock.spend(32)
    times.end_step()
    with times.collective:
        clock.spend(64)
    times.end_step()
    with times.apart(RECORD):
        window = times.take()
    assert window.collectives == [-32, 64]
    assert window.phases[EVALUATION] == 15
    assert sum(window.phases) == 127


def test_nothing_is_marked_before_the_start() -> None:
    times = Times()
    times.begin(FORWARD)
    with times.collective, times.apart(RECORD):
        times.end_step()
    assert not times.started
    assert times.take() == (0, [0.0] * len(PHASES), [])


@pytest.mark.parametrize("seed", range(20))
def test_all_time_is_counted_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    # A plain program beside it: the phase at each moment is that of a list.
    monkeypatch.setattr(module, "_MOST_MARKS", seed % 7)  # added up in pieces
    clock, draw = Clock(monkeypatch), random.Random(seed)
    times, expected, steps, inside = clock.times, [0.0] * len(PHASES), [0.0], 0.0
    phase, sign = OTHER, 1
    for _ in range(400):
        seconds = draw.choice((0.0, 0.25, 0.5, 2.0))
        match draw.randrange(5):
            case 4:
                with times.apart(CHECKPOINT):
                    clock.spend(seconds)
                expected[CHECKPOINT] += seconds
                phase, sign = OTHER, -1
            case 0:
                with times.collective:
                    clock.spend(seconds)
                expected[COLLECTIVE] += seconds
                inside += seconds
            case 1:
                times.end_step()
                steps, inside, sign, phase = [*steps, max(inside, 1e-12) * sign if sign < 0 else inside], 0.0, 1, OTHER
                clock.spend(seconds)
                expected[phase] += seconds
            case 2:
                phase = draw.choice((DATA, FORWARD, BACKWARD, UPDATE, OTHER))
                times.begin(phase)
                clock.spend(seconds)
                expected[phase] += seconds
            case _:
                clock.spend(seconds)
                expected[phase] += seconds
    with times.apart(RECORD):
        window = times.take()
    assert window.phases == expected
    assert window.num_steps == len(steps) - 1
    assert window.collectives == steps[1:][-MOST_STEPS:]
