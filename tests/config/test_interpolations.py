"""What `${...}` may stand for has bounds; what a configuration needs is far below them."""

from __future__ import annotations

import pytest
from omegaconf import Container, OmegaConf

from ddpexp.config.interpolations import bounded_interpolations, resolved
from ddpexp.errors import RefusedError
from tests.refusals import refused

TEXTS = {"x0": "lol", **{f"x{n}": f"${{x{n - 1}}}" * 10 for n in range(1, 8)}}
LISTS = {"x0": ["a"], **{f"x{n}": [f"${{x{n - 1}}}"] * 2 for n in range(1, 40)}}
WIDE = {"x": list(range(1000)), "y": ["${x}"] * 1000}
LONG = {"x": "a" * 60_000, "y": "${x}${x}"}
DEEP = {"y": "${oc.env:NONE," * 400 + "x" + "}" * 400}


@pytest.mark.variants(1)
@pytest.mark.parametrize("values", [TEXTS, LISTS, WIDE, LONG, DEEP], ids=["texts", "lists", "wide", "long", "deep"])
def test_what_stands_for_too_much_is_refused(values: dict[str, object]) -> None:
    plain = Container.resolve_parse_tree
    with pytest.raises(RefusedError):
        resolved(values)
    assert Container.resolve_parse_tree is plain


def test_a_thousand_interpolations_are_resolved() -> None:
    values = {"x": 1, **{f"x{n}": "a ${x} b" for n in range(1000)}}
    assert resolved(values) == {"x": 1, **{f"x{n}": "a 1 b" for n in range(1000)}}


def test_one_that_leads_to_nothing_is_named() -> None:
    with refused("config.yaml: nowhere"):
        resolved({"x": "${nowhere}"})


def test_each_use_has_bounds_of_its_own() -> None:
    tree = OmegaConf.create({"x": 1, **{f"x{n}": "${x}" for n in range(6000)}})
    for _ in range(2):
        with bounded_interpolations():
            OmegaConf.to_container(tree, resolve=True)
