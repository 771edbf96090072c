"""What a range test of the learning rate says."""

from __future__ import annotations

import math
import random

import pytest

from ddpexp.cli import verbs
from ddpexp.cli.find import arguments_of
from ddpexp.errors import DdpexpError
from ddpexp.find.learning_rate import as_dict, lines
from ddpexp.find.range_test import Curve, Divergence, Rising, curve_of, rounded
from tests.refusals import refused

STEPS = 100
LOW, HIGH = 1e-6, 10.0


def losses(best: float, noise: float = 0.0, seed: int = 0) -> list[float]:
    """Return losses that fall fastest at a rate, are lowest at ten times that, and then grow."""
    draw = random.Random(seed)
    found = []
    for step in range(STEPS):
        decades = math.log10(Rising(LOW, HIGH).factor(step, STEPS) / best)
        falling = 2.3 - 2 / (1 + math.exp(-4 * decades))
        found.append(falling + math.exp(4 * (decades - 1.5)) + draw.gauss(0, noise))
    return found


def test_rates_grow_by_the_same_factor() -> None:
    rates = [Rising(LOW, HIGH).factor(step, 8) for step in range(8)]
    assert rates == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10])


@pytest.mark.parametrize("best", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_rate_of_the_steepest_descent_is_suggested(best: float, noise: float) -> None:
    for seed in range(10):
        curve = curve_of(losses(best, noise, seed), LOW, HIGH, STEPS, failed=False)
        assert curve.has_diverged
        assert best / 4 < curve.suggestion() < 4 * best
        assert curve.rates[curve.lowest] > curve.suggestion()


def test_a_single_bad_batch_is_no_slope() -> None:
    found = losses(1e-2)
    found[20] = 9.0
    assert curve_of(found, LOW, HIGH, STEPS, failed=False).suggestion() == pytest.approx(1e-2, rel=1.0)


def test_divergence_ends_the_curve() -> None:
    found = [*losses(1e-3)[:60], math.nan, 1.0]
    curve = curve_of(found, LOW, HIGH, STEPS, failed=False)
    assert (len(curve.losses), curve.has_diverged) == (60, True)
    divergence = Divergence()
    assert not any(divergence.add(2.0) for _ in range(10))
    assert any(divergence.add(20.0) for _ in range(10))


def test_a_loss_that_grows_from_the_start_suggests_nothing() -> None:
    growing = [2.0 + 0.01 * step for step in range(STEPS)]
    with refused("does not fall", DdpexpError):
        curve_of(growing, LOW, HIGH, STEPS, failed=False).suggestion()
    with refused("does not fall", DdpexpError):
        curve_of([math.nan], LOW, HIGH, STEPS, failed=True).suggestion()


def test_a_loss_that_stays_suggests_nothing() -> None:
    draw = random.Random(1)
    flat = [2.3 + draw.gauss(0, 0.05) for _ in range(STEPS)]
    with refused("--high", DdpexpError):
        Curve([Rising(LOW, HIGH).factor(step, STEPS) for step in range(STEPS)], flat, False).suggestion()


def test_the_answer_has_the_override_to_type() -> None:
    curve = curve_of(losses(1e-3), LOW, HIGH, STEPS, failed=False)
    rate = rounded(curve.suggestion())
    assert as_dict(curve, rate)["overrides"] == {"suggestion": f"optimizer.lr={rate:g}"}
    text = "\n".join(lines(curve, rate))
    assert f"optimizer.lr={rate:g} " in text
    assert "diverges above" in text
    falling = curve_of(losses(1e2)[:STEPS], LOW, HIGH, STEPS, failed=False)
    assert "the loss still falls" in "\n".join(lines(falling, 1.0))


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["what", "recipe=mnist"], "find what"),
        (["batch_size", "recipe=mnist", "--low", "1e-3"], "find batch_size --low"),
        (["lr", "recipe=mnist", "--low", "2", "--high", "1"], "find lr --low 2"),
        (["lr", "recipe=mnist", "--low", "0"], "find --low"),
        (["lr", "recipe=mnist", "--steps", "3"], "find --steps"),
        (["lr", "recipe=mnist", "--output", "picture.jpg"], "find --output"),
    ],
)
def test_options_that_mean_nothing_are_refused(words: list[str], about: str) -> None:
    with refused(about):
        arguments_of(verbs.BY_NAME["find"].parse(words, ["ddpexp", "find", *words]))
