"""Tables: which columns, which rows, which one is best; on the terminal, in CSV, in Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddpexp.checkpoint.weights import Best
from ddpexp.cli.table import table as table_verb
from ddpexp.cli.verb import Call
from ddpexp.sweep import comparison, table, table_files
from ddpexp.sweep.arguments import TableArguments
from ddpexp.sweep.files import override_values
from ddpexp.sweep.grid import Fitted, show
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, rows_of
from ddpexp.system.job_schedulers import ScheduledJob
from ddpexp.system.job_schedulers.slurm import SLURM
from ddpexp.system.text import duration
from tests.refusals import refused
from tests.sweep.made import Made

LOSS = Goal("eval/loss", "min")


def row(number: int, objective: float | None = None, status: Any = "done", **changed: Any) -> Row:
    facts: dict[str, Any] = {
        "name": f"{number:04d}", "path": Path(f"/sweep/{number:04d}"), "overrides": {"optimizer.lr": f"0.{number}"},
        "metrics": {} if objective is None else {"eval/loss": objective}, "step": 100, "seconds": 1.5, "job": None,
        "message": None, "started": 1e9, "ended": 1e9 + number,
    }  # fmt: skip
    facts |= changed
    values = {"resolved": facts["overrides"], "values": facts["overrides"]}
    return Row(number=number, status=status, objective=objective, **{**values, **facts})


def text_of(what: Any, width: int = 120, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    console.print(what)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(shown, str)
    return shown


def test_columns_are_what_varies() -> None:
    rows = [
        row(0, overrides={"recipe": "points", "optimizer.lr": "0.1", "model": "a", "data.train": "9"}),
        row(1, overrides={"recipe": "points", "optimizer.lr": "0.1", "model": "b", "data.train": "7"}),
    ]
    assert comparison.varying(rows) == ["model", "data.train"]
    assert comparison.varying(rows[:1]) == []


def test_the_best_is_marked_by_the_mode_and_nan_never_is() -> None:
    rows = [row(0, 0.5), row(1, math.nan), row(2, 0.25), row(3), row(4, 0.75), row(5, math.inf), row(6, -math.inf)]
    for mode, number in (("min", 2), ("max", 4)):
        goal = Goal("eval/loss", mode)  # type: ignore[arg-type]
        found = comparison.best_of(rows, goal)
        assert found is rows[number]
        [marked] = [line for line in text_of(table.render(rows, goal)).splitlines() if " best " in line]
        assert f"000{number}" in marked
    assert comparison.best_of([row(0, math.nan), row(1)], LOSS) is None
    assert comparison.best_of(rows, Goal()) is None


def test_a_job_that_failed_is_never_the_best_and_one_that_runs_only_while_none_is_done() -> None:
    rows = [row(0, 0.1, "failed"), row(1, 0.5, "running"), row(2, 0.9, "done")]
    assert comparison.best_of(rows, LOSS) is rows[2]
    assert comparison.best_of(rows[:2], LOSS) is rows[1]
    assert comparison.best_of(rows[:1], LOSS) is None


def test_the_best_comes_first_and_what_has_no_value_last() -> None:
    rows = [row(0), row(1, math.nan), row(2, 0.5), row(3, 0.25)]
    assert [one.number for one in comparison.sorted_rows(rows, LOSS)] == [3, 2, 0, 1]
    assert [one.number for one in comparison.sorted_rows(rows, Goal("eval/loss", "max"))] == [2, 3, 0, 1]
    assert [one.number for one in comparison.sorted_rows(rows, Goal())] == [0, 1, 2, 3]


def seeded(values: dict[tuple[str, str], float | None], status: str = "done") -> list[Row]:
    return [
        row(
            number,
            value,
            status if value is not None else "failed",
            overrides={"optimizer.lr": rate, "trainer.seed": seed},
        )
        for number, ((rate, seed), value) in enumerate(values.items())
    ]


def test_seeds_have_a_mean_and_a_sample_standard_deviation() -> None:
    rows = seeded({("0.1", "0"): 0.5, ("0.2", "0"): 0.2, ("0.1", "1"): 0.1, ("0.2", "1"): 0.3, ("0.2", "2"): None})
    best, other = comparison.over_seeds(rows, LOSS)
    sample = other.sample(LOSS)
    assert (other.values, other.jobs) == ({"optimizer.lr": "0.1"}, 2)
    assert sample.mean == pytest.approx(0.3)
    assert sample.std == pytest.approx(statistics.stdev([0.5, 0.1]))
    assert (best.values, best.jobs, len(best.sample(LOSS).values)) == ({"optimizer.lr": "0.2"}, 3, 2)
    assert best.sample(LOSS).mean == pytest.approx(0.25)
    grid = table.seeds_grid(rows, LOSS)
    assert grid is not None
    assert grid.header == ["optimizer.lr", "mean eval/loss", "std", "95 % interval", "seeds", ""]
    assert grid.lines == [
        ["0.2", "0.25", "0.07071", "-0.3853 to 0.8853", "2 of 3", "best"],
        ["0.1", "0.3", "0.2828", "-2.241 to 2.841", "2", ""],
    ]
    shown = text_of(table.render(rows, LOSS))
    assert "mean eval/loss" in shown
    assert shown.count(" best") == 2  # of the jobs, and of the means: they need not be the same


def test_a_mean_with_nan_is_nan_and_one_seed_has_no_standard_deviation() -> None:
    rows = seeded({("0.1", "0"): math.nan, ("0.1", "1"): 0.1, ("0.2", "0"): 0.9})
    grid = table.seeds_grid(rows, LOSS)
    assert grid is not None
    assert grid.lines == [["0.2", "0.9", "-", "-", "1", "best"], ["0.1", "nan", "nan", "nan to nan", "2", ""]]


def test_seeds_alone_are_one_group_and_no_seeds_are_none() -> None:
    rows = [row(number, number / 10, overrides={"trainer.seed": str(number), "model": "a"}) for number in range(3)]
    [group] = comparison.over_seeds(rows, LOSS)
    assert group.values == {}
    assert group.sample(LOSS).mean == pytest.approx(0.1)
    assert comparison.over_seeds([row(0, 0.5), row(1, 0.5)], LOSS) == []
    assert table.seeds_grid([row(0, 0.5), row(1, 0.5)], LOSS) is None


def test_accuracy_is_shown_in_percent_and_written_raw() -> None:
    rows = [row(0, 0.975, metrics={"eval/accuracy": 0.975, "eval/loss": 0.12345})]
    assert "97.50%" in text_of(table.render(rows, Goal("eval/accuracy", "max")))
    [line] = csv.DictReader(io.StringIO(table_files.as_csv(rows, LOSS)))
    assert (line["eval/accuracy"], line["eval/loss"]) == ("0.975", "0.12345")


def test_csv_has_one_line_a_job_and_everything_that_is_known() -> None:
    rows = [
        row(
            0,
            0.5,
            overrides={"recipe": "points", "model.name": 'a,"b"'},
            metrics={"eval/loss": 0.5, "train/loss": 0.25},
        ),
        row(
            1,
            None,
            "failed",
            overrides={"recipe": "points"},
            message="rank 0: no luck",
            job=ScheduledJob(SLURM, "12_1"),
            step=None,
            seconds=None,
        ),
    ]
    first, second = csv.DictReader(io.StringIO(table_files.as_csv(rows, LOSS)))
    assert list(first) == [
        "job", "status", "recipe", "model.name", "eval/loss", "train/loss", "best_step", "step", "seconds", "started",
        "ended", "job_id",
        "message", "directory",
    ]  # fmt: skip
    assert (first["model.name"], first["eval/loss"], first["train/loss"], first["step"]) == (
        'a,"b"',
        "0.5",
        "0.25",
        "100",
    )
    assert (second["status"], second["eval/loss"], second["message"], second["job_id"]) == (
        "failed",
        "",
        "rank 0: no luck",
        "12_1",
    )
    assert second["directory"] == "/sweep/0001"


def test_markdown_is_a_table_whatever_the_values_hold() -> None:
    rows = [
        row(0, 0.5, overrides={"model.name": "a|b\n| c", "path": "<b>*x*"}, name="0000_a|b"),
        row(1, 0.25, overrides={"model.name": "[x](y)`", "path": "p\\q"}),
    ]
    lines = table_files.as_markdown(rows, LOSS).splitlines()
    assert lines[1] == "| --- | --- | ---: | --- | --- | ---: | ---: | --- |"
    for line in lines[:4]:
        assert len(re.findall(r"(?<!\\)\|", line.replace("\\\\", ""))) == 9, line
    assert lines[2].startswith(r"| **\[x\](y)\`** | **p\\q** | **0.25** | **best** |")
    assert r"a\|b\\n\| c" in lines[3]
    assert r"\<b\>\*x\*" in lines[3]


CONTROLS = "a\x1b[2Jb\u202ec\rd"


def test_nothing_prints_control_characters() -> None:
    rows = [
        row(
            0,
            0.5,
            overrides={CONTROLS: CONTROLS, "trainer.seed": "0"},
            name=CONTROLS,
            metrics={CONTROLS: 0.5},
            message=CONTROLS,
        ),
        row(1, 0.4, "failed", overrides={CONTROLS: "x", "trainer.seed": "1"}, name="0001"),
    ]
    for goal in (Goal(CONTROLS), Goal()):
        every = (
            text_of(table.render(rows, goal)), text_of(table.live(rows, goal, 30)), table_files.as_csv(rows, goal),
            table_files.as_markdown(rows, goal),
        )  # fmt: skip
        for text in every:
            assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", text)
            assert r"\x1b" in text.replace("\\\\", "\\").replace("\\[", "[")


def test_a_value_that_looks_like_markup_is_shown_as_it_is() -> None:
    rows = [row(0, 0.5, overrides={"a": "[red]x[/red]"}), row(1, 0.6, overrides={"a": ":smile:"})]
    shown = text_of(table.render(rows, LOSS), terminal=True)
    assert "[red]x[/red]" in shown
    assert ":smile:" in shown


@pytest.mark.parametrize("height", [10, 24, 60])
@pytest.mark.parametrize("width", [60, 120])
def test_a_live_table_of_a_thousand_jobs_fits_the_terminal(height: int, width: int) -> None:
    statuses = ["running"] * 8 + ["done"] * 500 + ["failed"] * 3 + ["waiting"] * 489
    rows = [
        row(number, number / 1000 if status != "waiting" else None, status,
            message="no luck " * 40 if status == "failed" else None,
            overrides={"optimizer.lr": str(number), "data.augmentation.strength": f"{number} of a lot"},
            name=f"{number:04d}_optimizer.lr={number},data.augmentation.strength={number}-of-a-lot")
        for number, status in enumerate(statuses)
    ]  # fmt: skip
    shown = text_of(table.live(rows, LOSS, height), width)
    lines = shown.splitlines()
    assert len(lines) < height
    assert len(lines) >= height - 4  # and no room is wasted
    assert max(map(len, lines)) <= width
    assert "1,000 jobs: 489 waiting, 8 running, 500 done, 3 failed" in shown or width == 60
    jobs = lines[: lines.index("")]
    running = sum(" running " in line for line in jobs)
    if height > 20:
        assert running == 8
        assert "0510" in shown  # the last that has ended
        assert "0008" in shown  # the best
    assert not any(" waiting " in line for line in jobs)


def mixed(jobs: int = 12, keys: int = 25) -> list[Row]:
    """Return runs of a folder that differ in many keys: the later a key, the fewer runs it distinguishes."""
    return [
        row(
            number, number / 100, path=Path(f"/data/outputs/{'ab'[number % 2]}/2026-11-21_12-00-{number:02d}"),
            overrides={f"section.key{key}": f"{'long' * 12}{number}" if number > key // 2 else "same" for key in range(keys)},
        )
        for number in range(jobs)
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_of_many_columns_has_those_that_distinguish_most_runs(width: int) -> None:
    rows = mixed()
    keys = comparison.varying(rows)
    lines = text_of(table.render(rows, LOSS, again="ddpexp table X --all"), width).splitlines()
    assert max(map(len, lines)) <= width
    shown = lines[0].split()
    assert shown[0] == "key0"
    assert {"eval/loss", "status"} < set(shown)
    assert sum("…" in line.split()[0] for line in lines[2:] if line) == len(rows) - 1  # values without their middle
    note = " ".join(line.strip() for line in lines[lines.index("") - 3 : lines.index("")])
    left = len([*keys, "eval/loss", *table.FACTS]) - len([name for name in shown if name != "best"])
    assert f"{left} columns have no room here (" in note
    assert "and " in note
    assert lines[lines.index("") - 1].rstrip() == "ddpexp table X --all"  # by itself, to be pasted
    if width >= 80:
        assert sum("12-00-" in line for line in lines) == len(rows)  # the end of a path


def test_a_table_that_fits_says_nothing_of_columns_and_a_file_gets_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert "columns" not in text_of(table.render([row(0, 0.5), row(1, 0.25)], LOSS, again="ddpexp table X --all"), 100)
    rows = mixed()
    show(table.render(rows, LOSS, again="ddpexp table X --all"))
    lines = capsys.readouterr().out.splitlines()
    assert set(comparison.varying(rows)) < set(lines[0].split())
    assert "long" * 12 in lines[3]
    assert "columns" not in "".join(lines)
    for name in ("step", "time", "directory"):
        assert name in lines[0].split()


def test_named_columns_are_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0, 0.5, metrics={"eval/loss": 0.5, "train/lr": 0.125}), row(1, 0.25)]
    show(table.render(rows, LOSS, columns=["time", "train/lr", "optimizer.lr", "eval/loss"]), whole=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["time", "train/lr", "optimizer.lr", "eval/loss"]
    assert lines[2:4] == [["1.5", "s", "0.1", "0.25"], ["1.5", "s", "0.125", "0.0", "0.5"]]


def test_a_narrow_table_of_seeds_keeps_its_best_key() -> None:
    rows = [
        row(number, number / 10, overrides={"a.first_of_some": f"{number // 4}", "a.second_of_some": f"{number // 2}",
                                            "trainer.seed": f"{number % 2}"})
        for number in range(8)
    ]  # fmt: skip
    grid = table.seeds_grid(rows, LOSS)
    assert grid is not None
    [header, *_] = text_of(Fitted(grid), 70).splitlines()
    assert "second_of_some" in header
    assert "first_of_some" not in header


def test_a_long_table_is_cut_after_the_best_and_says_so() -> None:
    shown = text_of(table.render([row(number, 1 - number / 100) for number in range(30)], LOSS, 5))
    assert "... and 25 more" in shown
    assert "0029" in shown
    assert "0024" not in shown


def test_without_an_objective_all_metrics_are_shown_and_none_is_best() -> None:
    rows = [
        row(0, None, metrics={"eval/loss": 0.5, "eval/accuracy": 0.75, "train/loss": 1.0}),
        row(1, None, metrics={"eval/loss": 0.25}),
    ]
    shown = text_of(table.render(rows, Goal()))
    assert "eval/loss" in shown
    assert "75.00%" in shown
    assert "train/loss" not in shown
    assert "best" not in shown.lower()


def test_a_table_of_nothing_is_a_sentence() -> None:
    assert "no jobs" in text_of(table.render([], LOSS))
    assert "no jobs" in text_of(table.live([], LOSS, 24))
    assert table_files.as_csv([], LOSS).startswith("job,status")
    assert "no jobs" in table_files.as_markdown([], LOSS)


def test_files_are_replaced_as_a_whole_and_a_link_is_not_followed(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1")
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    (made.path / "sweep.csv").symlink_to(kept)
    table_files.save(made.path, rows_of(made.path), LOSS)
    assert kept.read_text() == "mine"
    assert (made.path / "sweep.csv").read_text() == table_files.as_csv(rows_of(made.path), LOSS)
    assert (made.path / "sweep.md").read_text() == table_files.as_markdown(rows_of(made.path), LOSS)
    assert not [path for path in made.path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.0, "0.0 s"), (59.94, "59.9 s"), (59.96, "1:00"), (61.4, "1:01"), (3599.6, "1:00:00"), (90061,
        "25:01:01"),
     (math.nan, ""), (-1.0, "")],
)  # fmt: skip
def test_times_are_for_people(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_folds_have_a_mean_and_an_interval_by_students_t() -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    rows = [row(fold, value, overrides={"model": "a", "data.fold": str(fold)}) for fold, value in enumerate(values)]
    [group] = comparison.over_seeds(rows, LOSS)
    half = 2.776 * statistics.stdev(values) / math.sqrt(5)
    assert group.sample(LOSS).interval == pytest.approx((0.3 - half, 0.3 + half))
    grid = table.seeds_grid(rows, LOSS)
    assert grid is not None
    assert grid.header == ["mean eval/loss", "std", "95 % interval", "folds", ""]
    assert grid.lines == [["0.3", "0.1581", "0.1037 to 0.4963", "5", "best"]]
    both = [row(n, 0.1, overrides={"trainer.seed": str(n % 2), "data.fold": str(n // 2)}) for n in range(4)]
    grid = table.seeds_grid(both, LOSS)
    assert grid is not None
    assert grid.header[-2:] == ["runs", ""]
    sample = comparison.Sample([n / 100 for n in range(61)])
    assert sample.interval is not None
    assert sample.interval[1] - 0.3 == pytest.approx(2.0003 * statistics.stdev(sample.values) / math.sqrt(61), rel=1e-4)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423), (31, 2.0395), (60, 2.0003), (1000, 1.9623)],
)
def test_the_quantiles_of_students_t_are_those_of_the_books(freedom: int, quantile: float) -> None:
    assert comparison.t95(freedom) == pytest.approx(quantile, abs=6e-4)


def kept(number: int, last: float, best: float, step: int, keep_best: str = "min:eval/loss", **changed: Any) -> Row:
    """A run that keeps its best step."""
    mode, _, metric = keep_best.partition(":")
    row_of = row(number, last, best=Best(step, mode, metric, best), **changed)
    return replace(row_of, resolved={**row_of.resolved, "trainer.keep_best": keep_best})


def test_runs_that_keep_the_best_of_the_objective_are_compared_by_it() -> None:
    rows, goal = comparison.by_best([kept(0, 0.4, 0.3, 1200), kept(1, 0.35, 0.34, 80)], LOSS)
    assert [one.objective for one in rows] == [0.3, 0.34]
    assert comparison.best_of(rows, goal) is rows[0]
    grid = table.jobs_grid(comparison.sorted_rows(rows, goal), goal)
    assert grid.header[:5] == ["optimizer.lr", "last eval/loss", "best eval/loss", "best step", ""]
    assert grid.lines[0][:5] == ["0.0", "0.4", "0.3", "1,200", "best"]
    assert comparison.chosen_column("eval/loss", rows, goal) == "best eval/loss"
    assert table.jobs_grid(rows, goal, columns=["last eval/loss"]).lines == [["0.4"], ["0.35"]]
    shown = text_of(table.render(rows, goal))
    assert shown.startswith("by the best eval/loss of each run (trainer.keep_best)")
    assert "Best (lowest eval/loss): 0.3 at step 1,200, 0000" in shown
    first, _ = csv.DictReader(io.StringIO(table_files.as_csv(rows, goal)))
    assert (first["eval/loss"], first["best eval/loss"], first["best_step"]) == ("0.4", "0.3", "1200")


@pytest.mark.parametrize(
    ("rows", "basis"),
    [
        ([kept(0, 0.4, 0.3, 8), row(1, 0.35)], "by the last eval/loss of each run: not all"),
        ([kept(0, 0.4, 0.5, 8, "max:eval/loss"), row(1, 0.35)], "by the last eval/loss of each run: trainer.keep_best"),
        ([kept(0, 0.4, 0.9, 8, "max:eval/accuracy"), row(1, 0.35)], ""),
    ],
)
def test_other_runs_are_compared_by_their_last_values(rows: list[Row], basis: str) -> None:
    found, goal = comparison.by_best(rows, LOSS)
    assert [one.objective for one in found] == [0.4, 0.35]
    assert table.basis_text(found, goal)[: len(basis)] == basis
    assert bool(table.basis_text(found, goal)) == bool(basis)
    assert {"last eval/loss", "eval/loss"} & set(header := table.jobs_grid(found, goal).header)
    assert "best step" in header
    assert comparison.chosen_column("eval/loss", found, goal) == "eval/loss"


def test_a_sweep_and_its_jobs_cannot_mean_opposite_directions() -> None:
    assert LOSS.of_run("min:eval/loss").name == "best eval/loss"
    assert LOSS.of_run("max:eval/accuracy").name == LOSS.of_run(None).name == "eval/loss"
    with refused("trainer.keep_best=max:eval/loss: trainer.keep_best=min:eval/loss"):
        LOSS.of_run("max:eval/loss")


def of_seeds() -> tuple[list[Row], Goal]:
    """Two rates with three seeds each, which keep their best."""
    rows = [
        kept(
            number, 1.0 + number / 100, 0.5 + number / 100, 8,
            overrides={"optimizer.lr": f"0.{1 + number // 3}", "trainer.seed": str(number % 3)},
            metrics={"eval/loss": 1.0 + number / 100, "eval/accuracy": 0.9 + number / 1000},
        )
        for number in range(6)
    ]  # fmt: skip
    return comparison.by_best(rows, LOSS)


def test_a_paper_gets_means_with_their_deviation_in_sensible_digits() -> None:
    rows, goal = of_seeds()
    markdown = table_files.as_text(rows, goal, "markdown", seeds_only=True).splitlines()
    assert markdown[2].startswith("| optimizer.lr | best eval/loss | last eval/loss | last eval/accuracy |")
    assert markdown[4].startswith("| **0.1** | **0.510 ± 0.010** | **1.010 ± 0.010** | **90.10 ± 0.10 %** |")
    latex = table_files.as_text(rows, goal, "latex")
    assert latex.count("\\toprule") == latex.count("\\bottomrule") == 2
    assert "0.540 $\\pm$ 0.010 & 1.040 $\\pm$ 0.010 & 90.40 $\\pm$ 0.10 \\% & 0.5152 to 0.5648 & 3 \\\\" in latex
    assert "status" not in latex
    chosen = table_files.as_text(rows, goal, "markdown", ["optimizer.lr", "eval/accuracy"]).splitlines()
    assert sum(line.count("| last eval/accuracy |") for line in chosen) == 2  # of the runs, and over the seeds
    assert not any("| eval/loss |" in line for line in chosen)
    seeds = text_of(table.render(rows, goal, columns=["last eval/loss"], seeds_only=True))
    assert "95 % interval of last eval/loss" in seeds
    assert "eval/accuracy" not in seeds


def test_runs_are_not_compared_by_the_set_test() -> None:
    with refused("sweep.objective=test/loss: validation"):
        TableArguments.of(["outputs", "sweep.objective=test/loss"])


def test_values_are_shown_without_the_backslashes_of_the_grammar() -> None:
    assert override_values([r"trainer.keep_best=max\:eval/loss", r"data.root=a\ b"]) == {
        "trainer.keep_best": "max:eval/loss", "data.root": "a b",
    }  # fmt: skip


def test_latex_is_escaped_whatever_the_values_hold() -> None:
    rows = [row(0, 0.5, overrides={"a_b": "50% & #1 {x}~^\\"}), row(1, 0.25, overrides={"a_b": "0.1 -> 0.01 at 8"})]
    lines = table_files.as_text(rows, LOSS, "latex").splitlines()
    assert "a\\_b & eval/loss \\\\" in lines
    assert "\\textbf{0.1 $\\to$ 0.01 at 8} & \\textbf{0.25} \\\\" in lines
    assert "50\\% \\& \\#1 \\{x\\}\\textasciitilde{}\\textasciicircum{}\\textbackslash{} & 0.5 \\\\" in lines


def test_every_metric_of_a_group_is_a_record_of_plain_numbers() -> None:
    rows, goal = of_seeds()
    records = list(csv.DictReader(io.StringIO(table_files.as_text(rows, goal, "csv", seeds_only=True))))
    assert [(record["optimizer.lr"], record["metric"]) for record in records[:3]] == [
        ("0.1", "best eval/loss"), ("0.1", "eval/loss"), ("0.1", "eval/accuracy"),
    ]  # fmt: skip
    first = {name: float(records[0][name]) for name in ("n", "mean", "std", "low", "high")}
    half = 4.303 * 0.01 / math.sqrt(3)
    assert first == pytest.approx({"n": 3, "mean": 0.51, "std": 0.01, "low": 0.51 - half, "high": 0.51 + half})


def test_all_columns_are_all_keys_that_differ_and_all_metrics() -> None:
    rows = [
        row(0, 0.5, metrics={"eval/loss": 0.5, "train/loss": 0.1}, overrides={"recipe": "a", "model.x": "1"}),
        row(1, 0.25, overrides={"recipe": "b"}, resolved={}, values={"recipe": "b", "model.x": "2", "trainer.y": "3"}),
    ]
    rows[0] = replace(rows[0], overrides={"recipe": "a"}, values={**rows[0].values, "trainer.y": "1"}, resolved={})
    assert comparison.varying(rows) == ["recipe"]
    assert table.all_columns(rows, LOSS)[:5] == ["recipe", "model.x", "trainer.y", "eval/loss", "train/loss"]


@pytest.mark.parametrize(
    ("values", "percent", "plain"),
    [
        ((0.14, 0.15, 0.16), "15.0 ± 1.0 %", "0.150 ± 0.010"),  # of which the deviation is 0.00999...
        ((0.09, 0.09), "9.00%", "0.09"),
        ((0.5, 0.9), "70 ± 28 %", "0.70 ± 0.28"),
    ],
)
def test_a_mean_has_two_digits_of_its_deviation(values: tuple[float, ...], percent: str, plain: str) -> None:
    sample = comparison.Sample(values)
    assert (table.mean_text("test/accuracy", sample), table.mean_text("test/loss", sample)) == (percent, plain)


def test_a_measure_of_the_steps_is_a_column_when_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path)
    for seed, seconds in ((0, 0.25), (1, 0.75)):
        job = made.job("optimizer.lr=0.1", f"trainer.seed={seed}")
        line = {"step": 30, "train/loss": 0.5, "times/data": seconds, "memory/host": 2.5}
        with (job / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")
    [first, _] = rows_of(tmp_path)
    assert first.measured == {"times/data": 0.25, "memory/host": 2.5}
    assert set(first.metrics) == {"train/loss", "eval/loss"}
    options = {"--columns": "trainer.seed,times/data,memory/host", "--format": "markdown"}
    assert table_verb(Call("table", [str(tmp_path)], options)) == 0
    shown = capsys.readouterr().out
    assert "| 1 | 0.75 | 2.5 |" in shown
    assert "0.50 ± 0.35" in shown
    assert table_verb(Call("table", [str(tmp_path)], {**options, "--columns": "times/data", "--seeds": ""})) == 0
    assert table_verb(Call("table", [str(tmp_path)], {"--format": "markdown"})) == 0
    assert "times/" not in capsys.readouterr().out.split("0.50 ± 0.35")[-1]
    with refused("--columns times/dat: times/data"):
        table_verb(Call("table", [str(tmp_path)], {"--columns": "times/dat"}))
