"""Promises 1 and 3 together: under every launcher the last line of an interrupted run resumes it, to the same end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddpexp.checkpoint.format import complete_checkpoints
from tests.conftest import OWN_SERVER, PATIENCE, Ddpexp, Done, living
from tests.launch.starters import OFTEN, SPAWN, Starter, host, params, skip_without
from tests.points import Recipe
from tests.records import timeless

CODE = """\
class Deep(nn.Sequential):
    def __init__(self):
        layers = [nn.Linear(4, 24)]
        for _ in range(3):
            layers += [nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 24)]
        super().__init__(*layers, nn.Linear(24, 2))


class Paced(Sides):
    # Steps long enough to be interrupted between two of them.
    def step(self, model, batch):
        time.sleep(0.02)
        return super().step(model, batch)
"""
WORDS = (
    "task._target_=points.Paced", "model=deep", "strategy.bucket_cap_mb=0.005", "optimizer=adamw",
    "trainer.epochs=null",
    "trainer.max_steps=60", "trainer.checkpoint_every=5", "trainer.eval_every=20", "trainer.log_every=7",
)  # fmt: skip


@pytest.fixture(scope="module")
def environ(warm_single_environ: dict[str, str]) -> dict[str, str]:
    """The environment in which the fork servers of all launchers on this host are forks."""
    return warm_single_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return project(tmp_path_factory.mktemp("interrupted"), environ)


def project(folder: Path, environ: dict[str, str]) -> Recipe:
    recipe = Recipe(Ddpexp(folder, environ), CODE)
    (recipe.folder / "conf/model/deep.yaml").write_text("_target_: points.Deep\n")
    return recipe


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Callable[[int], Done]:
    recipe = project(tmp_path_factory.mktemp("undisturbed"), {**environ, **OWN_SERVER})
    known: dict[int, Done] = {}

    def run(size: int) -> Done:
        if size not in known:
            known[size] = SPAWN(recipe, size, *WORDS)
            assert known[size].code == 0, known[size].err
        return known[size]

    return run


def records(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [timeless(line) for line in lines]


def stop(starter: Starter, started: Sequence[subprocess.Popen[str]], run: Path) -> None:
    """Interrupt the job, as whoever has started it does."""
    if starter.name == "sbatch":
        [log] = run.glob("slurm-*.log")
        subprocess.run(["scancel", log.stem.removeprefix("slurm-")], check=True)
    elif starter.name == "srun":  # which kills its tasks at once with SIGTERM, and forwards this
        started[0].send_signal(signal.SIGUSR2)
    else:
        started[0].terminate()


def last_line(starter: Starter, first: Done) -> str:
    """Return the last line that the job has said: what starts the ranks may say more afterwards."""
    said = next(first.run.glob("slurm-*.log")).read_text() if starter.name == "sbatch" else first.err
    lines = said.splitlines()
    told = [place for place, line in enumerate(lines) if "; resume it" in line]
    assert len(told) == 1, said
    return lines[told[0] + 1]


def pasted(starter: Starter, recipe: Recipe, size: int, line: str, run: Path) -> Done:
    """Run a command line as it stands, wherever it says that it must be run."""
    environ = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
    lines = [line]
    if starter.name in ("spawn on two machines", "torchrun on two machines"):
        lines = [f"exec {shlex.join(host(node))} bash -c {shlex.quote(line)}" for node in (0, 1)]
        lines[1] = lines[1].replace("launcher.node_rank=0", "launcher.node_rank=1")
    elif starter.name == "variables in shells":
        lines = [line.replace("RANK=0", f"RANK={rank}") for rank in range(size)]
    elif starter.name in ("sbatch", "salloc"):  # they submit, and wait only with an option
        lines = [f"{line} launcher.wait=true"]
    return starter.finish(
        [recipe.ddpexp.paste(one, recipe.folder, {**environ, "OMP_NUM_THREADS": "1"}) for one in lines], run
    )


def kill_a_rank(starter: Starter, started: Sequence[subprocess.Popen[str]], run: Path) -> None:
    """Kill the process that writes into the log of the last rank."""
    log = str(sorted((run / "ranks").glob("*.log"))[-1].resolve())
    for pid in living(run):
        if os.readlink(f"/proc/{pid}/fd/1") == log:
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError("nobody writes into the log")


def wait_for_step(run: Path, step: int, started: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not any(int(path.name[5:]) >= step for path in complete_checkpoints(run / "checkpoints")):
        assert started[0].poll() is None, started[0].communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


KILLED = (
    "torchrun",
    "sbatch",
    "Open MPI",
)  # what ends the rest differs; under spawn tests/test_interruptions.py has it
CASES = [
    *(
        pytest.param(one.values[0], stop, id=f"{one.id}, stop", marks=one.marks)
        for one in params(sizes=False, often=OFTEN[1::2])
    ),
    *(
        pytest.param(one.values[0], kill_a_rank, id=f"{one.id}, kill", marks=one.marks)
        for one in params(sizes=False, often=KILLED[:1])
        if str(one.values[0]) in KILLED
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("starter", "harm"), CASES)
def test_an_interrupted_run_resumes_under_its_launcher(
    recipe: Recipe, undisturbed: Callable[[int], Done], starter: Starter, harm: Callable[..., None]
) -> None:
    skip_without(starter)
    size = starter.sizes[0]
    expected = undisturbed(size)
    started, run = starter.start(recipe, size, *WORDS)
    wait_for_step(run, 10, started)
    harm(starter, started, run)
    first = starter.finish(started, run)
    assert first.code != 0
    result = first.result()
    newest = complete_checkpoints(run / "checkpoints")[0]
    if harm is kill_a_rank:
        assert result["status"] == "failed", first.err
        assert json.loads((run / "error.json").read_text())["kind"] == "SIGKILL"
    else:
        assert result["status"] == "interrupted", first.err
        assert newest.name == f"step-{result['step']:08}"
        assert result["step"] < 60
    again = partial(pasted, starter, recipe, size, last_line(starter, first), run) if harm is stop else None
    done = again() if again is not None else starter(recipe, size, *WORDS, run=run)
    assert done.code == 0, done.err
    assert f"resumed after step {int(newest.name[5:])} of 60" in (run / "run.log").read_text()
    assert done.result()["weights_sha256"] == expected.result()["weights_sha256"]
    assert records(run) == records(expected.run)


def test_a_run_resumes_under_another_launcher(recipe: Recipe, undisturbed: Callable[[int], Done]) -> None:
    torchrun = next(one.values[0] for one in params(sizes=False) if str(one.values[0]) == "torchrun")
    started, run = SPAWN.start(recipe, 2, *WORDS)
    wait_for_step(run, 10, started)
    started[0].terminate()
    assert SPAWN.finish(started, run).code == 143
    done = torchrun(recipe, 2, *WORDS, run=run)
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == undisturbed(2).result()["weights_sha256"]
    assert records(run) == records(undisturbed(2).run)
