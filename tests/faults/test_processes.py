"""Ranks that fail, die, hang or leave early: who did it, said once, in time."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import ddpexp_processes, finish, python_path
from tests.faults.conftest import SOON
from tests.faults.harness import Ended, Running, faulted, parent_of
from tests.points import Recipe

EVERY = ("trainer.gpus=2", "trainer.log_every=1", "trainer.epochs=4")
LONG = """\
class Looks(Sides):
    def on_eval(self, model, batch, logger, step):
        for _ in range(30):
            time.sleep(0.06)


class Computes(Net):
    def __init__(self, **options):
        end = time.process_time() + 9 * RANK
        while time.process_time() < end:
            pass
        super().__init__(**options)


def load_slow(train=96, test=33):
    class Waits(Items):
        def __getitem__(self, index):
            time.sleep(0.2 * RANK)
            return super().__getitem__(index)

    return Splits(Waits(train, 0), {"eval": Items(test, 1)})


def load_hanging(train=96, test=33):
    batches = []

    def hang(*rows):
        batches.append(rows)
        if RANK == 0 and len(batches) == 5:
            time.sleep(600)
        return rows

    return Splits(Arrays(points(train, 0).tensors, hang), {"eval": points(test, 1)})


class Slow(Sides):
    def step(self, model, batch):
        time.sleep(0.6 if model.training else 0.2)
        return super().step(model, batch)


class ByHand(Slow):
    def train_step(self, update, micro_batches):
        for number, batch in enumerate(micro_batches):
            with update.micro_batch(last=number == len(micro_batches) - 1) as micro_batch:
                loss, count, sums = self.step(update.models, batch)
                micro_batch.backward(loss, count)
        update.apply()
        return loss, count, sums


class Follows(Sides):
    # Rank zero fails; a library of the other one aborts a moment later, as some do when a connection breaks.
    def step(self, model, batch):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3 and RANK == 0:
            raise ValueError("the cause")
        if self.steps == 3:
            time.sleep(0.3)
            os.abort()
        return super().step(model, batch)


def extra(size):
    torch.distributed.all_reduce(torch.zeros(size))


class Extra(Sides):
    # Rank one takes part in an operation that no other does.
    def __init__(self, size):
        self.size, self.steps = size, 0

    def step(self, model, batch):
        self.steps += 1
        if self.steps == 3 and RANK == 1:
            extra(self.size)
        return super().step(model, batch)


