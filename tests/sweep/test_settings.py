"""The section `sweep`: what means nothing is refused with what to type."""

from __future__ import annotations

import pytest

from ddpexp.errors import RefusedError
from ddpexp.sweep.settings import settings_of


def test_for_an_objective_with_its_mode_in_front_the_error_gives_both_keys() -> None:
    with pytest.raises(RefusedError, match=r"^sweep\.objective=max:eval/accuracy is not the name of a metric: type "
                       r"sweep\.mode=max sweep\.objective=eval/accuracy\.$"):  # fmt: skip
        settings_of({"objective": "max:eval/accuracy"})
    assert settings_of({"objective": "eval/accuracy", "mode": "max"}).mode == "max"
