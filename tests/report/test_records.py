"""Curves and times from a metrics.jsonl of any kind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ddpexp.report import drawn as drawing
from ddpexp.report.drawn import drawn
from ddpexp.report.records import read_records, without_measures
from ddpexp.report.step_phases import bars
from ddpexp.sweep.files import curve
from ddpexp.train.step_times import RECORDED_PHASES
from tests.report.made import record, write_records


def test_the_measures_of_a_record_are_cut_out_wherever_they_stand(tmp_path: Path) -> None:
    measures = {**{f"times/{phase}": 0.1 for phase in RECORDED_PHASES}, "memory/gpu": 3.0}
    rest = {"step": 5, "train/loss": 0.5, "eval/loss": 1.0}
    within = {"step": 5, "train/loss": 0.5, **measures, "eval/loss": 1.0}
    for one in (within, rest, {**rest, **measures}):
        assert json.loads(without_measures(json.dumps(one).encode())) == rest
    for number, one in enumerate((within, {**measures, **rest})):  # the second one is no JSON without them
        found = read_records(write_records(tmp_path / str(number), [one]), 100)
        assert set(found.curves) == {"train/loss", "eval/loss", "memory/gpu"}


def test_curves_are_those_that_the_plot_of_a_sweep_has(tmp_path: Path) -> None:
    records = [record(step, {"train/loss": 1 / step, "train/lr": math.nan}) for step in range(1, 1201)]
    evaluated = [{"step": step, "epoch": step / 100, "eval/loss": step, "name": "x"} for step in (600, 1200)]
    path = write_records(tmp_path / "metrics.jsonl", [*records, *evaluated, records[-1]])
    found = read_records(path, 10_000)
    assert set(found.curves) == {"train/loss", "eval/loss"}
    for name, of_metric in found.curves.items():
        assert list(zip(of_metric.steps, of_metric.values, strict=True)) == curve(path, name)
    assert found.epochs[0] == (1, 0.01)
    assert found.epochs[-1] == (1200, 12.0)


@pytest.mark.parametrize("last", [False, True])
def test_times_of_some_records_have_the_mean_of_all_with_the_rare_ones_as_rare_as_they_are(
    tmp_path: Path, last: bool
) -> None:
    records = [record(10 * n, evaluation=7.0 if n % 100 == 0 else 0.0, slow_rank=3) for n in range(1, 2001)]
    if last:  # as a single worker writes it
        records = [{k: v for k, v in one.items() if "slow" not in k} for one in records]
    found = read_records(write_records(tmp_path / "metrics.jsonl", records), 1000)
    assert len(found.measured) < 300
    [bar] = bars(found.measured, spans=False)
    phases = dict(zip(RECORDED_PHASES, bar["phases"], strict=True))
    assert phases["evaluation"] == pytest.approx(0.07)
    assert phases["forward"] == pytest.approx(0.002)
    assert bar["label"] == "steps 1 to 20,000"
    assert bar["slow"] == ("" if last else "rank 3 in 100% of the steps, 1.5 times slower")
    spans = bars(found.measured, spans=True)
    assert len(spans) == 12
    assert spans[0]["label"].startswith("steps 1 to 1,")
    assert spans[-1]["label"].endswith(" to 20,000")


@pytest.mark.parametrize(
    "line",
    [
        "", "[]", "1", '"text"', "{", '{"step": 3}', '{"step": -1, "a/b": 1.0}', '{"step": "4", "a/b": 1.0}',
        '{"step": 1e999, "a/b": 1}', '{"step": 4, "a/b": ' + "9" * 400 + "}", '{"step": 4, "a/b": "x", "times/": []}',
        '{"step": 4, "a/b": ' + "[" * 100_000, '{"step": 4, "a/b": null}', '{"step": 4, "a/b": true}',
        '{"step": 4, "a/b": NaN}', '{"step": 4},{"step": 5, "c/d": 1}', '{"x": [1', '"times/forward": 3',
        '{"step": 4, "times/forward": "x", "times/slow_rank": {}}', '{"step": 4, "times/forward": 1e300}',
    ],
)  # fmt: skip
def test_a_line_that_no_run_writes_hides_no_other(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    first, last = ({"step": step, "eval/loss": 0.5} for step in (1, 9))
    path.write_text(f"{json.dumps(first)}\n{line}\n{json.dumps(last)}\n")
    found = read_records(path, 100)
    assert set(found.curves) <= {"eval/loss", "c/d"}
    assert list(found.curves["eval/loss"].steps) == [1, 9]
    bars(found.measured, spans=True)


def test_a_file_with_thousands_of_metrics_has_bounded_curves(tmp_path: Path) -> None:
    lines = [{"step": step, **{f"eval/{n}": 1.0 * n for n in range(3000)}} for step in range(40)]
    found = read_records(write_records(tmp_path / "metrics.jsonl", lines), 1500)
    assert len(found.curves) + found.more == 3000
    assert sum(len(of_metric.steps) for of_metric in found.curves.values()) <= 1600
    assert read_records(tmp_path / "none", 100).curves == {}


def test_several_processes_read_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_records(tmp_path / f"{n}", [record(s, {"a/b": float(n)}) for s in (1, 2)]) for n in range(5)]
    alone = drawn([*paths, tmp_path / "none"], 100)
    monkeypatch.setattr(drawing, "_LARGE", 1)
    monkeypatch.setattr(drawing, "usable_cores", lambda: 2)
    assert drawn([*paths, tmp_path / "none"], 100) == alone
    assert [one["curves"]["a/b"]["y"] for one in alone[:-1]] == [[n, n] for n in range(5)]


@pytest.mark.parametrize("slow_rank", [-0.8, 0.2, 1e300])
def test_a_slow_rank_that_no_run_has_written_ends_no_report(tmp_path: Path, slow_rank: float) -> None:
    records = [{**record(n), "times/slow_rank": slow_rank} for n in range(1, 20)]
    found = read_records(write_records(tmp_path / "metrics.jsonl", records), 1000)
    assert all(isinstance(bar["slow"], str) for bar in bars(found.measured, spans=True))