class Parts(Sides):
    # Rank one waits for the others where they do not come.
    steps = 0

    def step(self, model, batch):
        self.steps += model.training
        if RANK and self.steps == 3:
            torch.distributed.barrier()
        return super().step(model, batch)
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What befalls ranks is tested, not how their fork server starts."""
    return warm_environ


def add(recipe: Recipe, code: str) -> None:
    with (recipe.folder / "points.py").open("a") as file:
        file.write(f"\n\n{code}")


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_is_shown_once_with_its_traceback(recipe: Recipe, rank: int) -> None:
    ended = faulted(recipe, f"forward:raise:{rank}:5", *EVERY)
    error = ended.failed(rank=rank, says="RuntimeError: injected at forward")
    assert error["step"] == 4
    assert "fault_injection.py" in error["traceback"]


@pytest.mark.fault(4)
def test_an_abort_is_reported_as_one(recipe: Recipe) -> None:
    error = faulted(recipe, "forward:abort:1:5", *EVERY).failed(rank=1, says="SIGABRT: killed by SIGABRT")
    assert (error["step"], error["signal"]) == (4, signal.SIGABRT)
    assert "Fatal Python error: Aborted" in error["traceback"]


@pytest.mark.fault(2)
def test_what_a_failure_brings_about_is_not_taken_for_the_cause(recipe: Recipe) -> None:
    add(recipe, LONG)
    done = recipe("trainer.gpus=2", "task._target_=points.Follows")
    assert re.search(
        r"^ddpexp: rank 0 on \S+ failed \(train after step 2\): ValueError: the cause", done.err, re.MULTILINE
    ), done.err


@pytest.mark.variants(1)
@pytest.mark.fault(5, 6)
@pytest.mark.parametrize(
    ("fault", "phase", "says"),
    [
        (
            "forward:stop:1:5",
            "train",
            r"Hang: no progress for \d+ s \(trainer.timeout.step_seconds=4\): its process \d+ is stopped",
        ),
        (
            "backward:spin:0:5",
            "train",
            r"Hang: .*: it is busy in backward \(.*/optimizer_step.py:\d+\), and the others wait",
        ),
        pytest.param("step:sleep:1:5", "train", r"Hang: .*: it waits in _train_step ", marks=pytest.mark.slow),
        pytest.param("evaluate:stop:1:1", "evaluate", r"Hang: .*stopped", marks=pytest.mark.slow),
        ("save:sleep:1:1", "save", r"Hang: .*\(trainer.timeout.save_seconds=4\): it waits in "),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_phase_in_time(recipe: Recipe, fault: str, phase: str, says: str) -> None:
    rank = int(fault.split(":")[2])
    ended = faulted(recipe, fault, *EVERY, *SOON)
    error = ended.failed(rank=rank, says=says)
    assert error["phase"] == phase
    other = (ended.done.run / "ranks" / f"{1 - rank}.log").read_text()
    assert "most recent call first" in other


@pytest.mark.fault(6)
def test_a_rank_that_hangs_in_the_code_of_the_data_is_named(recipe: Recipe) -> None:
    add(recipe, LONG)
    ended = Ended(recipe("data._target_=points.load_hanging", *EVERY, *SOON))
    error = ended.failed(rank=0, says=r"Hang: .*\(trainer.timeout.data_seconds=4\): it waits in hang ")
    assert error["phase"] == "data"


@pytest.mark.slow
@pytest.mark.fault(5)
@pytest.mark.parametrize(
    "overrides",
    [
        (
            "trainer.micro_batch_size=2",
            "trainer.max_steps=2",
            "task._target_=points.Slow",
            "data.test=8",
        ),  # a step of many micro-batches
        ("task._target_=points.Looks",),  # rank zero looks at an evaluation, less long than a step may take
        ("model._target_=points.Computes",),  # a rank builds, and is busy with that
        (
            "trainer.micro_batch_size=2",
            "trainer.max_steps=2",
            "task._target_=points.ByHand",
            "data.test=8",
        ),  # the same, in a step of its own
        pytest.param(("data._target_=points.load_slow",), marks=pytest.mark.slow),  # a rank waits, and less than it may
        pytest.param(  # an evaluation of many batches
            ("trainer.max_steps=2", "task._target_=points.Slow", "data.test=960"), marks=pytest.mark.slow
        ),
    ],
    ids=["accumulation", "rank zero", "building", "manual", "data", "evaluation"],
)
def test_a_rank_that_makes_progress_is_left_alone(recipe: Recipe, overrides: tuple[str, ...]) -> None:
    add(recipe, LONG)
    done = recipe("trainer.gpus=2", "trainer.epochs=1", "trainer.timeout.step_seconds=3",
        "trainer.timeout.init_seconds=4",
                  "trainer.timeout.data_seconds=10", "trainer.timeout.save_seconds=20", *overrides)  # fmt: skip
    assert (done.code, done.err) == (0, "")


@pytest.mark.slow
@pytest.mark.fault(5)
def test_a_rank_whose_checkpoint_takes_long_holds_up_nobody_before_its_time(recipe: Recipe, tmp_path: Path) -> None:
    overrides = (
        *EVERY,
        "trainer.checkpoint_every=1",
        "trainer.timeout.step_seconds=4",
        "trainer.timeout.save_seconds=10",
    )
    ended = faulted(recipe, f"checkpoint.share:pause={tmp_path}/here:1:2", *overrides)
    error = ended.failed(rank=1, says=r"Hang: .*save_seconds=10")
    assert error["phase"] == "save"


@pytest.mark.slow
@pytest.mark.fault(5)
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["everything", "the ranks"])
def test_what_was_stopped_as_a_whole_continues(recipe: Recipe, whole: bool) -> None:
    running = Running(recipe, *EVERY, "trainer.epochs=40", "trainer.timeout.step_seconds=5")
    pids = ddpexp_processes() if whole else {running.pid(0), running.pid(1)}
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(0 if number == signal.SIGCONT else 8 if whole else 1.5)
    assert running.ended().done.code == 0


@pytest.mark.slow
@pytest.mark.fault(5)
def test_ranks_that_wait_for_one_another_are_all_named(recipe: Recipe) -> None:
    add(recipe, LONG)
    done = recipe("trainer.gpus=2", *SOON, "task._target_=points.Parts")
    assert done.code == 1
    assert re.search(r"rank [01] on .*Hang: .*every rank waits for another \(rank 0 in .*; rank 1 in .*\)", done.err)


@pytest.mark.slow
@pytest.mark.fault(5)
@pytest.mark.parametrize(
    ("size", "workers", "says"),
    [  # gloo ends whichever rank gets more data than it expects; where none does, all wait
        (
            100_000,
            2,
            r"CollectiveMismatch: the ranks called different collective operations: rank 0 in backward \(.*\); ",
        ),
        (1, 3, r"Hang: .*every rank waits for another \(rank 0 in .*; "),
        (1, 2, r"CollectiveMismatch: "),
    ],
)
def test_a_rank_with_a_collective_too_many_is_named(recipe: Recipe, size: int, workers: int, says: str) -> None:
    add(recipe, LONG)
    overrides = (f"trainer.gpus={workers}", "trainer.global_batch_size=12", "strategy.reduce_through=backend")
    done = recipe(*overrides, *SOON, "task._target_=points.Extra", f"+task.size={size}")
    assert done.code == 1
    where = r"rank 1 in extra \(\S+points.py:\d+\)"
    assert re.search(
        rf"^ddpexp: rank 1 on \S+ failed \(train after step 2\): {says}.*{where}", done.err, re.MULTILINE
    ), done.err


@pytest.mark.slow
@pytest.mark.fault(5)
def test_a_fork_server_that_is_stopped_too_is_ended_by_force(recipe: Recipe) -> None:
    running = Running(recipe, *EVERY, *SOON, "trainer.epochs=50000")
    server = parent_of(running.pid(1))
    for pid in (server, running.pid(1)):
        os.kill(pid, signal.SIGSTOP)
    running.ended().failed(rank=1, says="Hang: .*stopped")


@pytest.mark.slow
@pytest.mark.fault(5)
def test_a_worker_that_is_never_started_is_missed(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late/sitecustomize.py").write_text(
        "import sys, time\nif 'workers.server' in ' '.join(sys.orig_argv): time.sleep(600)\n"
    )
    process, run = recipe.start(
        *EVERY, "trainer.timeout.init_seconds=2", environ={"PYTHONPATH": python_path(tmp_path / "late")}
    )
    done = finish(process, run)
    assert re.search(
        r"Hang: no progress for .*\(trainer\.timeout\.init_seconds=2\): its process was not started", done.err
    ), done.err
