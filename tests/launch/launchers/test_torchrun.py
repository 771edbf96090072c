"""launcher=torchrun-env under real torchrun and in shells.

What is refused, what is shown, what is started again, what is left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import OWN_SERVER, PATIENCE, Ddpexp, Done, ddpexp_processes, finish
from tests.launch.starters import free_port
from tests.points import Recipe, wait_for
from tests.warm.popen import start_command

CODE = """\
class Breaks(Sides):
    # Fails in rank 1 at the third step of the first attempt (or of each), in one of several ways.
    def __init__(self, how, each=False):
        self.how, self.steps = how, 0
        self.attempt = 0 if each else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def step(self, model, batch):
        self.steps += 1
        if RANK == 1 and self.steps == 3 and self.attempt == 0:
            if self.how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad sample")
        return super().step(model, batch)


class Sleeps(Sides):
    def step(self, model, batch):
        time.sleep(0.05)
        return super().step(model, batch)
"""


@pytest.fixture(scope="module")
def environ(warm_single_environ: dict[str, str]) -> dict[str, str]:
    """The environment in which the fork servers of torchrun's ranks are forks; what is killed has servers of its own."""
    return warm_single_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("torchrun"), environ), CODE)


def start(
    recipe: Recipe, *overrides: str, torchrun: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> tuple[subprocess.Popen[str], Path]:
    arguments, run = recipe.words("trainer.threads=1", "launcher=torchrun-env", *overrides)
    options = torchrun or ("--nproc-per-node=2",)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, "-m", "ddpexp", *arguments]
    process = subprocess.Popen(
        command, cwd=recipe.folder, env={**recipe.ddpexp.environ, **(environ or {})}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return process, run


def shells(recipe: Recipe, *overrides: list[str], **variables: str) -> list[Done]:
    """Run one command for each rank, with its own overrides, and the variables that a user exports."""
    port = str(free_port())
    started = []
    arguments, run = recipe.words("trainer.threads=1", "launcher=torchrun-env")
    for rank, own in enumerate(overrides):
        fixed = {"RANK": str(rank), "WORLD_SIZE": str(len(overrides)), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        environ = {**recipe.ddpexp.environ, **fixed, **variables}
        started.append(start_command([*arguments, *own], recipe.folder, environ))
    return [finish(process, run) for process in started]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_torchrun_shows_our_error_for_every_rank(recipe: Recipe, how: str) -> None:
    process, run = start(recipe, "task._target_=points.Breaks", f"+task.how={how}", torchrun=("--nproc-per-node=3",))
    done = finish(process, run)
    assert done.code == 1
    summary = done.err[done.err.index("ChildFailedError") :]
    cause = f"rank 1 on {os.uname().nodename}: " + (
        "ValueError: a bad sample" if how == "raise" else "SIGKILL: killed by SIGKILL"
    )
    assert "<N/A>" not in summary
    assert cause in summary[summary.index("Root Cause") :]
    assert done.err.count("ddpexp: rank 1 on") == 1  # said once, by rank zero's command


@pytest.mark.variants(1)
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_a_restart_resumes_in_the_same_run_directory(recipe: Recipe, how: str) -> None:
    overrides = ("task._target_=points.Breaks", f"+task.how={how}", "logger=tensorboard")
    process, run = start(recipe, *overrides, torchrun=("--nproc-per-node=2", "--max-restarts=2"))
    done = finish(process, run)
    assert done.code == 0, done.err
    assert done.result()["status"] == "done"
    assert json.loads((run / "error-1.json").read_text())["rank"] == 1
    assert not (run / "error.json").exists()
    assert [(one["step"], "eval/loss" in one) for one in done.metrics()] == [
        (4, False),
        (4, True),
        (8, False),
        (8, True),
    ]
    assert len(list((run / "tb").glob("events.*"))) == 1
    assert "ddpexp: resuming " in done.err
    assert done.out.count("step 8/8  epoch  2.00  loss") == 1  # the first attempt's lines are not shown again


@pytest.mark.slow
def test_an_unnamed_run_directory_is_found_again(recipe: Recipe, tmp_path: Path) -> None:
    arguments, _ = recipe.words(
        "trainer.threads=1", "launcher=torchrun-env", "task._target_=points.Breaks", "+task.how=raise"
    )
    overrides = [word for word in arguments if not word.startswith("run.dir=")]
    program = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-m",
        "ddpexp",
    ]
    done = subprocess.run(
        [*program, *overrides],
        cwd=tmp_path,
        env=recipe.ddpexp.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "outputs/points").iterdir()
    assert json.loads((run / "result.json").read_text())["status"] == "done"


def test_a_run_dir_that_holds_something_else_is_refused_and_untouched(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    process, run = start(recipe, f"run.dir={tmp_path}/mine")
    done = finish(process, run)
    assert done.code == 1
    assert "mine exists and is not empty" in done.err
    assert list((tmp_path / "mine").iterdir()) == [tmp_path / "mine/file"]


@pytest.mark.fault(33)
def test_configurations_that_differ_are_refused_with_both_values(recipe: Recipe) -> None:
    first, second = shells(recipe, ["trainer.seed=0"], ["trainer.seed=1"])
    assert (first.code, second.code) == (2, 2)
    host = os.uname().nodename
    assert first.err.startswith(f"ddpexp: trainer.seed is 0 on rank 0 ({host}) and 1 on rank 1 ({host}). ")
    assert second.err == ""
    assert not first.run.exists()


@pytest.mark.fault(25)
def test_a_rank_that_does_not_come_is_named(recipe: Recipe) -> None:
    [done] = shells(recipe, ["trainer.timeout.init_seconds=2"], WORLD_SIZE="3")
    assert done.code == 2
    assert re.search(r"rank 1, 2 of 3 did not join within 2 s", done.err), done.err
    assert not done.run.exists()


def test_shells_without_local_ranks_learn_them(recipe: Recipe) -> None:
    code = (
        "import json; print('place', json.dumps({k: os.environ[k] for k in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', "
        "'GROUP_RANK')}))"
    )
    (recipe.folder / "points.py").write_text(
        (recipe.folder / "points.py").read_text() + f"\nif 'DDPEXP_CONTROL_FD' in os.environ:\n    {code}\n"
    )
    done = shells(recipe, [], [], [])[0]
    assert done.code == 0, done.err
    for rank in range(3):
        text = (done.run / f"ranks/{rank}.log").read_text()
        place = json.loads(re.search(r"place (.*)", text)[1])  # type: ignore[index]
        assert place == {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0"}


@pytest.mark.variants(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_torchrun(recipe: Recipe, number: signal.Signals) -> None:
    before = ddpexp_processes()
    process, run = start(recipe, "task._target_=points.Sleeps", "trainer.epochs=50000", environ=OWN_SERVER)
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
    process.send_signal(number)
    finish(process, run)
    wait_for(lambda: not ddpexp_processes() - before)
    if number == signal.SIGTERM:
        assert json.loads((run / "result.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_a_killed_rank_command_is_the_cause(recipe: Recipe) -> None:
    process, run = start(
        recipe,
        "task._target_=points.Sleeps",
        "trainer.epochs=50000",
        torchrun=("--nproc-per-node=3",),
        environ=OWN_SERVER,
    )
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
    victim = next(pid for pid in ddpexp_processes() if command(pid, "RANK") == "2" and parent(pid) == process.pid)
    os.kill(victim, signal.SIGKILL)
    done = finish(process, run)
    error = json.loads((run / "error.json").read_text())
    assert (done.code, error["rank"], error["kind"]) == (1, 2, "CommandLost")
    assert "it was killed, or its host is cut off" in error["message"]


def command(pid: int, name: str) -> str | None:
    """Return a variable from the environment that a process was started with."""
    try:
        overrides = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((word.partition(b"=")[2].decode() for word in overrides if word.startswith(f"{name}=".encode())), None)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.slow
def test_evaluate_runs_under_torchrun_too(recipe: Recipe) -> None:
    process, run = start(recipe)
    assert finish(process, run).code == 0
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "ddpexp"]
    command = ["evaluate", str(run), "--config-dir", str(recipe.folder / "conf"), "launcher=torchrun-env"]
    environ = recipe.ddpexp.environ
    done = subprocess.run(
        [*program, *command], cwd=recipe.folder, env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    found = dict(re.findall(r"(eval/\w+) ([\d.]+)", done.stdout))
    assert {name: pytest.approx(value, rel=1e-5) for name, value in metrics.items()} == {
        k: float(v) for k, v in found.items()
    }
