"""Which jobs are pruned: by the median of the others, by successive halving; and that they are stopped."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from ddpexp.sweep.early import best_so_far, prune_reason
from ddpexp.sweep.files import curve
from tests.sweep.conftest import Sweeps

FIVE = {number: [(10, float(number)), (20, float(number) / 2)] for number in range(5)}


def test_worse_than_the_median_of_the_others_is_pruned() -> None:
    assert prune_reason("median", "min", 1, 3, 2, FIVE) is None
    said = prune_reason("median", "min", 1, 3, 4, FIVE)
    assert said == "2 at step 20 is worse than the median 0.75 of 4 others"
    assert prune_reason("median", "max", 1, 3, 4, FIVE) is None
    assert prune_reason("median", "max", 1, 3, 0, FIVE) == "0 at step 20 is worse than the median 2.5 of 4 others"


def test_a_median_is_of_those_that_came_as_far_and_of_four_at_least() -> None:
    ahead = {**FIVE, 4: [*FIVE[4], (30, 99.0)]}
    assert prune_reason("median", "min", 1, 3, 4, ahead) is None
    assert prune_reason("median", "min", 30, 3, 3, FIVE) is None
    assert prune_reason("median", "min", 1, 3, 4, {key: FIVE[key] for key in (0, 1, 2, 4)}) is None


def test_what_a_job_has_reached_before_counts() -> None:
    curves = {**FIVE, 5: [(10, 0.0), (20, 50.0)]}
    assert prune_reason("median", "min", 1, 3, 5, curves) is None


def test_a_job_without_a_number_is_pruned_and_one_without_an_evaluation_is_not() -> None:
    curves = {**FIVE, 5: [(10, math.nan)], 6: []}
    assert prune_reason("median", "min", 1, 3, 5, curves) is not None
    assert prune_reason("median", "min", 1, 3, 6, curves) is None
    assert prune_reason("halving", "max", 10, 3, 5, curves) is not None


def test_halving_lets_the_best_of_each_three_continue_at_each_rung() -> None:
    curves = {number: [(10, float(number))] for number in range(6)}
    on = [number for number in curves if prune_reason("halving", "min", 10, 3, number, curves) is None]
    assert on == [0, 1]
    first = {number: curves[number] for number in (4, 5)}
    assert all(prune_reason("halving", "min", 10, 3, number, first) is None for number in first)
    later = {**curves, 0: [(10, 0.0), (30, 7.0)], 1: [(10, 1.0), (30, 3.0)], 2: [(10, 0.5), (30, 1.0)]}
    assert prune_reason("halving", "min", 10, 3, 0, later) == "7 at step 30 is number 3 of 3: one in 3 continues"


def test_a_job_that_keeps_its_best_is_compared_by_the_best_so_far() -> None:
    curve = [(10, 3.0), (20, 1.0), (30, 2.0)]
    assert best_so_far(curve, "min") == [(10, 3.0), (20, 1.0), (30, 1.0)]
    assert best_so_far(curve, "max") == [(10, 3.0), (20, 3.0), (30, 3.0)]


def test_a_curve_is_read_up_to_what_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 4, "train/loss": 1}\n{"step": 4, "eval/loss": 2.5}\n[1]\n{"step": 8, "eval/loss": null}\n{"st'
    )
    assert curve(path, "eval/loss") == [(4, 2.5)]
    assert curve(tmp_path / "none", "eval/loss") == []


WORDS = ("sweep.early_stop=halving", "sweep.early_stop_after=4", "sweep.early_stop_factor=2",
    "sweep.objective=eval/loss",
         "task._target_=points.Paced", "trainer.eval_every=2", "trainer.max_steps=30", "trainer.epochs=null",
         "trainer.gpus=2", "sweep.slots=4")  # fmt: skip


def test_a_pruned_job_saves_exits_with_all_its_ranks_and_stays_pruned(sweeps: Sweeps) -> None:
    sweep = sweeps(*WORDS, "optimizer.lr=0.0,0.1")
    assert sweep.code == 0, sweep.err
    ended = {event["job"]: event for event in sweep.events("ended")}
    assert [ended[0]["status"], ended[1]["status"]] == ["stopped", "done"]
    assert re.match(r".* at step 4 is number 2 of 2: one in 2 continues$", ended[0]["message"])
    results = list(sweep.results().values())
    assert [result["status"] for result in results] == ["interrupted", "done"]
    assert 4 <= results[0]["step"] < 30
    assert list(sweep.jobs()[0].glob(f"checkpoints/step-{results[0]['step']:08d}/checkpoint.json"))
    again = sweeps.again(sweep.path)
    assert (again.code, len(again.events("started"))) == (0, 2)


@pytest.mark.slow
def test_a_pruned_job_continues_when_jobs_are_no_longer_stopped(sweeps: Sweeps) -> None:
    sweep = sweeps(*WORDS, "optimizer.lr=0.0,0.1")
    assert sweep.statuses() == ["interrupted", "done"]
    whole = sweeps.again(sweep.path, "sweep.early_stop=null")
    assert (whole.code, whole.statuses()) == (0, ["done", "done"])
    alone = sweeps.solo("trainer.max_steps=30", "trainer.epochs=null", "trainer.gpus=2", "optimizer.lr=0.0")
    assert next(iter(whole.results().values()))["weights_sha256"] == alone


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("sweep.early_stop=median",),
            r"sweep\.early_stop=median compares jobs by their objective, but sweep.objective is not set",
        ),
        (("sweep.early_stop=medium",), r"sweep\.early_stop=medium is not .*Did you mean sweep\.early_stop=median"),
    ],
)
def test_wrong_arguments_are_refused(sweeps: Sweeps, overrides: tuple[str, ...], says: str) -> None:
    sweep = sweeps(*overrides, "trainer.seed=0,1")
    assert (sweep.code, re.search(says, sweep.err) is not None) == (2, True), sweep.err
