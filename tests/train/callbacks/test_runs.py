"""Callbacks and schedules with a state in real runs of several workers: kills, disagreement, collectives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddpexp.checkpoint.format import complete_checkpoints, open_checkpoint
from ddpexp.checkpoint.reader import read_part, read_rank_state
from tests.conftest import PATIENCE, Ddpexp, Done
from tests.points import Recipe
from tests.test_interruptions import (
    CODE,
    DEEP,
    has_steps,
    kill_everything,
    points_of_tensorboard,
    same,
    wait_for,
)

CALLBACKS = """
import torch.distributed
from torch.distributed import all_reduce

from ddpexp import Callback


class Sums(Callback):
    # Communicates on one rank, or on all.
    def __init__(self, ranks, allowed=False):
        self.ranks = ranks
        Sums.communicates = allowed

    def on_step(self, run):
        if run.step == 3 and run.rank in self.ranks:
            all_reduce(torch.ones(3))


class Leaves(Callback):
    # One rank alone wants to stop.
    def on_step(self, run):
        if run.step == 5 and run.rank == 1:
            run.stop("rank 1 has seen enough")
"""
SHIPPED = {
    "early_stopping": (
        "callbacks=early_stopping", "callbacks.early_stopping.patience=4", "callbacks.early_stopping.min_delta=0.05",
    ),
    "histograms": ("callbacks=histograms", "callbacks.histograms.every=7"),
    "lr_monitor": ("callbacks=lr_monitor", "callbacks.lr_monitor.every=3", "callbacks.lr_monitor.settings=[momentum]"),
    "find_nonfinite": ("callbacks=find_nonfinite",),
}  # fmt: skip
PLATEAU = (
    "scheduler=plateau", "scheduler.patience=1", "scheduler.min_delta=0.04", "scheduler.gamma=0.7",
    "scheduler.warmup_steps=5",
)  # fmt: skip
TORCH = ("scheduler=torch", "scheduler.schedule.T_0=7", "scheduler.schedule.T_mult=2", "scheduler.warmup=0.1")
ALL = (f"callbacks=[{','.join(SHIPPED)}]", *(key for keys in SHIPPED.values() for key in keys[1:]))
RUN = (
    *DEEP, "optimizer=sgd", "optimizer.momentum=0.9", "task._target_=points.Drawing", "trainer.gpus=2",
    "logger=tensorboard", "trainer.epochs=null", "trainer.max_steps=80", "trainer.log_every=7", "trainer.eval_every=6",
    "trainer.checkpoint_every=5",
)  # fmt: skip


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What callbacks do is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("callbacks"), environ), CODE + CALLBACKS)


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe) -> Callable[..., Done]:
    """Return the run that nothing interrupts, made once for each set of overrides."""
    made: dict[tuple[str, ...], Done] = {}

    def run(*overrides: str) -> Done:
        if overrides not in made:
            made[overrides] = recipe(*overrides)
            assert made[overrides].code == 0, made[overrides].err
        return made[overrides]

    return run


def state_of(run: Path) -> Any:
    """Return the state of the callbacks and of the schedule in the newest checkpoint."""
    checkpoint = open_checkpoint(complete_checkpoints(run / "checkpoints")[0])
    progress = read_part(checkpoint, "progress")
    return (read_rank_state(checkpoint, 0) or {}).get("callbacks"), progress["schedule"]


def equal(done: Done, expected: Done) -> None:
    """Compare what a run and its callbacks leave with what the undisturbed one has left."""
    same(done, expected)
    assert done.result()["stopped"] == expected.result()["stopped"]
    assert state_of(done.run) == state_of(expected.run)
    found = points_of_tensorboard(done.run)
    assert found == points_of_tensorboard(expected.run)
    assert set(found.values()) == {1}


AVERAGE = ("trainer.swa_start=10", "trainer.swa_every=4", "trainer.average_batch_norm=3")


def test_a_killed_run_with_every_shipped_callback_an_average_and_a_plateau_ends_like_an_undisturbed_one(
    recipe: Recipe, undisturbed: Callable[..., Done]
) -> None:
    expected = undisturbed(*RUN, *ALL, *AVERAGE, *PLATEAU)
    assert state_of(expected.run)[1]["state"]["reductions"] > 1
    assert 30 < expected.result()["step"] < 80
    assert expected.result()["stopped"].startswith("callbacks.early_stopping: eval/loss has not improved by more than")
    assert expected.out.splitlines()[-2].startswith("ended early: callbacks.early_stopping: ")
    process, run = recipe.start(*RUN, *ALL, *AVERAGE, *PLATEAU, environ={"PACE": "0.03"})
    wait_for(has_steps(run, 20), process)
    kill_everything(process, run)
    done = recipe(*RUN, *ALL, *AVERAGE, *PLATEAU, run=run)
    equal(done, expected)
    averages, others = (load_file(complete_checkpoints(run / "checkpoints")[0] / "model.ema.safetensors")
                        for run in (done.run, expected.run))  # fmt: skip
    assert all(torch.equal(averages[name], tensor) for name, tensor in others.items())
    weights = load_file(complete_checkpoints(run / "checkpoints")[0] / "model.safetensors")
    assert not any(torch.equal(averages[name], tensor) for name, tensor in weights.items() if tensor.dim())


@pytest.mark.slow
def test_the_average_is_the_same_at_every_number_of_workers(recipe: Recipe) -> None:
    """And evaluating it again gives the metrics of the run."""
    exact = (
        "trainer.reduction=exact", "trainer.micro_batch_size=6", "trainer.threads=1", "trainer.max_steps=20",
        "task._target_=points.Sides",
    )  # fmt: skip
    runs = [recipe(*RUN, *AVERAGE, *exact, f"trainer.gpus={number}") for number in (1, 2, 4)]
    assert [done.code for done in runs] == [0, 0, 0], runs[0].err
    folders = [complete_checkpoints(done.run / "checkpoints")[0] for done in runs]
    first, *others = [load_file(folder / "model.ema.safetensors") for folder in folders]
    for other in others:
        assert all(torch.equal(first[name], tensor) for name, tensor in other.items())
    arguments = ["evaluate", str(runs[1].run), "--config-dir", str(recipe.folder / "conf")]
    evaluated = recipe.ddpexp(*arguments)
    assert f"eval/loss {runs[1].result()['metrics']['eval/loss']:.6g}" in evaluated.out, evaluated.err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*SHIPPED, "plateau", "torch"])
def test_killed_at_thirty_random_moments_all_end_equal(
    recipe: Recipe, undisturbed: Callable[..., Done], name: str
) -> None:
    chance, overrides = random.Random(name), (*RUN, *{**SHIPPED, "plateau": PLATEAU, "torch": TORCH}[name])
    expected, kills = undisturbed(*overrides), 0
    while kills < 30:
        run = None
        while True:
            process, run = recipe.start(*overrides, run=run, environ={"PACE": "0.02"})
            time.sleep(chance.uniform(0.3, 2.0))
            if process.poll() is not None or kills == 30:
                process.communicate(timeout=PATIENCE)
                break
            kill_everything(process, run)
            kills += 1
        equal(recipe(*overrides, run=run), expected)
    print(f"{name}: {kills} kills, all equal")


@pytest.mark.variants(1)
@pytest.mark.parametrize("ranks", ["[0]", "[0,1]"])
def test_a_callback_that_communicates_is_named_before_any_rank_waits(recipe: Recipe, ranks: str) -> None:
    done = recipe("trainer.gpus=2", "+callbacks.mine._target_=points.Sums", f"+callbacks.mine.ranks={ranks}")
    assert done.code == 1
    [message] = [line for line in done.err.splitlines() if line.startswith("ddpexp: rank")]
    assert "callbacks.mine failed in on_step (" in message
    assert "it calls the collective allreduce, which the other ranks do not call" in message
    step = complete_checkpoints(done.run / "checkpoints")[0].name
    assert f"Step {int(step[5:])} is saved" in message
    assert recipe("trainer.gpus=2", "callbacks=none", run=done.run).code == 0


def test_one_that_says_so_may_communicate_and_one_rank_may_end_the_run(recipe: Recipe) -> None:
    done = recipe(
        "trainer.gpus=2", "+callbacks.sums._target_=points.Sums", "+callbacks.sums.ranks=[0,1]",
        "+callbacks.sums.allowed=true", "+callbacks.mine._target_=points.Leaves", "trainer.epochs=4",
    )  # fmt: skip
    assert done.code == 0, done.err
    result = done.result()
    assert (result["step"], result["stopped"]) == (8, "callbacks.mine: rank 1 has seen enough")  # at the next record
