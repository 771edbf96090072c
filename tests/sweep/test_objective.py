"""What a job returns to Hydra's sweepers: its objective; Optuna's plugin in its documented form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ddpexp.config.build import build
from ddpexp.run.directory import RunDir
from ddpexp.settings.run import SweepSettings
from ddpexp.sweep.sweep_log import SweepLog
from tests.refusals import refused
from tests.sweep.conftest import Sweeps, most_at_once

OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.seed=1",
          "hydra.sweeper.direction=maximize", "sweep.mode=max", "sweep.objective=eval/accuracy",
          "optimizer.lr=interval(0.001,0.5)", "trainer.max_steps=4", "trainer.eval_every=2",
          "trainer.keep_best=max:eval/accuracy")  # fmt: skip


def test_optuna_gets_the_objectives_and_runs_its_trials_side_by_side(sweeps: Sweeps) -> None:
    sweep = sweeps(*OPTUNA)
    assert sweep.code == 0, sweep.err
    assert sweep.statuses() == ["done"] * 6
    assert most_at_once(sweep.events()) == 2
    found = yaml.safe_load((sweep.path / "optimization_results.yaml").read_text())
    values = [result["best"]["value"] for result in sweep.results().values()]
    assert found["best_value"] == max(values)
    assert [event["objective"] for event in sorted(sweep.events("ended"), key=lambda event: event["job"])] == values


@pytest.mark.slow
def test_the_same_command_with_a_seed_suggests_the_same_trials_which_are_done(sweeps: Sweeps) -> None:
    sweep = sweeps(*OPTUNA)
    assert sweep.code == 0, sweep.err
    again = sweeps(*OPTUNA, "hydra.sweeper.n_trials=8", path=sweep.path)
    assert again.code == 0, again.err
    assert len(again.events("started")) == 8


@pytest.mark.slow
def test_a_trial_that_fails_is_reported_to_optuna_and_listed(sweeps: Sweeps) -> None:
    overrides = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.sampler.seed=1",
             "sweep.objective=eval/loss", "model._target_=points.Wide",
             "model.hidden=choice(8,13)")  # fmt: skip
    sweep = sweeps(*overrides)
    assert sweep.code == 1
    assert sorted({event["status"] for event in sweep.events("ended")}) == ["done", "failed"]
    assert "1 of 2 jobs failed:" in sweep.err  # a trial that was had before is not run again
    assert "13 units bring bad luck" in sweep.err


def test_a_trial_that_diverges_neither_ends_a_study_nor_is_repeated(sweeps: Sweeps) -> None:
    overrides = (
        "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1",
        "sweep.objective=eval/loss", "optimizer.lr=choice(1e38,0.1)", "trainer.max_steps=4", "sweep.retries=2",
    )  # fmt: skip
    sweep = sweeps(*overrides)
    assert sweep.code == 1
    assert sorted(event["status"] for event in sweep.events("ended")) == ["done", "failed"]
    assert sweep.err.count("NonFiniteError") == 1
    assert "Error executing job" not in sweep.err
    again = sweeps.again(sweep.path)
    assert (again.code, len(again.events("started"))) == (1, 2)
    assert "trainer.nonfinite=skip" in again.err
    assert "resume the sweep with" not in again.err
    strict = sweeps.again(sweep.path, "hydra.sweeper.max_failure_rate=0")
    assert "hydra.sweeper.max_failure_rate=0 allows" in strict.err
    assert strict.err.rstrip().endswith(" hydra.sweeper.max_failure_rate=1")


@pytest.mark.slow
def test_a_study_in_which_every_trial_fails_is_a_failure_and_no_traceback(sweeps: Sweeps) -> None:
    overrides = (
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.max_failure_rate=1",
        "sweep.objective=eval/loss",
    )
    sweep = sweeps(*overrides, "model._target_=points.Wide", "model.hidden=13", "optimizer.lr=interval(0.1,0.2)")
    assert sweep.code == 1
    assert "ddpexp: 2 of 2 jobs failed:" in sweep.err
    assert "Traceback" not in sweep.err


def test_an_objective_that_no_job_reports_is_refused_at_once_with_the_right_metric(sweeps: Sweeps) -> None:
    sweep = sweeps("sweep.objective=eval/acuracy", "sweep.mode=max", "trainer.seed=0,1,2")
    assert sweep.code == 1
    assert sweep.statuses() == ["done"] * 3
    says = (
        r"eval/acuracy is no metric that job 000\d_trainer\.seed=\d reports(?: so far)?\. Did you mean "
        r"sweep\.objective=eval/accuracy\?"
    )
    assert len(re.findall(says, sweep.err)) == 2
    assert sweep.err.index("ddpexp: warning: sweep.objective") < sweep.err.index("ddpexp: sweep.objective")
    right = sweeps.again(sweep.path, "sweep.objective=eval/accuracy")
    assert (right.code, len(right.events("started"))) == (0, 3)


@pytest.mark.slow
def test_an_objective_that_the_first_evaluation_lacks_is_said_while_the_job_runs(sweeps: Sweeps) -> None:
    length = ("trainer.max_steps=null", "trainer.epochs=1000000", "trainer.max_seconds=3")
    sweep = sweeps(
        "sweep.objective=validation/accuracy", "sweep.mode=max", "trainer.seed=0,1", "trainer.eval_every=5", *length
    )
    assert (
        "is no metric that job 0000_trainer.seed=0 reports so far. Did you mean sweep.objective=eval/accuracy?"
        in sweep.err
    )


@pytest.mark.parametrize(
    ("objective", "lines", "is_known", "is_missing"),
    [
        ("train/loss", ['{"step": 0, "eval/loss": 1}'], False, False),  # evaluated at the start
        ("train/loss", ['{"step": 0, "eval/loss": 1}', '{"step": 1, "train/loss": 1}'], True, False),
        ("train/lost", ['{"step": 1, "train/loss": 1}'], True, True),
        ("eval/accuracy", ['{"step": 1, "train/loss": 1}'], False, False),
        ("eval/accuracy", ['{"step": 1, "eval/loss": 1, "eval/accuracy": 1}'], True, False),
        ("eval/accuracy", ['{"step": 1, "validation/loss": 1, "validation/accuracy": 1}'], True, True),
    ],
)
def test_a_metric_is_missing_once_its_kind_is_recorded_without_it(
    objective: str,
    lines: Sequence[str],
    is_known: bool,
    is_missing: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text("".join(f"{line}\n" for line in lines))
    unused: Any = None
    log = SweepLog(unused, replace(build(SweepSettings, {}, "sweep"), objective=objective), unused)
    job: Any = SimpleNamespace(name="0000", run=run)
    assert log.check_objective(job) is is_known
    assert ("is no metric that job 0000 reports so far" in capsys.readouterr().err) is is_missing


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("hydra/sweeper=optuna",), "hydra/sweeper: sweep.objective="),
        (
            ("hydra/sweeper=optuna", "sweep.objective=eval/accuracy", "sweep.mode=max"),
            "hydra.sweeper.direction=minimize: sweep.mode=max",
        ),
        (("hydra/sweeper=optuma", "sweep.objective=eval/loss"), "hydra/sweeper=optuma: optuna"),
    ],
)
def test_a_sweeper_that_has_nothing_to_choose_by_is_refused(
    refused_sweep: Callable[..., None], overrides: tuple[str, ...], expected: str
) -> None:
    with refused(expected):
        refused_sweep(*overrides, "optimizer.lr=interval(0.001,0.5)")


def test_what_optuna_itself_does_not_take_is_refused(sweeps: Sweeps) -> None:
    sweep = sweeps(*OPTUNA, "hydra.sweeper.n_trials=0")
    assert sweep.code == 2
    assert re.search(r"^ddpexp: hydra/sweeper=optuna .* hydra\.sweeper\.n_trials=0", sweep.err, re.MULTILINE), sweep.err
    assert not sweep.path.exists()
