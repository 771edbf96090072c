"""Which values differ between runs, and over the steps of one."""

from __future__ import annotations

from ddpexp.config.keys import MISSING
from ddpexp.run.differences import Period, Value, differing, flat, over_steps


def test_values_are_those_of_the_leaves() -> None:
    assert flat({"model": {"width": [16, 32], "bias": None}, "callbacks": {}}) == {
        "model.width": [16, 32],
        "model.bias": None,
    }


def test_keys_differ_by_their_values_in_the_order_of_the_first_run_that_has_them() -> None:
    runs = [{"a": 1, "b": True, "c": "x"}, {"a": 1.0, "b": 1, "c": "x", "d": None}, {"a": 1, "b": True, "c": "x"}]
    assert differing(runs) == {"b": (True, 1, True), "d": (MISSING, None, MISSING)}
    assert differing(runs[:1]) == {}
    assert differing([]) == {}


def test_a_key_has_a_value_from_the_step_on_at_which_it_has_changed() -> None:
    periods = [
        Period(0, {"optimizer.lr": 0.1, "trainer.gpus": 1, "trainer.seed": 0}),
        Period(20, {"optimizer.lr": 0.1, "trainer.gpus": 2, "trainer.seed": 0}),
        Period(30, {"optimizer.lr": 0.01, "trainer.gpus": 2, "trainer.seed": 0}, is_exact=False),
        Period(40, {"optimizer.lr": 0.1, "trainer.seed": 0}),
    ]
    assert over_steps(periods) == {
        "optimizer.lr": (Value(0, 0.1), Value(30, 0.01, is_exact=False), Value(40, 0.1)),
        "trainer.gpus": (Value(0, 1), Value(20, 2), Value(40, MISSING)),
    }
    assert over_steps(periods[:1]) == {}
