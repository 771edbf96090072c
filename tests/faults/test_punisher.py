"""Thirty faults in one run, at random.

It ends with the weights of the undisturbed run, and every step is recorded once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ZYGOTES, ddpexp_processes, finish
from tests.faults.harness import loader_workers, parent_of, pid_of
from tests.points import ITEMS, Recipe

WORDS = (
    "trainer.log_every=1", "trainer.epochs=null", "trainer.checkpoint_every=20", "trainer.eval_every=50",
    "trainer.timeout.init_seconds=20", "trainer.timeout.step_seconds=2", "logger=tensorboard", *ITEMS[:1],
    "data.num_workers=1",
)  # fmt: skip
POINTS = (
    "begun",
    "share",
    "recorded",
    "manifest",
    "renamed",
    "pruning",
)  # "written" is not reached on a rank whose share of a small model is nothing


def steps(run: Path) -> int:
    try:
        return int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0


def kill_rank(chance: random.Random, process: subprocess.Popen[str]) -> None:
    os.kill(pid_of(chance.randrange(3)), signal.SIGKILL)


def stop_rank(chance: random.Random, process: subprocess.Popen[str]) -> None:
    os.kill(pid_of(chance.randrange(3)), signal.SIGSTOP)


def end_command(chance: random.Random, process: subprocess.Popen[str]) -> None:
    process.send_signal(chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))


def kill_command(chance: random.Random, process: subprocess.Popen[str]) -> None:
    process.kill()


def kill_server(chance: random.Random, process: subprocess.Popen[str]) -> None:
    os.kill(parent_of(pid_of(0)), signal.SIGKILL)


def kill_loader(chance: random.Random, process: subprocess.Popen[str]) -> None:
    os.kill(chance.choice(loader_workers(chance.randrange(3))), signal.SIGKILL)


def kill_everything(chance: random.Random, process: subprocess.Popen[str]) -> None:
    for pid in sorted(ddpexp_processes(but=ZYGOTES), key=lambda _: chance.random()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


FAULTS: tuple[Callable[[random.Random, subprocess.Popen[str]], None], ...] = (
    kill_rank, stop_rank, end_command, kill_command, kill_server, kill_loader, kill_everything,
)  # fmt: skip


@pytest.mark.fault(3, 5, 7, 8, 54)
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(seed, count, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
        for seed, count in ((0, 4), (1, 30), (2, 30), (3, 30))
    ],
)
def test_random_faults_change_nothing(recipe: Recipe, seed: int, count: int) -> None:
    chance = random.Random(seed)
    overrides = (*WORDS, "trainer.gpus=3", f"trainer.max_steps={count * 60}")
    quick = recipe(*overrides, environ={"PACE": "0"}, timeout=300)
    assert quick.code == 0, quick.err
    seen: Counter[str] = Counter()
    run: Path | None = None
    while seen.total() < count:
        planned = chance.random() < 0.3  # a rank dies at a point of a checkpoint's write
        fault = f"checkpoint.{chance.choice(POINTS)}:kill:0:{chance.randrange(1, 3)}"
        process, run = recipe.start(
            *overrides, run=run, environ={"PACE": "0.03", **({"DDPEXP_FAULT": fault} if planned else {})}
        )
        before, deadline = steps(run), time.monotonic() + 30
        while process.poll() is None and steps(run) <= before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.8))
        if not planned and process.poll() is None:
            strike = chance.choice(FAULTS)
            try:
                strike(chance, process)
            except (ProcessLookupError, StopIteration, IndexError):
                process.kill()  # its aim was not there just then
            print(strike.__name__, "at step", steps(run))
            seen[strike.__name__] += 1
        done = finish(process, run)
        seen["a checkpoint's write"] += planned and done.code != 0
        if done.code == 0:
            break
    print(dict(seen), "faults,", steps(run) if run else 0, "steps")
    done = recipe(*overrides, run=run, environ={"PACE": "0"}, timeout=300)
    assert done.code == 0, done.err
    assert seen.total() >= count, "the run ended before all faults had come"
    assert done.result()["weights_sha256"] == quick.result()["weights_sha256"]
    own, expected = (
        [(line["step"], line.get("train/loss"), line.get("eval/loss")) for line in one.metrics()]
        for one in (done, quick)
    )
    assert own == expected
