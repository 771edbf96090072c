"""What a run differs in from the one that it repeats, and whether it has ended as that one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpexp.config.compare import rules_of
from ddpexp.run.directory import RunDir
from ddpexp.run.provenance import provenance_of
from ddpexp.run.repeated import UnequalError, check_exact, compared, verdict
from tests.conftest import ROOT
from tests.refusals import refused


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A finished run of two workers."""
    monkeypatch.chdir(tmp_path)
    return RunDir(shutil.copytree(ROOT / "tests/samples/finished", tmp_path / "old"))


def tree(run: RunDir) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(run.config.read_text())
    return found


def groups(run: RunDir, **changed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the groups of a new run, by those of the old one and what differs."""
    found = provenance_of(run, run.read(run.manifest))
    return {group: {**keys, **changed.get(group, {})} for group, keys in found.items()}


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_run_that_differs_in_nothing_says_so(origin: RunDir) -> None:
    record, lines = compared(origin, groups(origin), True, tree(origin))
    result = origin.read(origin.result)
    assert lines == [
        "rerun of old, done at step 12 (eval/loss 2.369, eval/accuracy 7.50%): nothing differs in configuration, code, "
        "versions, data and machine"
    ]
    assert (record["run"], record["differs"]) == (str(origin.path), False)
    assert record["weights_sha256"] == result["weights_sha256"]


def test_differences_are_listed_by_group(origin: RunDir) -> None:
    new = groups(origin, configuration={"optimizer.lr": 0.5}, versions={"torch": "9.9"}, machine={"hosts": ["other"]})
    record, lines = compared(origin, new, False, tree(origin))
    torch = origin.read(origin.manifest)["packages"]["torch"]
    assert lines[1:] == [
        "configuration: optimizer.lr 0.02 -> 0.5",
        f"versions: torch {torch} -> 9.9",
        "machine: hosts ['vm'] -> ['other']",
    ]
    assert record["differs"]
    record, _ = compared(origin, groups(origin, machine={"hosts": ["other"]}), False, tree(origin))
    assert not record["differs"]


def test_a_run_without_a_manifest_is_known_by_its_configuration(origin: RunDir) -> None:
    new = groups(origin, configuration={"optimizer.lr": 0.5})
    origin.manifest.unlink()
    record, lines = compared(origin, new, False, tree(origin))
    assert "no manifest.json" in lines[0]
    [line] = lines[1:]
    assert line.startswith("configuration: optimizer.lr 0.02 -> 0.5")
    assert record["differs"]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"configuration": {"optimizer.lr": 0.5}}, "Leave out what sets optimizer.lr."),
        ({"versions": {"torch": "9.9"}}, "Install torch=="),
        ({"code": {"timm": "1.0"}}, "old/code.diff"),
        ({"data": {"train samples": 3}}, "Make the same data available."),
        ({"machine": {"world_size": 1, "threads": 4}}, "Type trainer.threads=1 trainer.gpus=2."),
    ],
)
def test_an_exact_rerun_refuses_what_can_change_numbers(
    origin: RunDir, changed: Mapping[str, Mapping[str, Any]], word: str
) -> None:
    [group] = changed
    with refused(f"rerun old --exact: {group}") as caught:
        compared(origin, groups(origin, **changed), True, tree(origin))
    assert word in caught.value.suggestion


def test_an_exact_rerun_takes_what_cannot_change_numbers(origin: RunDir) -> None:
    free = {"trainer.log_every": 1, "launcher._target_": "inline"}
    new = groups(origin, configuration=free, versions={"pandas": "3"}, code={"commit": "c"}, machine={"hosts": ["b"]})
    _, lines = compared(origin, new, True, tree(origin))
    assert lines[1] == "configuration: trainer.log_every 4 -> 1, launcher._target_ spawn -> inline"


def test_an_exact_rerun_needs_a_finished_run_of_one_configuration(origin: RunDir) -> None:
    manifest = origin.read(origin.manifest)
    earlier = {"started": "2026-11-27T04:00:00.000000+0000", "world": {**manifest["world"], "world_size": 1}}
    change(origin.manifest, earlier=[earlier])
    with refused("rerun old --exact: world_size 1 -> 2 after step"):
        check_exact(origin, {}, rules_of(tree(origin)))
    change(origin.manifest, earlier=[])
    change(origin.result, status="interrupted")
    with refused("rerun old --exact: python -m ddpexp resume old"):
        check_exact(origin, {}, rules_of(tree(origin)))


def ended(origin: RunDir, **changed: Any) -> RunDir:
    """Return a run that has repeated another one, and ended with other results."""
    run = RunDir(shutil.copytree(origin.path, origin.path.with_name("new")))
    record, _ = compared(origin, groups(origin), False, tree(origin))
    change(run.manifest, rerun_of=record)
    change(run.result, **changed)
    return run


def test_a_repeated_run_says_that_it_has_ended_equally(origin: RunDir) -> None:
    text = verdict(ended(origin), True)
    assert text is not None
    assert text.startswith(f"the weights and the metrics are those of {origin.path}, to the bit")
    assert verdict(origin, False) is None


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"weights_sha256": "f" * 64}, "the weights are not those of"),
        ({"weights_sha256": "f" * 64, "step": 11}, "which ended at step 12 and not 11"),
        ({"metrics": {"eval/loss": 1.0, "eval/accuracy": 0.075}}, "but not the metrics eval/loss"),
    ],
)
def test_an_exact_rerun_fails_if_it_ends_otherwise(origin: RunDir, changed: Mapping[str, Any], word: str) -> None:
    run = ended(origin, **changed)
    assert word in (verdict(run, False) or "")
    with refused(f": {word}", UnequalError) as caught:
        verdict(run, True)
    assert f"python -m ddpexp diff {origin.path} new." in caught.value.suggestion


def test_a_run_with_other_values_is_not_compared(origin: RunDir) -> None:
    run = ended(origin, weights_sha256="f" * 64)
    change(run.manifest, rerun_of={**run.read(run.manifest)["rerun_of"], "differs": True})
    assert verdict(run, True) is None
