"""The experiment of a run again, with changes: what is not typed stays as in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpexp.config.compose import compose
from ddpexp.config.keys import value_at
from ddpexp.config.recomposed import Recomposed, StoredExperiment, _is_kept, _merged, _remaining, recompose
from ddpexp.config.restated import UnrestatedError
from ddpexp.run.differences import flat
from ddpexp.system.yaml_text import load_yaml
from tests.refusals import refused

BASE = ["recipe=mnist", "trainer.gpus=2", "optimizer.lr=0.05", "run.dir=old", "run.resume=never"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def stored() -> StoredExperiment:
    """A run, as its config.yaml has it."""
    return StoredExperiment(Path("old/config.yaml"), load_yaml(compose(BASE).text), BASE, {})


def changed(stored: StoredExperiment, found: Recomposed) -> dict[str, Any]:
    """Return the keys that differ from the run, outside of the section `run`, with their new values."""
    old, new = flat(stored.tree), flat(load_yaml(found.text))
    keys = [key for key in {**old, **new} if not key.startswith("run.") and old.get(key, "-") != new.get(key, "-")]
    return {key: new.get(key) for key in keys}


def altered(stored: StoredExperiment, **values: Any) -> StoredExperiment:
    """Return the run with other values, as if files of options had said so then."""
    tree = load_yaml(yaml.safe_dump(stored.tree))
    for key, value in values.items():
        *names, last = key.split("__")
        value_at(tree, ".".join(names))[last] = value
    return StoredExperiment(stored.path, tree, stored.overrides, {})


def test_without_overrides_a_rerun_is_the_run_in_a_directory_of_its_own(stored: StoredExperiment) -> None:
    found = recompose(stored, [])
    assert changed(stored, found) == {}
    run = found.values["run"]
    assert (run["dir"], run["resume"], run["rerun_of"]) == (None, "auto", str(Path("old").absolute()))
    assert found.overrides == ["recipe=mnist", "trainer.gpus=2", "optimizer.lr=0.05"]
    assert (found.notes, run["rerun_exact"]) == ([], False)


def test_an_override_replaces_the_one_of_the_run(stored: StoredExperiment) -> None:
    found = recompose(stored, ["optimizer.lr=0.1", "run.dir=new"])
    assert changed(stored, found) == {"optimizer.lr": 0.1}
    assert found.values["run"]["dir"] == "new"
    assert found.overrides == ["recipe=mnist", "trainer.gpus=2", "optimizer.lr=0.1", "run.dir=new"]


def test_another_option_begins_with_its_own_values(stored: StoredExperiment) -> None:
    found = recompose(stored, ["optimizer=adamw", "optimizer.weight_decay=0.5", "strategy=fsdp"])
    optimizer = found.values["optimizer"]
    assert (optimizer["_target_"], optimizer["lr"], optimizer["weight_decay"]) == ("torch.optim.AdamW", 0.001, 0.5)
    assert "momentum" not in optimizer
    assert found.values["strategy"]["kind"] == "fsdp"
    assert "optimizer.lr=0.05" not in found.overrides


def test_what_files_say_by_now_does_not_count_and_is_said(stored: StoredExperiment) -> None:
    then = altered(stored, optimizer__momentum=0.5, trainer__log_every=7)
    found = recompose(then, ["trainer.log_every=9"])
    assert changed(then, found) == {"trainer.log_every": 9}
    [note] = found.notes
    assert "optimizer.momentum is 0.5, and 0.9 in the files" in note
    assert "log_every" not in note
    assert recompose(then, ["optimizer=sgd"]).values["optimizer"]["momentum"] == 0.9


def test_what_refers_to_a_changed_key_changes_with_it(tmp_path: Path) -> None:
    recipe = tmp_path / "conf/recipe/mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        "# @package _global_\ndefaults:\n  - override /model: linear\n  - override /data: mnist\n"
        "recipe: {name: mine}\ntask: {_target_: ddpexp.recipes.mnist.Classify}\n"
        'optimizer: {lr: "${trainer.global_batch_size}"}\n'
    )
    words = ["--config-dir", "conf", "recipe=mine"]
    composed = compose(words)
    old = StoredExperiment(Path("old/config.yaml"), load_yaml(composed.text), composed.overrides, {})
    found = recompose(old, ["--config-dir", "conf", "trainer.global_batch_size=256"])
    assert changed(old, found) == {"trainer.global_batch_size": 256, "optimizer.lr": 256}
    recipe.rename(recipe.with_name("other.yaml"))
    found = recompose(old, ["--config-dir", "conf", "trainer.global_batch_size=256"])
    assert changed(old, found) == {"trainer.global_batch_size": 256}
    assert "cannot be composed any more" in found.notes[0]


def test_a_fact_of_the_data_is_read_again() -> None:
    tree = {"model": {"classes": 10, "width": 8}}
    composed = {"model": {"classes": "${facts:num_classes}", "width": "${facts:width}"}}
    merged = _merged(tree, composed, composed, {"num_classes": 10, "width": 4}, set())
    assert merged == {"model": {"classes": "${facts:num_classes}", "width": 8}}  # the width was another one then


def test_what_is_removed_is_gone_and_what_a_newer_version_adds_stays_away() -> None:
    before, after = {"a": {"x": 1, "y": 2, "new": 0}}, {"a": {"y": 2, "new": 0}}
    assert _merged({"a": {"x": 5, "y": 6}}, before, after, {}, set()) == {"a": {"y": 6}}


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        (["optimizer.lr=1"], ["optimizer=sgd", "callbacks=[ema,stop]", "callbacks.stop.patience=2"]),
        (["optimizer=adamw"], ["callbacks=[ema,stop]", "callbacks.stop.patience=2"]),
        (["callbacks=[stop]"], ["optimizer=sgd", "optimizer.lr=2", "callbacks.stop.patience=2"]),
        (["callbacks=ema"], ["optimizer=sgd", "optimizer.lr=2"]),
    ],
)
def test_an_override_of_the_command_replaces_that_of_the_run(typed: list[str], left: list[str]) -> None:
    run = ["optimizer=sgd", "optimizer.lr=2", "callbacks=[ema,stop]", "callbacks.stop.patience=2"]
    assert _remaining(run, typed) == left


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("optimizer=adamw", True),
        ("+experiment=big", True),
        ("~scheduler.warmup_steps", True),
        ("optimizer.lr=0.1", True),
        ("data.path=https://example.org/x", True),  # composing connects to nothing
        ("recipe=../../evil", False),
        ("model.name=${oc.env:TOKEN}", False),
        ("hydra.searchpath=[file:///tmp]", False),
        ("hydra/launcher=joblib", False),
        ("run.trust=[os]", False),
        ("sweep.slots=2", False),
        ("data@data.sources.a=text", False),
        ("--config-dir=x", False),
    ],
)
def test_overrides_of_a_run_directory_only_choose_options_and_set_values(override: str, kept: bool) -> None:
    assert _is_kept(override) is kept


def test_settings_of_a_run_are_restated_as_for_a_resume(stored: StoredExperiment) -> None:
    planted = altered(stored, data__root="https://data.example.org/x")
    with pytest.raises(UnrestatedError):
        recompose(planted, ["optimizer.lr=0.1"])
    found = recompose(planted, ["data.root=https://data.example.org/x"])
    assert found.values["data"]["root"] == "https://data.example.org/x"


def test_what_is_mistyped_is_refused(stored: StoredExperiment) -> None:
    with refused("trainer.lr: optimizer.lr"):
        recompose(stored, ["trainer.lr=1"])
    with refused("optimizer=adamx: adam"):
        recompose(stored, ["optimizer=adamx"])
