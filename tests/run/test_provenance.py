"""What a run was trained with, and what can change its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from ddpexp.config.compare import rules_of
from ddpexp.config.keys import MISSING
from ddpexp.run.difference_texts import texts
from ddpexp.run.provenance import GROUPS, Source, differences, is_decisive, provenance, without_inner

RULES = rules_of({"strategy": {"kind": "ddp"}})


def start(**changed: Any) -> dict[str, Any]:
    """Return what a manifest records of a start."""
    return {
        "git": {"commit": "c" * 40, "dirty": True},
        "code_diff": {"file": "code.diff", "sha256": "d" * 64},
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
        "inputs": {
            "code": {
                "python": "3.11",
                "modules": {
                    "mine": {"file": "mine.py", "sha256": "a" * 64, "syntax": "s"},
                    "timm": {"version": "1.0"},
                },
            }
        },
        "data": {"name": "mnist", "sha256": "e" * 64, "folder": "/here", "note": "digits", "facts": {"shape": [1, 28]}},
        "world": {"world_size": 2, "nodes": 1, "device": "cpu", "backend": "gloo", "threads": 1},
        "hosts": ["vm"],
        "platform": "Linux",
        **changed,
    }


def test_a_start_has_all_groups_without_what_says_where_it_lies() -> None:
    groups = provenance({"optimizer.lr": 0.1, "run.dir": "run", "run.init_from": None}, start())
    assert tuple(groups) == GROUPS
    assert groups["configuration"] == {"optimizer.lr": 0.1, "run.init_from": None}
    assert groups["data"] == {"name": "mnist", "sha256": "e" * 12, "shape": [1, 28]}
    assert groups["code"]["commit"] == "c" * 12
    assert groups["code"]["timm"] == "1.0"
    assert groups["versions"] == {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"}


def test_damaged_records_are_no_values() -> None:
    damaged = dict.fromkeys(("git", "code_diff", "packages", "inputs", "data", "world", "hosts"), "x")
    assert provenance({}, damaged) == {group: {} for group in GROUPS}


def test_files_are_equal_by_their_bytes_or_by_what_the_same_python_has_parsed() -> None:
    one = Source("a", "s", "3.11")
    assert one == Source("b", "s", "3.11")
    assert one == Source("a", "t", "3.12")
    assert one != Source("b", "s", "3.12")
    assert Source("a") != Source("b")


def test_what_differs_is_told_group_by_group() -> None:
    modules = {"mine": {"file": "mine.py", "sha256": "b" * 64, "syntax": "t"}}
    other = start(
        packages={"torch": "2.12.0", "numpy": "2.4.6", "pandas": "3.0"},
        inputs={"code": {"python": "3.11", "modules": modules}},
        code_diff=None,
    )
    found = differences([provenance({"optimizer.lr": 0.1}, start()), provenance({"optimizer.lr": 0.2}, other)])
    told = {group: texts(group, keys) for group, keys in found.items()}
    assert told == {
        "configuration": ["optimizer.lr 0.1 -> 0.2"],
        "code": ["no uncommitted changes", f"mine.py has changed ({'a' * 12} -> {'b' * 12})", "timm is gone"],
        "versions": ["torch 2.13.0 -> 2.12.0", "pandas not set -> 3.0"],
    }
    assert differences([provenance({}, start()), provenance({}, start())]) == {}


@pytest.mark.parametrize(
    ("group", "key", "old", "decisive"),
    [
        ("configuration", "optimizer.lr", 0.1, True),
        ("configuration", "trainer.seed", 0, True),
        ("configuration", "run.init_from", None, True),
        ("configuration", "trainer.log_every", 5, False),
        ("configuration", "launcher._target_", "spawn", False),
        ("configuration", "data.root", "data", False),
        ("code", "mine.py", "a", True),
        ("code", "commit", "c", False),
        ("code", "uncommitted changes", "d", False),
        ("versions", "torch", "2.13.0", True),
        ("versions", "pandas", MISSING, False),
        ("data", "sha256", "e", True),
        ("machine", "world_size", 2, True),
        ("machine", "hosts", ["vm"], False),
    ],
)
def test_what_can_change_numbers_is_decisive(group: str, key: str, old: Any, decisive: bool) -> None:
    assert is_decisive(group, key, old, RULES) is decisive


def test_keys_that_follow_from_another_option_are_left_out() -> None:
    keys = {
        "optimizer._target_": ("SGD", "AdamW"),
        "optimizer.lr": (0.1, 0.2),
        "optimizer.momentum": (0.9, MISSING),
        "trainer.gpus": (1, MISSING),
    }
    assert list(without_inner(keys)) == ["optimizer._target_", "optimizer.lr", "trainer.gpus"]
