"""launcher=inline: the command is the worker, and all else is as under every launcher."""

from __future__ import annotations

import json
import re
import signal
import sys
import time

import pytest

from ddpexp.cli.forks import will_fork
from ddpexp.cli.start import check_started_once
from ddpexp.launch import WorkerRequest
from ddpexp.launch.launchers.inline import Inline
from tests.conftest import Ddpexp, Done, living
from tests.faults.harness import trained
from tests.points import ITEMS, Recipe, wait_for
from tests.refusals import refused
from tests.terminals import Session

CODE = """\
class Looks(Sides):
    # Fails or starts a debugger in the third step.
    def __init__(self, how):
        self.how, self.steps = how, 0

    def step(self, model, batch):
        self.steps += model.training
        if self.steps == 3 and model.training:
            if self.how == "raise":
                print("before the end")
                raise ValueError("enough")
            if self.how == "exit":
                sys.exit(7)
            secret = 6 * 7
            breakpoint()
        return super().step(model, batch)


class Slow(Sides):
    def step(self, model, batch):
        time.sleep(0.02)
        return super().step(model, batch)


class Stuck(Sides):
    # In a call that no signal interrupts, as a C extension may be.
    def step(self, model, batch):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        print("stuck")
        time.sleep(3600)
"""
LONG = ("trainer.epochs=1000", "task._target_=points.Slow", "trainer.threads=1")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a launcher does is tested, not how the fork server of another one starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("inline"), environ), CODE)


@pytest.fixture(scope="module")
def expected(recipe: Recipe) -> Done:
    """What launcher=spawn gives."""
    done = recipe(*ITEMS, "trainer.gpus=1", "trainer.threads=1")
    assert done.code == 0, done.err
    return done


def files(done: Done) -> set[str]:
    return {str(path.relative_to(done.run)) for path in done.run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "strategy",
    [
        "strategy=ddp",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("strategy=fsdp", "strategy.shard_optimizer=true")),
    ],
)
def test_the_run_is_that_of_spawn(recipe: Recipe, expected: Done, strategy: str) -> None:
    done = recipe(*ITEMS, "trainer.threads=1", "launcher=inline", strategy)
    assert (done.code, done.err) == (0, "")
    assert done.result()["weights_sha256"] == expected.result()["weights_sha256"]
    assert files(done) == files(expected)
    notice, *rest = done.out.splitlines()
    assert notice.startswith("launcher=inline: the worker is this process; nothing watches it")
    assert [line.split()[0] for line in rest] == [line.split()[0] for line in expected.out.splitlines()]
    assert (done.run / "ranks/0.log").read_text() == done.out
    assert done.manifest()["world"]["world_size"] == 1


@pytest.mark.parametrize(("how", "code"), [("raise", 1), pytest.param("exit", 7, marks=pytest.mark.slow)])
def test_a_failure_ends_as_under_every_launcher(recipe: Recipe, how: str, code: int) -> None:
    done = recipe("task._target_=points.Looks", f"+task.how={how}", "launcher=inline")
    assert done.code == code
    error = json.loads((done.run / "error.json").read_text())
    assert (error["rank"], error["step"], error["phase"], error["exit_code"]) == (0, 2, "train", code)
    assert done.result()["status"] == "failed"
    assert f"ddpexp: rank 0 on {error['host']} failed (train after step 2): " in done.err
    if how == "raise":
        assert done.err.count("Traceback (most recent call last):") == 1
        assert re.search(r"ValueError: enough \(\S+\.py:\d+\)\n$", done.err)
        log = (done.run / "ranks/0.log").read_text()
        assert "before the end\n" in log
        assert "ValueError: enough" in log


