"""Pruning: what rules choose, what stays whatever they say, and that nothing goes without --yes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from ddpexp.cli.prune import PruneArguments, prune
from ddpexp.errors import RefusedError
from ddpexp.run.directory import RunDir
from ddpexp.run.labels import Labels
from tests.sweep.made import Made, hold, run
from tests.typed import call

SAMPLES = Path(__file__).parents[1] / "samples"
DAY = 86_400.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs a to h, from the oldest to the newest, of which c is the best; h runs, f began from b, e has a tag."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root, now = tmp_path / "outputs", time.time()
    for number, name in enumerate("abcdefgh"):
        words = ["run.init_from=elsewhere/b/checkpoints/step-00000010"] if name == "f" else []
        status = None if name == "h" else "failed" if name == "a" else "done"
        loss = 0.1 if name == "c" else 0.9 - number / 100
        path = run(root / name, words, status, [(10, loss)], ended_at=now - (10 - number) * DAY)
        started = time.strftime("%Y-%m-%dT%H:%M:%S.000000+0000", time.gmtime(now - (11 - number) * DAY))
        (path / "manifest.json").write_text(json.dumps({"started": started}))
    hold(root / "h")
    Labels(added=("paper",)).write(RunDir(root / "e"))
    return root


def left(folder: Path) -> str:
    return "".join(sorted(path.name for path in folder.iterdir()))


@pytest.mark.parametrize(
    ("rules", "stays"),
    [
        (["--where", "step==10"], "bcegh"),
        (["--older-than", "8d"], "bcdefgh"),  # b would go too, but f began from it
        (["--older-than", "10w"], "abcdefgh"),
        (["--where", "status==failed"], "bcdefgh"),
        (["--metric", "min:eval/loss", "--keep", "2"], "bcegh"),
        (["--metric", "max:eval/loss", "--keep", "1", "--older-than", "1d"], "abcegh"),
    ],
)
def test_what_every_rule_chooses_goes_but_for_what_must_stay(
    folder: Path, capfd: pytest.CaptureFixture[str], rules: list[str], stays: str
) -> None:
    assert prune(call("prune", str(folder), *rules)) == 0
    assert left(folder) == "abcdefgh"
    said = capfd.readouterr().out
    assert ("would go: " in said) is (stays != "abcdefgh")
    assert prune(call("prune", str(folder), *rules, "--yes")) == 0
    assert left(folder) == stays


def test_json_says_what_would_go_and_what_stays(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert prune(call("prune", str(folder), "--older-than", "9d", "--json")) == 0
    said = json.loads(capfd.readouterr().out)
    assert [(Path(one["directory"]).name, one["paths"]) for one in said["runs"]] == [("a", [str(folder / "a")])]
    assert said["runs"][0]["bytes"] == sum(path.stat().st_size for path in (folder / "a").iterdir())
    assert said["kept"] == {str(folder / "b"): "run.init_from of f names it"}
    assert said["removed"] is False


def test_a_job_of_a_sweep_and_a_run_around_another_one_stay(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = Made(folder / "s")
    for lr in ("0.1", "0.2", "0.3"):
        made.job(f"optimizer.lr={lr}")
    run(folder / "a" / "inside")
    assert prune(call("prune", str(folder), "--where", "step>0", "--yes")) == 0
    assert len(list((folder / "s").glob("000*"))) == 3
    assert (folder / "a" / "inside" / "config.yaml").exists()
    said = capfd.readouterr().out
    assert "a job of a sweep" in said
    assert "the run inside lies in it" in said


def test_checkpoints_go_but_for_the_last_of_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "runs"
    for name in ("stopped", "finished"):
        shutil.copytree(SAMPLES / name, folder / name)
    run(folder / "newest", ["recipe.name=mine"], "done", [(10, 0.1)])
    (folder / "newest" / "manifest.json").write_text('{"started": "2050-01-01T00:00:00.000000+0000"}')
    rule = ["--where", "step>0", "--checkpoints", "--yes"]
    assert prune(call("prune", str(folder), *rule)) == 0
    assert [path.name for path in (folder / "stopped" / "checkpoints").iterdir()] == ["step-00000006"]
    assert (folder / "stopped" / "config.yaml").exists()


@pytest.mark.parametrize(
    "words", [[], ["--keep", "3", "--where", "step>0"], ["--older-than", "30"], ["--metric", "loss"], ["--yes"]]
)
def test_without_a_rule_or_with_a_wrong_one_it_is_refused(words: list[str]) -> None:
    with pytest.raises(RefusedError):
        PruneArguments.of(call("prune", "x", *words))
