"""Sweeps under other launchers: elastic in slots, Slurm as one array or as steps of an allocation, several at once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import PATIENCE
from tests.points import wait_for
from tests.refusals import refused
from tests.sweep.conftest import SweepDone, Sweeps


@pytest.mark.slow
def test_elastic_jobs_have_slots_too(sweeps: Sweeps) -> None:
    sweep = sweeps("launcher=elastic", "trainer.gpus=1", "trainer.seed=0,1")
    assert sweep.code == 0, sweep.err
    assert [event["slots"] for event in sweep.events("started")] == [[0], [1]]
    assert sweep.results()["0001_trainer.seed=1"]["weights_sha256"] == sweeps.solo("trainer.seed=1")


@pytest.mark.slow
@pytest.mark.slurm
def test_the_launcher_can_be_swept_and_the_login_node_submits_the_rest_as_one_array(sweeps: Sweeps) -> None:
    sweep = sweeps("launcher=spawn,slurm", "trainer.seed=0,1", "trainer.threads=1")
    assert sweep.code == 0, sweep.err
    assert len(re.findall(r"^submitted array \d+ of 2 jobs", sweep.out, re.MULTILINE)) == 1
    assert f"2 of 4 jobs are submitted; how far they are: python -m ddpexp status {sweep.path.name}\n" in sweep.out
    assert [event["job"] for event in sweep.events("started")] == [0, 1]
    wait_for(
        lambda: all((path / "result.json").is_file() for path in sweep.jobs()) and sweep.statuses() == ["done"] * 4
    )
    hashes = [result["weights_sha256"] for result in sweep.results().values()]
    assert hashes[:2] == hashes[2:]
    status = sweeps.recipe.ddpexp("status", str(sweep.path))
    assert (status.code, "4 jobs: 4 done." in status.out) == (0, True), status.out
    again = sweeps.again(sweep.path, "launcher=spawn,slurm")
    assert (again.code, len(again.events("submitted")), len(again.events("started"))) == (0, 2, 2), again.err


@pytest.mark.slurm
def test_what_is_submitted_is_not_counted_as_done(sweeps: Sweeps) -> None:
    sweep = sweeps("launcher=spawn,slurm", "model._target_=points.Wide", "model.hidden=13")
    assert sweep.code == 1
    assert "ddpexp: 1 of 2 jobs failed:" in sweep.err
    assert "\n0 of 2 jobs are done; resume the sweep with:\n" in sweep.err


@pytest.mark.slurm
def test_what_is_in_the_queue_is_not_submitted_again_and_what_failed_is(sweeps: Sweeps) -> None:
    overrides = ("launcher=slurm", "launcher.array_parallelism=1", "model._target_=points.Wide",
        "task._target_=points.Paced",
             "trainer.epochs=4", "model.hidden=13,8", "launcher.wait=true")  # fmt: skip
    process, path = sweeps.start(*overrides)
    wait_for(lambda: (path / "0001_model.hidden=8" / "metrics.jsonl").is_file())
    second = sweeps(*overrides[:-1], path=path)
    assert second.code == 2, "the first command waits, and has the directory"
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, out + err
    assert re.search(r"^  0000_model\.hidden=13: rank 0: ValueError: 13 units bring bad luck$", err, re.MULTILINE)
    sweep = SweepDone(second.done, path)
    assert sweep.statuses() == ["failed", "done"]
    again = sweeps(*overrides, path=path)
    assert again.code == 1
    assert [event["job"] for event in again.events("submitted")] == [0, 1, 0]


@pytest.mark.slow
@pytest.mark.slurm
def test_in_an_allocation_the_jobs_are_steps_one_after_another(sweeps: Sweeps) -> None:
    arguments, path = sweeps.words("launcher=slurm", "trainer.gpus=1", "trainer.seed=0,1", "trainer.threads=1")
    command = ["salloc", "-N2", "--quiet", sys.executable, "-m", "ddpexp", *arguments]
    done = subprocess.run(command, cwd=sweeps.recipe.folder, env={**sweeps.recipe.ddpexp.environ}, capture_output=True,
        text=True,
                          timeout=PATIENCE, stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = {job: (path / job / "result.json").read_text() for job in ("0000_trainer.seed=0", "0001_trainer.seed=1")}
    assert all('"world_size": 2' in text for text in results.values())
    events = [
        line for line in (path / "sweep.jsonl").read_text().splitlines() if '"started"' in line or '"ended"' in line
    ]
    assert ['"started"' in line for line in events] == [True, False, True, False]
    assert sweeps.solo("trainer.gpus=2", "trainer.seed=1") in results["0001_trainer.seed=1"]


@pytest.mark.slurm
def test_a_dry_run_shows_the_array_and_leaves_nothing(sweeps: Sweeps) -> None:
    sweep = sweeps("launcher=slurm", "launcher.dry_run=true", "trainer.seed=0,1,2")
    assert sweep.code == 0
    assert sweep.err.startswith("ddpexp: asks for 1 node with no GPUs")
    assert "#SBATCH --array=0-2\n" in sweep.out
    assert not sweep.path.exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("sweep.retries=1",), "sweep.retries=1: watches"),
        (("sweep.objective=eval/loss", "sweep.early_stop=median"), "sweep.early_stop=median: watches"),
    ],
)
def test_what_a_submitted_job_cannot_have_is_refused(
    refused_sweep: Callable[..., None], overrides: tuple[str, ...], expected: str
) -> None:
    with refused(expected):
        refused_sweep("launcher=slurm", "trainer.seed=0,1", *overrides)


def test_a_sweeper_that_waits_for_results_needs_submitted_jobs_that_are_waited_for(sweeps: Sweeps) -> None:
    sweep = sweeps("launcher=slurm", "trainer.seed=0,1", "hydra/sweeper=optuna", "sweep.objective=eval/loss")
    assert sweep.code == 2
    assert re.search(r"^ddpexp: launcher=slurm .*launcher\.wait=true", sweep.err, re.MULTILINE), sweep.err
    assert not sweep.path.exists()
