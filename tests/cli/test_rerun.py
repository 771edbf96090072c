"""`ddpexp rerun`: the experiment of a run again, in a directory of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ddpexp.cli.rerun import rerun
from tests.cli.test_evaluate import listing
from tests.conftest import ROOT, Ddpexp, Done
from tests.points import Recipe, weights
from tests.refusals import refused
from tests.sweep.made import Made
from tests.typed import call


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is trained again is tested, not how fork servers start."""
    return warm_environ


def test_a_run_that_was_killed_and_resumed_is_repeated_to_the_bit_and_then_with_changes(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp)
    trust = ["--config-dir", str(recipe.folder / "conf")]
    killed = recipe("trainer.gpus=2", "trainer.checkpoint_every=2", environ={"DDPEXP_FAULT": "step:kill:1:5"})
    assert killed.code == 1, killed.err
    old = killed.run
    assert ddpexp("resume", old.name, *trust).code == 0
    before = listing(old)
    exact = ddpexp("rerun", old.name, *trust, "--exact", "launcher.start_method=spawn", "run.dir=exact")
    assert exact.code == 0, exact.err
    assert f"ddpexp: the weights and the metrics are those of {old}, to the bit" in exact.out
    assert f"rerun of {old.name}, done at step 8" in exact.out
    ours, theirs = weights(Done(0, "", "", ddpexp.folder / "exact")), weights(killed)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    changed = ddpexp("rerun", "exact", *trust, "optimizer=adamw", "trainer.gpus=1", "run.dir=changed")
    assert changed.code == 0, changed.err
    assert "optimizer._target_ torch.optim.SGD -> torch.optim.AdamW" in changed.out
    assert "machine: world_size 2 -> 1" in changed.out
    assert "to the bit" not in changed.out
    assert listing(old) == before


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run with code of its own, whose project lies beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    shutil.copytree(ROOT / "tests/samples/project", "project")
    return Path(shutil.copytree(ROOT / "tests/samples/finished", "old"))


TRUSTED = ("--config-dir", "project/conf")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "rerun nowhere: There is no such directory"),
        (["old"], "names code of its own: rerun old"),
        (["old", *TRUSTED, "run.dir=old"], "run.dir=old: resume old"),
        (["old", *TRUSTED, "run.dir=other"], "run.dir=other: resume other"),
        (["old", *TRUSTED, "optimizer.lr=0.1,0.2"], "optimizer.lr=0.1,0.2: several values"),
        (["old", *TRUSTED, "--exact", "trainer.seed=1"], "rerun old --exact: trainer.seed 0 -> 1"),
        (["old", *TRUSTED, "--best"], "old: is no sweep"),
        (["sweep", *TRUSTED], "rerun sweep: rerun sweep --best"),
        (["sweep", *TRUSTED, "--best"], "sweep: has no objective"),
    ],
)
def test_what_cannot_be_trained_again_is_refused(finished: Path, words: list[str], expected: str) -> None:
    sweep = Made(Path("sweep").absolute(), objective=None)
    sweep.job("optimizer.lr=0.1")
    shutil.copytree(finished, "other")
    before = listing(finished)
    with refused(expected):
        rerun(call("rerun", *words))
    assert listing(finished) == before


def test_the_best_job_of_a_sweep_is_meant(finished: Path) -> None:
    sweep = Made(Path("sweep").absolute())
    sweep.job("optimizer.lr=0.1", points=[(10, 0.5)])
    best = sweep.job("optimizer.lr=0.2", points=[(10, 0.3)])
    with refused(best.name):
        rerun(call("rerun", "sweep", "--best"))
