"""Facts of the data in a configuration: where `${facts:...}` may stand, and what it becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import ddpexp as package
from ddpexp.config import facts
from ddpexp.config.compose import compose
from ddpexp.config.resolve import text_with_facts
from ddpexp.errors import RefusedError
from ddpexp.run.same_inputs import check_same_data
from tests.conftest import SMALL, Ddpexp
from tests.refusals import command_refused, refused

FACTS = {"num_classes": 3, "classes": ["cat", "dog", "owl"], "shape": [1, 28, 28]}
TINY = ("recipe=mnist", "data.source=embedded", "data.embedded_train=64", "data.embedded_test=16")


def test_a_reference_becomes_the_value_with_its_type() -> None:
    tree = {
        "classes": "${facts:num_classes}",
        "name": "of ${facts:num_classes}",
        "first": ["${facts:shape.0}"],
        "else": 1,
        "later": "${facts:vocab_size}",
    }
    assert facts.resolve(tree, FACTS) == {
        "classes": 3,
        "name": "of 3",
        "first": [1],
        "else": 1,
        "later": "${facts:vocab_size}",
    }
    assert text_with_facts("model:\n  classes: ${facts:classes}\n", FACTS) == (
        "model:\n  classes:\n  - cat\n  - dog\n  - owl\n"
    )


def test_a_fact_that_would_be_resolved_itself_is_refused() -> None:
    stolen = {**FACTS, "classes": ["cat", "${oc.env:TOKEN}"]}
    assert facts.used({"model": {"n": "${facts:num_classes}"}}, stolen, "mine") == {"num_classes": 3}
    for text in ("${facts:classes}", "${facts:classes.1}", "a ${facts:classes.1}"):
        with refused(": ${oc.env:TOKEN}"):
            facts.resolve({"model": {"names": text}}, stolen)


@pytest.mark.parametrize("text", ["$${facts:classes.0}", "${${facts:classes.1}:TOKEN}", "${model.${facts:classes.1}}"])
def test_a_fact_is_no_part_of_another_reference(text: str) -> None:
    stolen = {**FACTS, "classes": ["{oc.env:TOKEN}", "oc.env"]}
    with refused(text):
        facts.resolve({"callbacks": {"monitor": text}}, stolen)


def test_the_facts_that_are_used_are_named() -> None:
    assert facts.used({"model": {"in": "${facts:shape.0}", "out": "${facts:num_classes}"}}, FACTS, "mine") == {
        "shape": [1, 28, 28],
        "num_classes": 3,
    }


@pytest.mark.parametrize(
    ("name", "available", "text"),
    [
        ("num_clases", FACTS, "Did you mean ${facts:num_classes}?"),
        ("num_classes", {}, "data.prepare=mine returns no facts"),
        ("shape.3", FACTS, "has no 3"),
    ],
)
def test_a_fact_that_is_not_there_is_refused(name: str, available: Mapping[str, Any], text: str) -> None:
    with pytest.raises(RefusedError) as refused:
        facts.used({"model": {"out": f"${{facts:{name}}}"}}, available, "data.prepare=mine")
    assert (refused.value.key, refused.value.value) == ("model.out", f"${{facts:{name}}}")
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.max_steps=${facts:num_classes}"], "trainer is checked before the data is prepared"),
        (["data.embedded_test=${facts:num_classes}"], "data's preparation"),
        (["data.prepare=null", "model.hidden=${facts:num_classes}"], "data.prepare is not set"),
        (["model.hidden=${facts:}"], "names no fact of the data"),
        (["model.hidden=${fact:num_classes}"], "Did you mean ${facts:...}?"),
    ],
)
def test_where_a_reference_cannot_stand_it_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(RefusedError) as refused:
        package.compose([*TINY, *overrides])
    assert sentence in str(refused.value)


def test_another_key_may_refer_to_one_that_is_a_fact() -> None:
    composed = compose([*TINY, "model.hidden=${facts:num_classes}", "+model.other=${model.hidden}"])
    assert "${model" not in composed.text
    assert composed.values["model"]["other"] == "${facts:num_classes}"


def test_a_composed_model_has_the_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    experiment = package.compose([*TINY, "model.hidden=${facts:num_classes}"])
    assert experiment.model()[-1].in_features == 10


def test_data_with_other_facts_is_refused_with_both_values() -> None:
    before = {"facts": {"num_classes": 3}, "data": {"name": "pets", "facts": FACTS}}
    assert check_same_data(before, {"name": "pets", "facts": FACTS}, "outputs/a") == []
    with refused("outputs/a: num_classes=4"):
        check_same_data(before, {"name": "pets", "facts": {"num_classes": 4}}, "outputs/a", ["data"])
    with refused("outputs/a: no num_classes"):
        check_same_data(before, {"name": "pets"}, "outputs/a")


@pytest.mark.parametrize(("name", "key"), [("text", "data.path=..."), ("mnist", "data.root=...")])
def test_other_data_is_refused_with_the_key_that_says_where_it_is(name: str, key: str) -> None:
    before = {"data": {"name": name, "hash": "1" * 40}}
    with refused(f"outputs/a: {key}"):
        check_same_data(before, {"name": name, "hash": "2" * 40}, "outputs/a")


@pytest.mark.parametrize(
    ("model", "key", "suggestion"),
    [
        ({"vocab_size": 9}, "model.vocab_size", "Use model.vocab_size=65 or more, or another data.tokenizer."),
        ({"vocab_size": 65, "block_size": 64}, "model.block_size", "Use model.block_size=128 or more"),
    ],
)
def test_a_model_without_room_for_the_tokens_is_refused(model: dict[str, int], key: str, suggestion: str) -> None:
    tokens = {"vocab_size": 65, "block_size": 128}
    facts.check_model({"model": {"vocab_size": 50257, "block_size": 1024}}, tokens)
    with pytest.raises(RefusedError) as refused:
        facts.check_model({"model": model}, tokens)
    assert refused.value.key == key
    assert refused.value.suggestion.startswith(suggestion)


def test_a_run_has_the_values_in_its_files_and_resumes_with_them(ddpexp: Ddpexp) -> None:
    model = ("model=lenet", "model.hidden=${facts:num_classes}")
    done = ddpexp(*SMALL, *model, "trainer.max_steps=2", "trainer.eval_every=0")
    assert done.code == 0, done.err
    assert "  hidden: 10\n" in (done.run / "config.yaml").read_text()
    manifest = done.manifest()
    assert manifest["facts"] == {"num_classes": 10}
    again = ddpexp(*SMALL, *model, "trainer.max_steps=2", "trainer.eval_every=0", f"run.dir={done.run}")
    assert (again.code, "is finished at step 2" in again.out + again.err) == (0, True)
    manifest["facts"]["num_classes"] = 12  # as if the data had changed
    (done.run / "manifest.json").write_text(json.dumps(manifest))
    other = ddpexp("resume", str(done.run), "trainer.max_steps=4")
    command_refused(other, f"{done.run.name}: num_classes=12")