@pytest.mark.slow
def test_a_debugger_works_as_in_a_script_and_the_run_resumes_under_spawn(recipe: Recipe, expected: Done) -> None:
    words, run = recipe.words(
        *ITEMS, "task._target_=points.Looks", "+task.how=debug", "launcher=inline", "trainer.threads=1"
    )
    command = [sys.executable, "-m", "ddpexp", *words]
    with Session(command, recipe.folder, recipe.ddpexp.environ) as shell:
        shell.expect("(Pdb) ")
        shell.type("p sec\t\n")  # completed by readline
        shell.expect("42")
        shell.expect("(Pdb) ")
        shell.type("\x03")
        shell.expect("--KeyboardInterrupt--")
        shell.at("(Pdb) ", "n", "q")
        assert shell.end() == 128 + signal.SIGINT
        assert shell.is_sane()
    assert f"ddpexp: quit in the debugger; saved at step 3 in {run}; resume it with:\n" in shell.shown
    words = [word if word != "launcher=inline" else "launcher=spawn" for word in words if "run.dir" not in word]
    again = recipe(*words[3:], run=run, environ={"PYTHONBREAKPOINT": "0"})
    assert (again.code, again.result()["weights_sha256"]) == (0, expected.result()["weights_sha256"]), again.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [("inline", "spawn"), pytest.param("spawn", "inline", marks=pytest.mark.slow)]
)
def test_a_killed_run_resumes_under_the_other_launcher(recipe: Recipe, first: str, then: str) -> None:
    words = ("trainer.epochs=4", "task._target_=points.Slow", "trainer.threads=1", "trainer.gpus=1", *ITEMS)
    whole = recipe(*words)
    process, run = recipe.start(*words, f"launcher={first}")
    wait_for(lambda: trained(run, 4))
    process.kill()
    process.communicate()
    wait_for(lambda: not living(run))
    again = recipe(*words, f"launcher={then}", run=run)
    assert again.code == 0, again.err
    assert again.result()["weights_sha256"] == whole.result()["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_leaves(recipe: Recipe, number: signal.Signals) -> None:
    process, run = recipe.start(*LONG, "launcher=inline")
    wait_for(lambda: trained(run, 4))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    step = json.loads((run / "result.json").read_text())["step"]
    assert out.endswith("which is saved\n")
    assert (
        err.splitlines()[0]
        == f"ddpexp: interrupted by {number.name}; saved at step {step} in {run.name}; resume it with:"
    )


@pytest.mark.slow
def test_a_second_signal_ends_a_worker_that_is_stuck(recipe: Recipe) -> None:
    process, run = recipe.start("trainer.epochs=1000", "task._target_=points.Stuck", "launcher=inline")
    wait_for(lambda: (run / "ranks/0.log").exists() and "stuck" in (run / "ranks/0.log").read_text())
    process.send_signal(signal.SIGINT)
    time.sleep(3.0)  # within two seconds it counts as the same signal
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "ddpexp: interrupted by SIGINT; " in err
    assert json.loads((run / "result.json").read_text())["status"] == "interrupted"
    assert not living(run)


def test_no_fork_server_is_started_for_it() -> None:
    assert will_fork(None, ["recipe=mnist"])
    assert not will_fork(None, ["recipe=mnist", "launcher=inline"])


@pytest.mark.parametrize(
    ("request_", "value"),
    [
        (WorkerRequest(gpus=2), "trainer.gpus=2"),
        (WorkerRequest(nodes=2), "trainer.nodes=2"),
        (WorkerRequest(nodes="1:4"), "trainer.nodes=1:4"),
    ],
)
def test_several_workers_are_refused(request_: WorkerRequest, value: str) -> None:
    with refused(f"launcher=inline: {value}"):
        Inline().adapt(request_)


def test_one_worker_is_what_auto_means() -> None:
    assert Inline().adapt(WorkerRequest()).gpus == 1
    assert Inline().adapt(WorkerRequest(gpus=0)).gpus == 0  # refused for itself


def test_ranks_of_torchrun_are_refused() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "a"}
    for nodes in ("auto", 1):
        with refused("inline"):
            check_started_once(Inline(), WorkerRequest(nodes=nodes), environ)
