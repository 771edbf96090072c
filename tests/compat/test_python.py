from __future__ import annotations

import os

import pytest

from ddpexp.compat.python import calling_frame, variables_of


def test_the_variables_of_this_process_are_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "1")
    assert variables_of(os.environ)[b"OF_THIS_TEST"] == b"1"
    monkeypatch.delenv("OF_THIS_TEST")
    assert b"OF_THIS_TEST" not in variables_of(os.environ)


def test_the_variables_of_another_environment_are_as_given() -> None:
    assert variables_of({"A": "1"}) == {"A": "1"}


def test_a_function_learns_who_has_called_it() -> None:
    def called() -> str:
        return calling_frame().f_code.co_name

    assert called() == "test_a_function_learns_who_has_called_it"
