"""Lists of runs: which, in what order, and from an index that is only a copy of what the directories hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from ddpexp.cli.listing import list_runs
from ddpexp.cli.status import status
from ddpexp.cli.table import table
from ddpexp.cli.tag import tag
from ddpexp.errors import RefusedError
from ddpexp.run.directory import RunDir
from ddpexp.sweep import listing
from ddpexp.sweep.condition import parse_condition
from ddpexp.sweep.files import RunFiles
from ddpexp.sweep.rows import Row
from tests.sweep.made import Made, hold, run
from tests.typed import call


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ddpexp" / "runs"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs whose files have been read, in the order of reading."""
    names: list[str] = []
    of = RunFiles.of

    def recorded(run: RunDir, metric: str | None, mask: Callable[[str], str]) -> RunFiles:
        names.append(run.path.name)
        return of(run, metric, mask)

    monkeypatch.setattr(RunFiles, "of", recorded)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs, of which one has failed, and a sweep of two jobs."""
    root = tmp_path / "outputs"
    for number, (name, lr, loss) in enumerate([("a", 0.1, 0.5), ("b", 0.01, 0.3), ("c", 1.0, float("nan"))]):
        path = run(root / name, ["recipe=points", f"optimizer.lr={lr}"], "failed" if name == "c" else "done",
                   [(10, loss)])  # fmt: skip
        (path / "manifest.json").write_text(json.dumps({"started": f"2026-11-2{number}T12:00:00.000000+0000"}))
    made = Made(root / "sweeps" / "s")
    made.job("optimizer.lr=0.2")
    made.job("optimizer.lr=0.3", events=())
    return root


def rows(folder: Path) -> list[Row]:
    return listing.runs_below(folder, lambda number: None)


def names(rows: Sequence[Row]) -> list[str]:
    return [row.name.partition("_")[0] for row in rows]


def test_the_newest_run_is_the_first_and_a_job_that_waits_the_last(folder: Path) -> None:
    found = rows(folder)
    assert names(found) == ["0000", "c", "b", "a", "0001"]
    assert {row.name.partition("_")[0]: row.status for row in found} == {
        "a": "done", "b": "done", "c": "failed", "0000": "done", "0001": "waiting",
    }  # fmt: skip


def test_the_index_gives_what_the_files_gave_and_only_what_changed_is_read_again(folder: Path, read: list[str]) -> None:
    first = rows(folder)
    assert sorted(read)[-3:] == ["a", "b", "c"]
    read.clear()
    again = rows(folder)
    assert read == []
    for one, other in zip(first, again, strict=True):
        assert {**vars(one), "resolved": {}} == {**vars(other), "resolved": {}} or one.name == "c"  # its loss is nan
        assert one.resolved == dict(other.resolved)
    (folder / "c" / "result.json").write_text(json.dumps({"status": "done", "step": 30, "metrics": {"eval/loss": 0.1}}))
    shutil.rmtree(folder / "a")
    found = {row.name: row for row in rows(folder)}
    assert read == ["c"]
    assert "a" not in found
    assert (found["c"].status, found["c"].step, found["c"].metrics["eval/loss"]) == ("done", 30, 0.1)


@pytest.mark.parametrize("damage", [b"", b"{}\n{}", b"\xff\n", b'[1]\n{"runs": 3}'])
def test_a_damaged_index_is_made_again(folder: Path, cache: Path, read: list[str], damage: bytes) -> None:
    first = names(rows(folder))
    [index] = cache.iterdir()
    intact = index.read_bytes()
    index.write_bytes(damage or intact[:-20])
    read.clear()
    assert names(rows(folder)) == first
    assert len(read) == 4
    assert index.read_bytes() == intact


def test_without_a_cache_everything_is_read(folder: Path, cache: Path, read: list[str]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    assert names(rows(folder)) == names(rows(folder))
    assert len(read) == 8


def test_an_index_with_a_secret_of_today_is_not_used(
    folder: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder / "d", ["model.name=confidential-thing"])
    rows(folder)
    read.clear()
    monkeypatch.setenv("MY_TOKEN", "confidential-thing")
    assert "confidential-thing" not in str([vars(row) for row in rows(folder)])
    assert "d" in read
    [index] = cache.iterdir()
    assert b"confidential-thing" not in index.read_bytes()


def test_a_running_run_is_read_each_time_and_writes_no_index(folder: Path, cache: Path, read: list[str]) -> None:
    rows(folder)
    [index] = cache.iterdir()
    before = index.stat().st_mtime_ns
    hold(run(folder / "d", status=None))
    read.clear()
    for _ in range(2):
        assert {row.name: row.status for row in rows(folder)}["d"] == "running"
    assert read == ["d", "d"]
    assert index.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("eval/loss<0.4", ["b"]),
        ("status==failed", ["c"]),
        ("optimizer.lr>=0.1 and not status==failed", ["a", "0000", "0001"]),
        ("optimizer.nesterov==true and step==10", ["a", "b", "c"]),
        ("recipe==points and optimizer.lr<1", ["a", "b", "0000"]),
        ("step>1000", []),
    ],
)
def test_a_condition_chooses_runs(folder: Path, condition: str, expected: list[str]) -> None:
    assert sorted(names(listing.chosen(rows(folder), parse_condition(condition)))) == sorted(expected)


def test_runs_are_sorted_by_what_is_named_and_those_without_it_come_last(folder: Path) -> None:
    found = rows(folder)
    assert names(listing.by_name(found, "eval/loss"))[:3] in (["b", "a", "0000"], ["b", "0000", "a"])
    assert {*names(listing.by_name(found, "-eval/loss"))[-2:]} == {"c", "0001"}  # nan, and none
    assert names(listing.by_name(found, "-optimizer.lr")) == ["c", "0001", "0000", "a", "b"]
    assert names(listing.by_name(found, "status"))[-1] == "0001"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("accuracy", "Available: "),
        ("loss", "Did you mean eval/loss?"),
        ("lr", "Did you mean optimizer.lr?"),
        ("optimiser.lr", "Did you mean optimizer.lr?"),
    ],
)
def test_a_name_that_no_run_has_is_refused_with_the_nearest(folder: Path, name: str, suggestion: str) -> None:
    found = rows(folder)
    with pytest.raises(RefusedError) as by_condition:
        listing.chosen(found, parse_condition(f"{name}<1"))
    with pytest.raises(RefusedError) as by_order:
        listing.by_name(found, f"-{name}")
    for error in (by_condition.value, by_order.value):
        assert error.suggestion.startswith(suggestion)


def test_the_command_prints_lines_or_json(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert list_runs(call("list", "--where", "optimizer.lr<0.2", "--sort", "eval/loss")) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["started", "status", "step", "eval/loss", "optimizer.lr", "directory", "overrides"]
    assert [line.split()[-3] for line in lines[1:]] == ["outputs/b", "outputs/a"]
    assert list_runs(call("list", "outputs", "--json")) == 0
    found = json.loads(capfd.readouterr().out)["runs"]
    assert found[1]["directory"] == str(folder / "c")
    assert found[1]["overrides"] == {"recipe": "points", "optimizer.lr": "1.0"}
    assert list_runs(call("list", "--where", "optimizer.lr>2")) == 0
    assert "none of the 5 runs in outputs" in capfd.readouterr().err


def test_tags_and_a_note_are_given_and_taken_and_found(
    folder: Path, read: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((folder / "a" / "config.yaml").read_text())
    (folder / "a" / "config.yaml").write_text(yaml.safe_dump({**config, "run": {"tags": ["first", "draft"]}}))
    assert [row.tags for row in rows(folder) if row.name == "a"] == [["first", "draft"]]
    for words in (
        ("paper", "+v2", "--note", "of the old data"),
        ("--remove", "draft,v2"),
        ("draft", "--remove", "first"),
    ):
        assert tag(call("tag", str(folder / "a"), *words)) == 0
    assert capfd.readouterr().out.splitlines()[-2:] == ["tags  draft paper", "note  of the old data"]
    read.clear()
    [found] = listing.chosen(rows(folder), parse_condition("tags==paper and not tags==first"))
    assert (found.name, found.tags, found.note) == ("a", ["draft", "paper"], "of the old data")
    assert read == ["a"]
    assert table(call("table", str(folder), "--columns", "tags,note", "--format", "markdown")) == 0
    assert "| draft paper | of the old data |" in capfd.readouterr().out
    assert status(call("status", str(folder / "a"))) == 0
    assert "tags    draft paper\nnote    of the old data\n" in capfd.readouterr().out
    assert tag(call("tag", str(folder / "a"), "--note=", "--remove=paper,draft")) == 0
    assert "no tags and no note" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["--remove", "first"], "It has none."),
        (["two words"], "Type a text with blanks as --note TEXT."),
        (["a,b"], "Type a text with blanks as --note TEXT."),
    ],
)
def test_a_tag_that_is_none_is_refused(folder: Path, words: list[str], suggestion: str) -> None:
    with pytest.raises(RefusedError) as found:
        tag(call("tag", str(folder / "a"), *words))
    assert found.value.suggestion == suggestion
    assert not (folder / "a" / "labels.json").exists()


@pytest.mark.parametrize("text", ["[]", '{"added": 3, "removed": [1], "note": []}', "{", '{"added": ["x", 2]}'])
def test_labels_that_nobody_wrote_so_are_left_out(folder: Path, text: str) -> None:
    (folder / "a" / "labels.json").write_text(text)
    [tags] = [row.tags for row in rows(folder) if row.name == "a"]
    assert set(tags) <= {"x"}
