"""The section `sweep`: what means nothing is refused with what to type."""

from __future__ import annotations

from ddpexp.config.build import build
from ddpexp.settings.run import SweepSettings
from tests.refusals import refused


def test_for_an_objective_with_its_mode_in_front_the_error_gives_both_keys() -> None:
    with refused("sweep.objective=max:eval/accuracy"):  # fmt: skip
        build(SweepSettings, {"objective": "max:eval/accuracy"}, "sweep")
    assert build(SweepSettings, {"objective": "eval/accuracy", "mode": "max"}, "sweep").mode == "max"
