"""The page: what it has, and that a text of a run is never code."""

from __future__ import annotations

import json
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ddpexp.cli.report import report
from ddpexp.cli.verb import Call
from ddpexp.report.page import embedded, is_report
from ddpexp.sweep.folder import SweepDir
from tests.refusals import refused
from tests.report.made import HOSTILE, hostile, png, record, sweep, write_events, write_manifest, write_records
from tests.sweep.made import hold, run

HERE = Path(__file__).parents[2] / "ddpexp/report"


def call(*operands: str | Path, out: Path) -> int:
    words = [str(operand) for operand in operands]
    return report(Call("report", words, {"--out": str(out)}, ["ddpexp", "report", *words]))


def page(*operands: str | Path, out: Path) -> tuple[str, dict[str, Any]]:
    """Return the text and the data of a report."""
    assert call(*operands, out=out) == 0
    text = out.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return text, json.loads(found[1])


class Elements(HTMLParser):
    """Collects the elements of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.comments: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def test_a_sweep_has_its_table_curves_means_axes_times_and_pictures(tmp_path: Path) -> None:
    _, data = page(sweep(tmp_path / "first"), out=tmp_path / "report.html")
    assert data["summary"].startswith("6 jobs: 6 done. Best (lowest eval/loss): 0.1")
    assert data["table"]["head"][:3] == ["optimizer.lr", "trainer.seed", "eval/loss"]
    assert data["best"] == data["table"]["best"] == 0
    assert [line[0] for line in data["table"]["lines"]] == ["0.1", "0.1", "0.2", "0.2", "0.4", "0.4"]
    assert data["metrics"] == ["eval/loss", "train/loss"]
    assert data["runs"][0]["curves"]["eval/loss"] == {"x": [10, 10], "y": [0.9, 0.1], "mean": []}
    assert len(data["runs"][0]["curves"]["train/loss"]["x"]) == 20
    assert [axis["name"] for axis in data["axes"]] == ["optimizer.lr", "trainer.seed", "eval/loss"]
    assert [axis["places"][0] for axis in data["axes"]] == [0.0, 0.0, 0.0]
    assert [axis["places"][5] for axis in data["axes"]] == [1.0, 1.0, 1.0]
    assert data["seeds"]["head"][-1] == "seeds"
    assert [line[0] for line in data["seeds"]["lines"]] == ["0.1", "0.2", "0.4"]
    assert [len(one["times"]) for one in data["runs"]] == [1] * 6
    assert data["pictures"][0]["names"][0]["steps"] == [10, 20]
    assert {group["group"] for group in data["differences"]} == {"configuration"}


def test_a_single_run_and_one_that_is_running_have_a_page(tmp_path: Path) -> None:
    write_manifest(run(tmp_path / "one"))
    _, data = page(tmp_path / "one", out=tmp_path / "report.html")
    assert (data["axes"], data["seeds"], data["differences"]) == ([], None, [])
    assert data["table"]["lines"] == [["0.5", "done", "30", ""]]
    job = sweep(tmp_path / "sweep") / "0000_optimizer.lr=0.1,trainer.seed=0"
    (job / "result.json").unlink()
    hold(job)
    _, data = page(job, out=tmp_path / "report.html")
    assert data["runs"][0]["status"] == "running"
    assert any("still running" in note for note in data["notes"])


def test_a_sweep_without_a_job_has_a_page(tmp_path: Path) -> None:
    folder = SweepDir(tmp_path / "sweep")
    folder.path.mkdir()
    folder.record.write_text('{"event": "sweep", "time": 1}\n')
    _, data = page(folder.path, out=tmp_path / "report.html")
    assert (data["summary"], data["runs"]) == ("no jobs.", [])


@pytest.mark.fault("S4")
def test_a_text_of_a_run_is_no_code_and_the_policy_forbids_to_load_anything(tmp_path: Path) -> None:
    plain, _ = page(sweep(tmp_path / "first"), out=tmp_path / "plain.html")
    text, data = page(hostile(tmp_path / f"theirs{HOSTILE.replace('/', '')}"), out=tmp_path / "report.html")
    found, expected = Elements(text), Elements(plain)
    assert [tag for tag, _ in found.found] == [tag for tag, _ in expected.found]
    assert found.comments == [" ddpexp report "]
    assert "alert" in text
    assert not re.search(r"<\s*(?!/?(?:title|style|script))[^<]*alert", text)
    assert not any(
        attribute.startswith("on") or attribute in ("src", "href") for _, a in found.found for attribute in a
    )
    [policy] = [a["content"] for tag, a in found.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    shown = HOSTILE.replace("\u2028", "\\u2028")
    assert data["keys"] == {"model.name": [f"{n}{shown}" for n in range(3)], f"model.{shown}": ["0", "1", "2"]}
    assert f"eval/{shown}" in data["metrics"]
    assert data["runs"][0]["message"].count("<script>alert(1)</script>") == 2
    assert {group["group"] for group in data["differences"]} == {"configuration", "code", "versions", "machine"}
    assert shown in json.dumps(data["environment"], ensure_ascii=False).replace('\\"', '"').replace("\\\\", "\\")
    assert data["pictures"][0]["names"][0]["name"] == shown
    assert data["runs"][0]["verdict"] == ""


def test_values_are_embedded_without_a_character_that_ends_an_element() -> None:
    text = embedded({"a": [HOSTILE, "\u2029\ud800é"]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": [HOSTILE, "\u2029\ud800é"]}


def test_the_script_makes_no_markup_of_texts_and_asks_for_nothing() -> None:
    script = (HERE / "report.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "import(",
                 "XMLHttpRequest", "WebSocket", "setAttribute(\"style"):  # fmt: skip
        assert word not in script
    for name in ("report.html", "report.css"):
        assert not re.search(r"https?:|url\(|@import|\bsrc=", (HERE / name).read_text())


BROKEN = (b"", b"\xff\x00", b"[[[[", b"null", b'{"step": []}', b"[1, 2]", b"pipe")
WEIRD: tuple[Any, ...] = ([], {}, "x", -1, 1e308, None, True, [[]], {"a": {"b": []}}, ["\ud800"], {"": 1})


@pytest.mark.fault("S17")
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "manifest.json", "result.json", "config.yaml", "overrides.yaml", "tb"]
)
def test_a_file_that_no_run_writes_ends_no_report(tmp_path: Path, name: str) -> None:
    for number, content in enumerate(BROKEN):
        job = run(tmp_path / f"runs/{number}")
        write_manifest(job)
        target = job / name if name != "tb" else write_events(job / "tb", [("a", 1, png())])
        target.unlink(missing_ok=True)
        if content == b"pipe":
            os.mkfifo(target)
        else:
            target.write_bytes(content)
    _, data = page(tmp_path / "runs", out=tmp_path / "report.html")
    assert len(data["runs"]) >= len(BROKEN) - 1  # a folder without a manifest, or with a pipe for it, is no run


@pytest.mark.fault("S17")
def test_a_manifest_or_a_result_of_other_types_ends_no_report(tmp_path: Path) -> None:
    names = ("git", "code_diff", "packages", "python", "hosts", "world", "gpus", "data", "facts", "resolved", "config",
             "earlier", "inputs", "init_from", "started", "platform", "command")  # fmt: skip
    keys = ("metrics", "best", "verdict", "step", "ended_at", "seconds", "stopped", "weights_sha256")
    for number, value in enumerate(WEIRD):
        for started in ("2026-11-21T12:00:00.0+0000", value):
            job = run(tmp_path / f"runs/{number}{started is value}")
            manifest = {"format": 1, **dict.fromkeys(names, value), "started": started}
            (job / "manifest.json").write_text(json.dumps(manifest))
            (job / "result.json").write_text(json.dumps({"status": "done", **dict.fromkeys(keys, value)}))
    _, data = page(tmp_path / "runs", out=tmp_path / "report.html")
    assert len(data["runs"]) == 2 * len(WEIRD)


def test_many_runs_with_many_keys_have_a_bounded_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpexp.report.contents._RUNS", 20)
    for number in range(23):
        path = run(tmp_path / "runs" / f"{number:03d}", points=[(1, float(number))])
        (path / "config.yaml").write_text(json.dumps({"model": {f"k{n}": number * n for n in range(300)}}))
    text, data = page(tmp_path / "runs", out=tmp_path / "report.html")
    assert len(data["runs"]) == 20
    assert any("3 more are not" in note for note in data["notes"])
    assert len(data["table"]["head"]) < 70
    assert len(text) < 400_000


@pytest.mark.slow
def test_the_page_of_a_hundred_long_runs_with_large_pictures_is_below_five_megabytes(tmp_path: Path) -> None:
    draw = random.Random(0)
    noise = [png() + draw.randbytes(90_000) for _ in range(4)]  # behind its end a picture may have anything
    for number in range(100):
        job = run(tmp_path / "runs" / f"{number:03d}", [f"optimizer.lr={number}"])
        write_manifest(job)
        names = ("train/loss", "train/accuracy", "train/lr", "train/grad_norm", "train/samples_per_second", "eval/loss")
        lines = [record(step, {name: draw.random() for name in names}) for step in range(1, 1001)]
        write_records(job / "metrics.jsonl", lines)
        write_events(job / "tb", [("samples", step, picture) for step, picture in enumerate(noise)])
    text, data = page(tmp_path / "runs", out=tmp_path / "report.html")
    assert len(data["runs"]) == 100
    assert data["pictures"]
    assert 2_000_000 < len(text) < 5_000_000


def test_a_report_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    one = run(tmp_path / "one")
    out = tmp_path / "report.html"
    assert not is_report(out)
    for _ in range(2):
        page(one, out=out)
        assert is_report(out)
    out.write_text("<!doctype html>\n<p>mine</p>")
    with refused(f"--out {out}: report-1.html"):
        call(one, out=out)
    assert "mine" in out.read_text()
    (tmp_path / "link.html").symlink_to(tmp_path / "elsewhere.html")
    with refused("link.html: another file"):
        call(one, out=tmp_path / "link.html")
    assert not (tmp_path / "elsewhere.html").exists()


def test_what_cannot_be_reported_or_written_is_refused(tmp_path: Path) -> None:
    one, empty = run(tmp_path / "one"), tmp_path / "empty"
    empty.mkdir()
    out = tmp_path / "report.html"
    for operand, about in ((empty, "empty: neither a sweep nor a run"), (tmp_path / "on", "on: one"),
                           (one / "config.yaml", "config.yaml: is a file"),
                           ("sweep.objective=eval/los", "sweep.objective=eval/los: eval/loss"),
                           ("trainer.gpus=2", "trainer.gpus=2: known key of report")):  # fmt: skip
        with refused(about):
            call(*([one] if isinstance(operand, str) else []), operand, out=out)
    for name, about in (("empty", f"--out {empty}: report.html"), ("no/report.html", "no/report.html: no folder"),
                        ("report.pdf", "report.pdf: report.html"), ("report", "report: report.html")):  # fmt: skip
        with refused(about):
            call(one, out=tmp_path / name)
    assert not out.exists()
