"""What two configurations differ in, and with which differences a run can resume."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from ddpexp.config.compare import UNSET, Change, compare, lengthens, list_changes, refuse
from ddpexp.config.compose import compose
from ddpexp.errors import RefusedError


def tree(*overrides: str) -> dict[str, Any]:
    composed = compose(["recipe=mnist", *overrides])
    found: dict[str, Any] = yaml.safe_load(composed.text)
    return found


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return tree()


def changes(old: dict[str, Any], new: dict[str, Any], *typed: str, before: Sequence[str] = ()) -> dict[str, str]:
    return {change.key: change.kind for change in compare(old, new, typed, before)}


def changed(old: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    new = copy.deepcopy(old)
    *sections, last = key.split(".")
    place = new
    for section in sections:
        place = place[section]
    if value is UNSET:
        del place[last]
    else:
        place[last] = value
    return new


def refused(old: dict[str, Any], new: dict[str, Any], *typed: str, before: Sequence[str] = ()) -> str:
    with pytest.raises(RefusedError) as caught:
        refuse(compare(old, new, typed, before), "run.dir=x")
    return str(caught.value)


def test_the_same_overrides_differ_in_nothing(stored: dict[str, Any]) -> None:
    overrides = ("optimizer.lr=0.02", "+model.x=1", "scheduler=cosine")
    assert compare(stored, tree(), (), ()) == []
    assert compare(tree(*overrides), tree(*overrides), overrides, overrides) == []
    assert compare(stored, tree("run.dir=x"), ["run.dir=x"], ()) == []  # another path to the same directory


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("launcher._target_", "mpi"),
        ("logger.tensorboard._target_", "mine.Board"),
        ("run.resume", "require"),
        ("run.code", "/y"),
        ("trainer.gpus", 4),
        ("trainer.threads", 2),
        ("trainer.log_every", 7),
        ("trainer.checkpoint_every_seconds", 60.0),
        ("trainer.timeout.init_seconds", 9),
        ("trainer.grace_seconds", 9),
        ("data.root", "/there"),
        ("data.source", "files"),
        ("data.num_workers", 3),
        ("data.on_device", True),
        ("strategy.reduce_through", "backend"),
        ("strategy.find_unused_parameters", True),
    ],
)
def test_how_a_run_is_started_and_written_down_is_free(stored: dict[str, Any], key: str, value: Any) -> None:
    new = changed(stored, key, value)
    assert changes(stored, new) == changes(stored, new, f"{key}={value}") == {key: "free"}
    refuse(compare(stored, new, ()), "x")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("trainer.seed", 1, "the order of the samples and every random number follow from it"),
        ("trainer.global_batch_size", 64, "the steps so far are counted in such batches"),
        ("data.validation_fraction", 0.5, "the steps to come would see other samples"),
        ("data.embedded_train", 7, "the steps to come would see other samples"),
        ("data._target_", "x.load", "the steps to come would see other samples"),
        ("optimizer._target_", "torch.optim.AdamW", "what the checkpoint holds of the optimizer"),
        ("model._target_", "ddpexp.recipes.mnist.Linear", "the weights in the checkpoint"),
    ],
)
def test_what_the_steps_so_far_were_made_of_stays_even_when_overridden(
    stored: dict[str, Any], key: str, value: Any, reason: str
) -> None:
    new = changed(stored, key, value)
    assert changes(stored, new, f"{key}={value}") == {key: "fixed"}
    said = refused(stored, new, f"{key}={value}")
    section, _, last = key.rpartition(".")
    old = stored[section][last]
    assert said.startswith(f"run.dir=x was started with {key}={old}, and this is {key}={value}: {reason}")
    data = f"type {key}={value} run.allow_changes=[data] to continue with other samples, " if section == "data" else ""
    assert said.endswith(f". Keep {key}={old}, {data}or train a new run with it (ddpexp rerun).")


def test_another_recipe_is_named_before_the_keys_that_follow_from_it(stored: dict[str, Any]) -> None:
    new = changed(changed(stored, "recipe.name", "other"), "data.prepare", "x.prepare")
    assert changes(stored, new, "recipe=other") == {"data.prepare": "fixed", "recipe.name": "fixed"}
    assert refused(stored, new, "recipe=other") == (
        "run.dir=x holds a run of the recipe mnist, and this is other: another recipe is another "
        "experiment. Start it with the recipe it has, or a new run with another run.dir."
    )


def test_data_changes_when_that_is_allowed_and_given(stored: dict[str, Any]) -> None:
    allowed = changed(stored, "run.allow_changes", ["data"])
    new = changed(allowed, "data.embedded_train", 7)
    assert changes(allowed, new, "data.embedded_train=7", "run.allow_changes=[data]") == {
        "data.embedded_train": "typed"
    }
    assert changes(allowed, new, "run.allow_changes=[data]") == {"data.embedded_train": "untyped"}
    assert changes(stored, changed(changed(stored, "run.allow_changes", ["code"]), "data.embedded_train", 7)) == {
        "data.embedded_train": "fixed", "run.allow_changes": "free",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 0.5),
        ("optimizer.weight_decay", 0.5),
        ("scheduler.peak_at", 0.1),
        ("trainer.epochs", 9),
        ("trainer.precision", "bf16"),
        ("trainer.micro_batch_size", 16),
        ("trainer.reduction", "exact"),
        ("trainer.clip_grad_norm", 1.0),
        ("task.label_smoothing", 0.1),
        ("strategy.comm_hook", "fp16"),
    ],
)
def test_the_rest_changes_only_by_an_override(stored: dict[str, Any], key: str, value: Any) -> None:
    new = changed(stored, key, value)
    for word in (f"{key}={value}", f"++{key}={value}"):
        assert changes(stored, new, word) == {key: "typed"}
        assert changes(stored, new, word, before=[word]) == {key: "typed"}  # the run had another value since then
    refuse(compare(stored, new, [f"{key}={value}"]), "x")
    section, _, last = key.rpartition(".")
    old = {None: "null"}.get(stored[section][last], stored[section][last])
    assert refused(stored, new, "trainer.gpus=2", f"{key}_other=1") == (
        f"run.dir=x was started with {key}={old}, and this is {key}={value}, which is not typed. "
        f"Type {key}={value} to change it, or {key}={old} to keep it."
    )


def test_an_option_of_a_group_counts_as_given_where_it_was_not_before(stored: dict[str, Any]) -> None:
    new = tree("scheduler=cosine")
    kinds = changes(stored, new, "scheduler=cosine")
    assert kinds["scheduler._target_"] == kinds["scheduler.warmup"] == kinds["scheduler.peak_at"] == "typed"
    assert set(kinds.values()) == {"typed"}
    # The same override as before, and its file has changed since: nobody wanted that.
    assert set(changes(stored, new, "scheduler=cosine", before=["scheduler=cosine"]).values()) == {"untyped"}


def test_a_recipe_whose_file_has_changed_does_not_count_as_given(stored: dict[str, Any]) -> None:
    assert changes(stored, changed(stored, "trainer.epochs", 9), "recipe=mnist") == {"trainer.epochs": "untyped"}


def test_an_override_that_is_left_out_is_named_with_both_ways(stored: dict[str, Any]) -> None:
    said = refused(tree("+model.dropout=0.5"), stored)
    assert said.startswith(
        "run.dir=x was started with model.dropout=0.5, and this is no model.dropout, which is not typed. "
    )
    assert said.endswith("Type ~model.dropout to change it, or +model.dropout=0.5 to keep it.")
    assert changes(tree("+model.dropout=0.5"), stored, "~model.dropout") == {"model.dropout": "typed"}


@pytest.mark.parametrize(
    "key", ["trainer.ema_decay", "run.resume", "strategy.comm_hook", "optimizer.nesterov", "data.embedded_test"]
)
def test_a_key_that_came_with_a_newer_version_changes_nothing(stored: dict[str, Any], key: str) -> None:
    older = changed(stored, key, UNSET)
    assert set(changes(older, stored).values()) <= {"free"}
    refuse(compare(older, stored, ()), "x")
    if key.startswith(("trainer", "strategy", "optimizer")):
        assert changes(older, stored, f"{key}=1") == {key: "typed"}


def test_a_new_key_of_the_users_own_code_must_be_given(stored: dict[str, Any]) -> None:
    old = changed(changed(stored, "model._target_", "mine.Net"), "data._target_", "mine.load")
    for key, kind in {"model.dropout": "untyped", "data.crop": "fixed"}.items():
        assert changes(old, changed(old, key, 0.5)) == {key: kind}
    assert "was started with no data.crop, and this is data.crop=0.5" in refused(old, changed(old, "data.crop", 0.5))
    assert "Type +model.dropout=0.5 to change it, or ~model.dropout to keep it" in refused(
        old, changed(old, "model.dropout", 0.5)
    )


def test_another_target_on_the_command_line_sets_all_of_its_section() -> None:
    first = ("scheduler=cosine", "scheduler.warmup=0.1")
    word = "scheduler._target_=constant"
    old, new = tree(*first), tree("scheduler=cosine", word)
    assert set(changes(old, new, word, before=first).values()) == {"typed"}
    assert changes(new, new, word, before=(word,)) == {}
    kept = changes(
        tree("scheduler._target_=zoo.A", "scheduler.x=1"), tree("scheduler._target_=zoo.A"), "scheduler._target_=zoo.A"
    )
    assert kept == {"scheduler.x": "untyped"}
    assert changes(tree(), tree("model._target_=zoo.A"), "model._target_=zoo.A")["model._target_"] == "fixed"


def test_a_source_without_an_identity_that_could_be_compared_stays(stored: dict[str, Any]) -> None:
    old = changed(stored, "data.prepare", None)
    assert changes(old, changed(old, "data.source", "files")) == {"data.source": "fixed"}


def test_a_truth_is_no_number_and_a_whole_number_may_stand_for_a_float(stored: dict[str, Any]) -> None:
    assert changes(changed(stored, "optimizer.nesterov", 1), stored) == {"optimizer.nesterov": "untyped"}
    assert changes(changed(stored, "optimizer.lr", 1), changed(stored, "optimizer.lr", 1.0)) == {}


@pytest.mark.parametrize(
    ("old", "new", "word", "longer"),
    [
        ({"epochs": 2}, {"epochs": 3}, "trainer.epochs=3", True),
        ({"epochs": 2}, {"epochs": 1}, "trainer.epochs=1", False),
        ({"epochs": 2}, {"epochs": 3}, "", False),
        ({"max_steps": 10}, {"max_steps": None}, "trainer.max_steps=null", True),
        ({"max_steps": None}, {"max_steps": 10}, "trainer.max_steps=10", False),
        ({"max_steps": 10}, {"max_steps": 20}, "trainer.max_steps=20", True),
        ({"max_seconds": 5.0}, {"max_seconds": 7.5}, "trainer.max_seconds=7.5", True),
        ({"max_seconds": 5}, {"max_seconds": None}, "trainer.max_seconds=null", True),
        ({"max_seconds": 5}, {"max_seconds": 4}, "trainer.max_seconds=4", False),
    ],
)
def test_a_run_is_extended_by_overrides(
    stored: dict[str, Any], old: dict[str, Any], new: dict[str, Any], word: str, longer: bool
) -> None:
    trees = [{**stored, "trainer": {**stored["trainer"], **values}} for values in (old, new)]
    assert lengthens(compare(trees[0], trees[1], [word] if word else [])) == longer


def test_changes_are_listed_as_overrides(stored: dict[str, Any]) -> None:
    new = changed(changed(changed(stored, "trainer.epochs", 4), "optimizer.nesterov", UNSET), "trainer.gpus", 2)
    found = compare(stored, new, ["trainer.epochs=4", "~optimizer.nesterov"])
    remark = "the learning rate's schedule follows the new length from here on"
    assert list_changes(found) == [
        f"changed: trainer.epochs 2 -> 4 ({remark}), optimizer.nesterov true -> not set",
        "also other than before: trainer.gpus auto -> 2",
    ]
    assert list_changes([]) == []
    constant = changed(new, "scheduler._target_", "constant")
    assert Change("trainer.epochs", 2, 4, "typed") in compare(
        stored, constant, ["trainer.epochs=4", "scheduler._target_=x"]
    )


def test_callbacks_may_change_when_typed(stored: dict[str, Any]) -> None:
    early = tree("callbacks=early_stopping")
    patient = changed(early, "callbacks.early_stopping.patience", 9)
    assert changes(changed(stored, "callbacks", UNSET), stored) == {}  # of an older version
    assert changes(changed(early, "callbacks.early_stopping.min_delta", UNSET), early) == {}
    assert changes(early, patient, "callbacks.early_stopping.patience=9") == {
        "callbacks.early_stopping.patience": "typed"
    }
    for old, new, override in [(early, stored, "callbacks=none"), (stored, early, "callbacks=early_stopping")]:
        assert set(changes(old, new, override).values()) == {"typed"}
        assert set(changes(old, new).values()) == {"untyped"}


def test_other_callbacks_are_refused_with_overrides_that_are_accepted(stored: dict[str, Any]) -> None:
    one = ["callbacks=early_stopping", "callbacks.early_stopping.patience=2"]
    assert refused(tree(*one), stored, before=one) == (
        "run.dir=x was started with callbacks.early_stopping, and this is no callbacks.early_stopping, which is not "
        "typed. Type callbacks=none to change it, or callbacks=early_stopping callbacks.early_stopping.patience=2 to "
        "keep it."
    )
    assert list_changes(compare(tree(*one), stored, ["callbacks=none"], one)) == [
        "changed: callbacks.early_stopping chosen -> not set"
    ]
    several = tree("callbacks=[early_stopping,lr_monitor]")  # chosen by the recipe's file, which was edited since
    said = refused(several, tree(one[0]))
    names = "callbacks=[early_stopping,lr_monitor]"
    assert said.endswith(f"Type callbacks=early_stopping to change it, or {names} to keep it.")
    assert refused(stored, several).endswith(f"Type {names} to change it, or callbacks=none to keep it.")
    mine = changed(stored, "callbacks", {"mine": {"_target_": "mine.Mine"}})
    assert refused(mine, stored, before=["+callbacks.mine._target_=mine.Mine"]).endswith(
        "Type callbacks=none to change it, or +callbacks.mine._target_=mine.Mine to keep it."
    )
    refuse(compare(tree(*one), stored, ["callbacks=none"], one), "x")
    refuse(compare(tree(*one), tree(*one), one, one), "x")
