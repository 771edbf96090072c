"""The section `sweep`: what means nothing is refused with what to type."""

from __future__ import annotations

from ddpexp.sweep.settings import settings_of
from tests.refusals import refused


def test_for_an_objective_with_its_mode_in_front_the_error_gives_both_keys() -> None:
    with refused("sweep.objective=max:eval/accuracy"):  # fmt: skip
        settings_of({"objective": "max:eval/accuracy"})
    assert settings_of({"objective": "eval/accuracy", "mode": "max"}).mode == "max"
