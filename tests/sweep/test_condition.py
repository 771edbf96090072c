"""Conditions on runs: what they mean, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from ddpexp.config.keys import MISSING
from ddpexp.errors import RefusedError
from ddpexp.sweep.condition import names_in, parse_condition

RUN: dict[str, Any] = {
    "eval/accuracy": 0.95, "optimizer.lr": 0.01, "status": "done", "tags": ["paper", "first"],
    "trainer.max_steps": None, "trainer.compile": True, "typed": "1e-3", "eval/loss": float("nan"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("eval/accuracy>0.9 and optimizer.lr<0.1", True),
        ("eval/accuracy > 0.95", False),
        ("eval/accuracy >= .95", True),
        ("eval/accuracy<=95e-2", True),
        ("optimizer.lr==1e-2", True),
        ("optimizer.lr!=0.01", False),
        ("typed==0.001", True),
        ("status==done", True),
        ("status == 'Done'", True),
        ('status!="done"', False),
        ("trainer.max_steps==null", True),
        ("trainer.max_steps<5", False),
        ("trainer.compile==true", True),
        ("trainer.compile==1", False),
        ("tags==paper", True),
        ("tags!=paper", False),
        ("tags==second", False),
        ("eval/loss==nan", True),
        ("eval/loss<1 or eval/loss>=1", False),
        ("not status==done", False),
        ("NOT (status==failed OR optimizer.lr>1)", True),
        ("status==done or status==failed and optimizer.lr>1", True),  # and binds more than or
        ("(status==done or status==failed) and optimizer.lr>1", False),
        ("not status==failed and optimizer.lr>1", False),  # and not more than both
        ("nothing==1", False),
        ("nothing!=1", False),  # what a run does not have fulfills no comparison
        ("not nothing==1", True),
    ],
)
def test_a_condition_means_what_it_says(text: str, holds: bool) -> None:
    assert parse_condition(text).holds(lambda name: RUN.get(name, MISSING)) is holds


@pytest.mark.parametrize(
    ("text", "reason", "suggestion"),
    [
        ("a=1", "'='", "Type == in place of =."),
        ("a==1 && b==2", "'&&'", "Type and in place of &&."),
        ("a==1 || b==2", "'||'", "Type or in place of ||."),
        ("! a==1", "'!'", "Type not in place of !."),
        ("a is 1", "'is'", "Type == in place of is."),
        ("0.9<a", "'0.9'", "The name stands first"),
        ("0.1<a<0.5", "'0.1'", "The name stands first"),
        ("a>0.1<0.5", "'<'", "Type and between"),
        ("a", "behind a is missing", ""),
        ("a==", "behind a== is missing", ""),
        ("", "a name is missing", ""),
        ("not", "a name is missing", ""),
        ("and==1", "'and'", ""),
        ("a==and", "'and'", ""),
        ("(a==1", "a ) is missing", ""),
        ("a==1)", "a ) too many", ""),
        ("a==1 b==2", "before 'b'", ""),
        ("a<done", "for numbers", "Use == or !=."),
        ("a=='x", "a ' that is not closed", ""),
        ("__import__('os').remove('x')", "'('", ""),
        ("(" * 100 + "a==1" + ")" * 100, "nested too deeply", ""),
        ("not " * 100 + "a==1", "nested too deeply", ""),
    ],
)
def test_what_is_no_condition_is_refused_with_what_is_wrong(text: str, reason: str, suggestion: str) -> None:
    with pytest.raises(RefusedError) as found:
        parse_condition(text)
    assert reason in found.value.reason
    assert suggestion in found.value.suggestion
    assert found.value.place == f"--where {text!r}"


def test_the_names_of_a_condition_are_those_that_it_compares() -> None:
    assert list(names_in(parse_condition("not (a/b<1 or c.d==x) and e!=2"))) == ["a/b", "c.d", "e"]
