"""Sweeps that somebody else has made: their words run no code, and nothing leads out of their directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddpexp.errors import RefusedError
from ddpexp.sweep.again import resumed
from ddpexp.sweep.folder import SweepDir, runs_code
from tests.conftest import SMALL
from tests.sweep.conftest import Sweeps

WORDS = (*SMALL, "trainer.gpus=1", "trainer.seed=0,1", "sweep.slots=2", "sweep.picture=false")


def given(path: Path, *words: str) -> SweepDir:
    """Make a sweep's directory as somebody else could have left it."""
    folder = SweepDir(path)
    path.mkdir()
    folder.asked.write_text(yaml.safe_dump({"words": list(words), "options": []}))
    folder.record.write_text('{"event": "sweep", "time": 1}\n')
    return folder


@pytest.mark.fault("S4")
@pytest.mark.parametrize("split", [True, False])
def test_an_option_among_the_words_of_a_sweep_does_not_choose_the_code(sweeps: Sweeps, tmp_path: Path, split: bool) -> None:
    conf = sweeps.recipe.folder / "conf"
    (sweeps.recipe.folder / "points.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    option = ["--config-dir", str(conf)] if split else [f"--config-dir={conf}"]
    folder = given(tmp_path / "theirs", *option, "recipe=points", "trainer.seed=0,1")
    done = sweeps.again(folder.path, trusted=False)
    assert done.code == 2
    assert "is not an override" in done.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.fault("S4")
@pytest.mark.parametrize(
    "word",
    [
        "run.trust=[os]", "++run.trust=[os]", "run={trust:[os]}", "launcher.setup=[id]", "launcher={setup:[id]}", "+launcher.x=1",
        "+scheduler@launcher=../../theirs", "launcher=../../theirs", "recipe=mnist,../../theirs", "launcher=${oc.env:PWD}",
        "hydra.sweeper.params.run.trust=[os]", "hydra.sweeper.storage=sqlite:///x", "hydra/sweeper=../../theirs", "+hydra.x=1",
        "hydra.searchpath=[file:///x]",
    ],
)  # fmt: skip
def test_words_that_could_run_code_are_typed_again(word: str) -> None:
    assert runs_code(word)


@pytest.mark.parametrize(
    "word",
    [
        "recipe=mnist", "optimizer=adamw,mnist_sgd", "model=glob(*)", "launcher=spawn,slurm", "optimizer.lr=0.1,0.2", "+model.x=1",
        "data.root=/data/mnist", "logger.token=${oc.env:TOKEN}", "trainer.seed=range(3)", "hydra.sweep.dir=here", "~model.bias",
        "hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.n_trials=4", "hydra.sweeper.params.model.x=1,2",
    ],
)  # fmt: skip
def test_words_that_only_say_what_is_trained_are_not_typed_again(word: str) -> None:
    assert not runs_code(word)


@pytest.mark.fault("S4")
def test_of_a_key_that_is_typed_again_nothing_else_counts(tmp_path: Path) -> None:
    folder = given(tmp_path / "theirs", *WORDS, "run.trust=[theirs]", "run.trust=[os]")
    swept = resumed([str(folder.path), "run.trust=[mine]"], ["ddpexp", "resume", str(folder.path), "run.trust=[mine]"])
    assert [word for word in swept.words if "trust" in word] == ["run.trust=[mine]"]
    with pytest.raises(RefusedError, match="counts only when it is typed again"):
        resumed([str(folder.path)], ["ddpexp", "resume", str(folder.path)])
