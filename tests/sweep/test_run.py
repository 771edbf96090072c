"""Whole sweeps: jobs side by side, each with the numbers of the same run alone; what fails, stops and resumes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpexp.config.compose import compose_command
from tests.conftest import ddpexp_processes, finish
from tests.points import wait_for
from tests.refusals import refused
from tests.sweep.conftest import SweepDone, Sweeps, most_at_once

PACED = ("task._target_=points.Paced", "trainer.epochs=200", "trainer.eval_every=0", "trainer.checkpoint_every=0")
"""A job that lasts until the test has it hurry."""
GRID = ("optimizer.lr=0.05,0.2", "trainer.seed=range(2)")


def test_a_grid_fills_the_slots_and_every_job_has_the_weights_of_the_same_run_alone(sweeps: Sweeps) -> None:
    sweep = sweeps(*GRID)
    assert (sweep.code, sweep.err.count("warning")) == (0, 0)
    names = [path.name for path in sweep.jobs()]
    assert names == [
        "0000_optimizer.lr=0.05,trainer.seed=0", "0001_optimizer.lr=0.05,trainer.seed=1",
        "0002_optimizer.lr=0.2,trainer.seed=0", "0003_optimizer.lr=0.2,trainer.seed=1",
    ]  # fmt: skip
    assert sweep.statuses() == ["done"] * 4
    for name, result in sweep.results().items():
        assert result["weights_sha256"] == sweeps.solo(*name.partition("_")[2].split(","))
    assert len({result["weights_sha256"] for result in sweep.results().values()}) == 4
    assert most_at_once(sweep.events()) == 2
    # From the sweep's own record: the slot of a job that has ended is at once the next one's.
    ends, starts = sweep.events("ended"), sweep.events("started")
    held = {start["job"]: start["slots"] for start in starts}
    assert sorted(start["slots"] for start in starts[2:]) == sorted(held[end["job"]] for end in ends[:2])
    taken: set[int] = set()
    for event in sweep.events():
        if event["event"] == "started":
            assert taken.isdisjoint(event["slots"])
            taken.update(event["slots"])
        elif event["event"] == "ended":
            taken.difference_update(held[event["job"]])


def test_a_config_file_makes_a_command_a_sweep(sweeps: Sweeps) -> None:
    """`hydra.mode` and `hydra.sweeper.params` in a file do what -m and these words do."""
    text = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {trainer.seed: 'range(2)'}}}\n"
    (sweeps.recipe.folder / "conf/experiment").mkdir(exist_ok=True)
    (sweeps.recipe.folder / "conf/experiment/searched.yaml").write_text(text)
    overrides, path = sweeps.words("+experiment=searched")
    assert overrides[0] == "-m"
    process, _ = sweeps.recipe.ddpexp.start(*overrides[1:])
    sweep = SweepDone(finish(process, path), path)
    assert sweep.code == 0, sweep.err
    assert [name.partition("_")[2] for name in sweep.results()] == ["trainer.seed=0", "trainer.seed=1"]
    assert sweep.statuses() == ["done"] * 2
    assert sweeps.again(path).code == 0
    plan = sweeps.recipe.ddpexp("plan", *overrides[1:5], "+experiment=searched")
    assert (plan.code, "hydra.mode=RUN" in plan.err) == (2, True)


@pytest.mark.slow
def test_a_rank_of_a_job_has_the_pipes_and_sockets_of_the_same_run_alone_and_no_more(sweeps: Sweeps) -> None:
    sweep = sweeps("task._target_=points.Held", "trainer.seed=range(5)")
    assert sweep.code == 0, sweep.err
    alone = sweeps.recipe("task._target_=points.Held", "trainer.gpus=1")
    assert alone.code == 0, alone.err
    held = [(run / "ranks" / "held").read_text() for run in (*sweep.jobs(), alone.run)]
    assert "socket" in held[0]
    assert held == held[:1] * 6


@pytest.mark.slow
def test_jobs_of_different_size_share_the_machine(sweeps: Sweeps) -> None:
    sweep = sweeps("trainer.gpus=2,1", "trainer.seed=0,1")
    assert sweep.code == 0, sweep.err
    assert most_at_once(sweep.events()) == 2
    assert sorted(len(event["slots"]) for event in sweep.events("started")) == [1, 1, 2, 2]
    hashes = [result["weights_sha256"] for result in sweep.results().values()]
    assert hashes[0] == sweeps.solo("trainer.gpus=2", "trainer.seed=0")
    assert [result["world_size"] for result in sweep.results().values()] == [2, 2, 1, 1]


@pytest.mark.fault(66)
def test_a_job_that_fails_leaves_the_others_alone_and_is_listed(sweeps: Sweeps) -> None:
    sweep = sweeps("model._target_=points.Wide", "model.hidden=13,8,9,13")
    assert sweep.code == 1
    assert [event["status"] for event in sorted(sweep.events("ended"), key=lambda event: event["job"])] == [
        "failed",
        "done",
        "done",
    ]
    assert "1 of 3 jobs failed:\n" in sweep.err
    assert re.search(r"^  0000_model\.hidden=13: rank 0: ValueError: 13 units bring bad luck$", sweep.err, re.MULTILINE)
    assert "13 units bring bad luck" in (sweep.path / "logs" / "0000.log").read_text()
    assert (sweep.jobs()[0] / "error.json").is_file()


@pytest.mark.slow
def test_with_on_failure_stop_no_more_jobs_are_started(sweeps: Sweeps) -> None:
    sweep = sweeps("sweep.on_failure=stop", "model._target_=points.Wide", *PACED, "model.hidden=8,13,9,10,11")
    assert sweep.code == 1
    statuses = {event["job"]: event["status"] for event in sweep.events("ended")}
    assert statuses == {0: "interrupted", 1: "failed"}
    assert len(sweep.events("started")) == 2
    sweeps.hurry()
    again = sweeps.again(sweep.path, "model.hidden=8,9")
    assert again.code == 0, again.err
    assert (
        "3 of the directory's jobs are not finished, and not part of this command: 0001_model.hidden=13, 0003_model"
        in again.err
    )
    assert {path.name: (path / "result.json").read_text().count('"done"') for path in again.jobs()} == {
        "0000_model.hidden=8": 1, "0001_model.hidden=13": 0, "0002_model.hidden=9": 1,
    }  # fmt: skip


def test_a_job_that_failed_is_restarted_and_resumes_from_its_checkpoint(sweeps: Sweeps, tmp_path: Path) -> None:
    overrides = ("sweep.retries=1", "trainer.checkpoint_every=2", "trainer.seed=choice(3)")
    sweep = sweeps(*overrides, "task._target_=points.Once", environ={"MARKS": str(tmp_path)})
    assert sweep.code == 0, sweep.err
    assert [event["status"] for event in sweep.events("ended")] == ["failed", "done"]
    assert "resuming " in (sweep.path / "logs" / "0000.log").read_text()
    [result] = sweep.results().values()
    assert result["weights_sha256"] == sweeps.solo("trainer.seed=3")


@pytest.mark.fault(67)
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_has_the_running_jobs_save_and_the_same_command_ends_with_the_same_weights(
    sweeps: Sweeps, number: int
) -> None:
    overrides = (*PACED, "trainer.seed=range(3)")
    process, path = sweeps.start(*overrides)
    wait_for(lambda: len(list(path.glob("*/metrics.jsonl"))) == 2)
    process.send_signal(number)
    stopped = SweepDone(finish(process, path), path)
    assert stopped.code == 128 + number
    assert stopped.err.splitlines()[-1].startswith(f"python -m ddpexp resume {path.name} --config-dir ")
    assert stopped.statuses() == ["interrupted", "interrupted"]
    sweeps.hurry()
    again = sweeps.again(path) if number == signal.SIGINT else sweeps(*overrides, path=path)
    assert again.code == 0, again.err
    assert again.statuses() == ["done"] * 3
    alone = sweeps.solo(*PACED[1:], "trainer.seed=0")
    assert again.results()["0000_trainer.seed=0"]["weights_sha256"] == alone


def test_a_job_that_a_callback_ends_is_done(sweeps: Sweeps) -> None:
    overrides = "trainer.seed=0,1", "callbacks=early_stopping", "callbacks.early_stopping.patience=1"
    swept = sweeps(*overrides, "callbacks.early_stopping.min_delta=10", "trainer.epochs=5", "trainer.eval_every=1")
    assert swept.code == 0, swept.err
    assert swept.statuses() == ["done", "done"]
    assert [(result["step"], "early_stopping" in result["stopped"]) for result in swept.results().values()] == [
        (2, True), (2, True),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_job_that_refuses_to_resume_says_why(sweeps: Sweeps) -> None:
    process, path = sweeps.start(*PACED, "trainer.seed=0,1")
    wait_for(lambda: sum(len(file.read_text().splitlines()) > 2 for file in path.glob("*/metrics.jsonl")) == 2)
    process.send_signal(signal.SIGINT)
    finish(process, path)
    again = sweeps.again(path, "trainer.max_steps=1")
    assert again.code == 1
    assert (
        len(re.findall(r"^  000\d_trainer.seed=\d: the run is at step \d+, and .* step 1", again.err, re.MULTILINE))
        == 2
    )
    assert "signal" not in again.err


def test_a_signal_before_the_first_job_leaves_nothing_and_promises_nothing(sweeps: Sweeps) -> None:
    process, path = sweeps.start("trainer.seed=range(5000)")
    wait_for((path / "lock").exists)
    process.send_signal(signal.SIGTERM)
    sweep = SweepDone(finish(process, path), path)
    assert (sweep.code, sweep.err) == (143, "ddpexp: interrupted by SIGTERM; nothing was started\n")
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.fault(67)
def test_after_sigkill_nothing_lives_and_no_finished_job_is_run_again(sweeps: Sweeps) -> None:
    overrides = (*PACED, "trainer.epochs=1,200", "trainer.seed=0,1")
    before = ddpexp_processes()
    process, path = sweeps.start(*overrides)
    wait_for(lambda: len([1 for result in path.glob("*/result.json") if '"done"' in result.read_text()]) == 2)
    wait_for(lambda: len(list(path.glob("000[23]*/metrics.jsonl"))) == 2)
    process.kill()
    process.communicate()
    wait_for(lambda: ddpexp_processes() == before)
    sweeps.hurry()
    finished = {path: os.stat(path / "result.json").st_mtime_ns for path in path.glob("000[01]*")}
    again = sweeps(*overrides, path=path)
    assert again.code == 0, again.err
    assert again.statuses() == ["done"] * 4
    assert {path: os.stat(path / "result.json").st_mtime_ns for path in finished} == finished
    alone = sweeps.solo(*PACED[1:], "trainer.seed=1")
    assert again.results()["0003_trainer.epochs=200,trainer.seed=1"]["weights_sha256"] == alone


@pytest.mark.slow
def test_a_job_whose_command_is_killed_is_a_failure_and_no_end_of_the_sweep(sweeps: Sweeps) -> None:
    process, path = sweeps.start("task._target_=points.Paced", "trainer.epochs=3", "trainer.seed=0,1,2")
    wait_for(lambda: len(list(path.glob("*/metrics.jsonl"))) == 2)
    [pid] = [pid for pid in ddpexp_processes() if _holds(pid, path / "0000_trainer.seed=0" / "lock")]
    os.kill(pid, signal.SIGKILL)
    sweep = SweepDone(finish(process, path), path)
    assert sweep.code == 1
    assert "  0000_trainer.seed=0: its command was killed by SIGKILL" in sweep.err
    assert sorted(event["status"] for event in sweep.events("ended")) == ["done", "done", "failed"]
    again = sweeps.again(path)
    assert (again.code, again.statuses()) == (0, ["done"] * 3)


def _holds(pid: int, path: Path) -> bool:
    try:
        return any(os.readlink(link) == str(path) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def test_a_sweep_that_is_done_does_nothing_more_and_takes_more_jobs(sweeps: Sweeps) -> None:
    sweep = sweeps("trainer.seed=0,1")
    again = sweeps.again(sweep.path)
    assert (again.code, len(again.events("started"))) == (0, 2)
    more = sweeps.again(sweep.path, "trainer.seed=0,1,2")
    assert (more.code, len(more.events("started"))) == (0, 3)
    assert [path.name for path in more.jobs()] == ["0000_trainer.seed=0", "0001_trainer.seed=1", "0002_trainer.seed=2"]


def test_a_finished_job_whose_configuration_has_changed_is_reported_and_left(sweeps: Sweeps) -> None:
    sweep = sweeps("trainer.seed=0,1")
    net = sweeps.recipe.folder / "conf/model/net.yaml"
    net.write_text(net.read_text().replace("hidden: 8", "hidden: 9"))
    again = sweeps.again(sweep.path)
    assert (again.code, len(again.events("started"))) == (0, 2)
    assert again.err.count("model.hidden 8 -> 9") == 2


def test_a_finished_job_that_has_lost_its_metrics_is_reported_and_left(sweeps: Sweeps) -> None:
    sweep = sweeps("trainer.seed=0,1")
    job = sweep.jobs()[1]
    (job / "metrics.jsonl").write_text("")
    again = sweeps.again(sweep.path)
    assert (again.code, len(again.events("started"))) == (0, 2)
    assert f"warning: {job.name} is finished at step" in again.err
    assert again.err.count("has lost files since: metrics.jsonl is empty") == 1


SEEDS = "trainer.seed=0,1"
BAD = [
    (("optimizer.lrr=1,2",), "optimizer.lrr: (job 0000_optimizer.lrr=1)"),
    (("optimizer.lr=0.1,fast",), "optimizer.lr=fast: (job 0001_optimizer.lr=fast)"),
    (("trainer.gpus=1,16",), "trainer.gpus=16: sweep.slots=16"),
    (("trainer.global_batch_size=24,25", "trainer.gpus=2"), "trainer.global_batch_size=25: (job 0001_"),
    (("run.init_from=null,/no/weights",), "run.init_from=/no/weights: (job 0001_"),
    ((SEEDS, "run.dir=here"), "run.dir=here: hydra.sweep.dir"),
    ((SEEDS, "hydra/launcher=joblib"), "hydra/launcher=joblib: launcher=slurm"),
    ((SEEDS, "hydra.sweep.subdir=x"), "hydra.sweep.subdir=x: directories"),
    (("sweep.retries=1,2",), "sweep.retries: one value"),
    ((SEEDS, "sweep.slot=3"), "sweep.slot: sweep.slots"),
    ((SEEDS, "sweep.slots=0"), "sweep.slots=0"),
    (
        (SEEDS, "sweep.objective=eval/loss", "trainer.keep_best=max:eval/loss"),
        "trainer.keep_best=max:eval/loss: trainer.keep_best=min:eval/loss",
    ),
    (
        ("sweep.objective=eval/loss", "trainer.keep_best=null,'min:eval/loss'"),
        "trainer.keep_best=min:eval/loss: trainer.keep_best=min:eval/loss for all",
    ),
    ((SEEDS, "hydra.sweeper.max_batch_size=x"), "hydra.sweeper.max_batch_size=x: Integer"),
    ((SEEDS, "hydra.sweeper.max_batch_size=0"), "hydra/sweeper=basic: hydra.sweeper.max_batch_size=0"),
    ((SEEDS, "sweep=null"), "sweep=null: section"),
    ((SEEDS, "hydra.sweeper=null"), "hydra.sweeper=null: section"),
    ((SEEDS, "hydra/sweeper=null"), "hydra/sweeper=null: hydra/sweeper=basic"),
    ((SEEDS, "hydra.sweep.dir=${oc.env:NOT_SET}"), "hydra.sweep.dir: NOT_SET"),
    (("model=1,2",), "model=1: option"),
    (("optimizer.lr=0.1", "trainer.seed=range(0)"), "trainer.seed=range(0): no jobs"),
    ((SEEDS, "launcher=torchrun-env"), "launcher=torchrun-env: -m"),
    ((SEEDS, "launcher=mpi"), "launcher=mpi: -m"),
    ((SEEDS, "trainer.nodes=2"), "trainer.nodes=2: launcher=spawn"),
    (("trainer.seed=interval(0,1)",), "trainer.seed=interval(0,1): hydra/sweeper=optuna"),
]


@pytest.mark.parametrize(("overrides", "expected"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_what_is_wrong_is_refused_before_anything_starts_and_leaves_nothing(
    refused_sweep: Callable[..., None], overrides: tuple[str, ...], expected: str
) -> None:
    with refused(expected):
        refused_sweep(*overrides)


def test_data_that_cannot_be_had_is_refused_and_leaves_nothing(sweeps: Sweeps) -> None:
    done = sweeps.recipe.ddpexp(
        "-m", "data.root=nowhere", "data.source=files", "trainer.seed=0,1", "hydra.sweep.dir=made/here"
    )
    assert done.code == 2
    assert re.fullmatch(r"ddpexp: data\.root=\S+nowhere .*\n", done.err), done.err
    assert not (sweeps.recipe.ddpexp.folder / "made").exists()


def test_settings_of_sweeps_without_a_sweep_are_refused() -> None:
    with refused("sweep.slots=2: -m"):
        compose_command(["sweep.slots=2"])


def test_two_sweeps_in_one_directory_are_refused_and_the_first_continues(sweeps: Sweeps) -> None:
    process, path = sweeps.start(*PACED, "trainer.seed=0,1")
    wait_for(lambda: len(list(path.glob("*/metrics.jsonl"))) == 2)
    second = sweeps("trainer.seed=5,6", path=path)
    assert second.code == 2
    assert re.search(rf"ddpexp: .*{path.name} is in use by process {process.pid} on ", second.err)
    sweeps.hurry()
    first = SweepDone(finish(process, path), path)
    assert (first.code, first.statuses()) == (0, ["done", "done"])


@pytest.mark.fault(68)
def test_two_sweeps_of_one_second_get_two_directories(sweeps: Sweeps) -> None:
    overrides, _ = sweeps.words("hydra.sweep.dir=null", "trainer.seed=choice(0)")
    overrides.remove("hydra.sweep.dir=null")
    both = [sweeps.recipe.ddpexp.start(*overrides)[0] for _ in range(2)]
    for process in both:
        assert finish(process, sweeps.recipe.ddpexp.folder).code == 0
    found = sorted((sweeps.recipe.ddpexp.folder / "outputs" / "sweeps").iterdir())
    assert [len(list(path.glob("0000_*/result.json"))) for path in found] == [1, 1]


def test_a_directory_of_something_else_is_refused(sweeps: Sweeps, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "thesis.tex").write_text("\\end")
    sweep = sweeps("trainer.seed=0,1", path=path)
    assert sweep.code == 2
    assert sweep.err.startswith(f"ddpexp: hydra.sweep.dir={path} ")
    assert [entry.name for entry in path.iterdir()] == ["thesis.tex"]


def test_trusted_code_recorded_in_a_sweep_does_not_count(sweeps: Sweeps) -> None:
    sweep = sweeps("trainer.seed=0,1")
    again = sweeps.again(sweep.path, trusted=False)
    assert again.code == 2
    assert "restated" in again.err
    assert f"--config-dir {sweeps.recipe.folder / 'conf'}" in again.err
