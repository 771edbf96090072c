"""SIGKILL of any process of a run, under every launcher.

Five seconds later nothing of it is left, whatever it was doing.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, ddpexp_processes, finish
from tests.faults.harness import name, trained
from tests.launch.starters import DDPEXP, SPAWN, Starter, params, skip_without
from tests.points import ITEMS, Recipe, wait_for

LONG = (*ITEMS, "trainer.epochs=5000", "trainer.log_every=1", "trainer.eval_every=0", "trainer.checkpoint_every=0")
SECONDS = PATIENCE  # for what ends in less than five, on a machine that has nothing else to do


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def is_worker(pid: int, run: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/1").startswith(f"{run.resolve()}/ranks/")
    except OSError:
        return False


class Family:
    """Who is who among the processes of a run that trains."""

    def __init__(self, run: Path, before: set[int]) -> None:
        found = ddpexp_processes() - before
        writers = {pid for pid in found if is_worker(pid, run)}
        self.workers = sorted(pid for pid in writers if parent(pid) not in writers)  # the others load their data
        self.servers = sorted({parent(pid) for pid in self.workers})
        self.commands = sorted({parent(pid) for pid in self.servers})
        self.starters = sorted(self._above(found))

    def _above(self, found: set[int]) -> set[int]:
        """Return what has started the commands, up to these tests, and what stands beside it.

        Srun has no task as its child.
        """
        above = {pid for pid in found if name(pid) == "salloc" or (name(pid) == "srun" and name(parent(pid)) != "srun")}
        for pid in self.commands:
            while (pid := parent(pid)) not in (0, 1, os.getpid()):
                above.add(pid)
        return above

    def of(self, kind: str) -> Sequence[int]:
        """Return the processes of one kind."""
        return {
            "worker": self.workers,
            "fork server": self.servers,
            "command": self.commands,
            "starter": self.starters,
        }[kind]


def kill_one(recipe: Recipe, starter: Starter, kind: str, which: Callable[[Sequence[int]], int]) -> str:
    """Run until all train, kill one process, see that all others go; return who it was."""
    before = ddpexp_processes()
    size = starter.sizes[0]
    started, run = starter.start(recipe, size, *LONG)
    try:
        wait_for(lambda: any(one.poll() is not None for one in started) or trained(run, 3))
        family = Family(run, before)
        assert len(family.workers) == size, "\n".join(one.communicate(timeout=PATIENCE)[1] for one in started)
        victim = which(family.of(kind))
        # What waits for a step or a job waits long when Slurm has lost its keeper on a host. Its ranks may not.
        spared = set()
        if name(victim) == "slurmstepd":
            waiting = {
                pid
                for pid in ddpexp_processes() - before
                if "salloc" in (name(pid), name(parent(pid))) or name(pid) == "srun"
            }
            spared = waiting | {one.pid for one in started}
        who = f"{kind} {name(victim)}"
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while left := ddpexp_processes() - before - spared:
            for one in started:
                one.poll()
            text = ", ".join(f"{name(pid)} {pid}" for pid in left)
            assert time.monotonic() < deadline, f"SIGKILL of {who} leaves {text}"
            time.sleep(0.05)
        return who
    finally:
        for one in started:
            one.kill()
            one.communicate()
        if starter.cluster:
            clear_queue()


def clear_queue() -> None:
    """End all jobs, and wait until the hosts are free for the next test."""
    subprocess.run(["scancel", "--user", str(os.getuid()), "--signal=KILL"], check=False)
    subprocess.run(["scancel", "--user", str(os.getuid())], check=False)
    free = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
    wait_for(lambda: subprocess.run(free, capture_output=True, text=True).stdout.strip() == "2")


STARTED = ("torchrun", "elastic", "Open MPI", "MPICH", "srun")


@pytest.mark.slow
@pytest.mark.fault(7)
@pytest.mark.parametrize("starter", [one for one in params(sizes=False) if str(one.values[0]) in STARTED])
def test_nothing_outlives_a_killed_starter(recipe: Recipe, starter: Starter) -> None:
    skip_without(starter)
    kill_one(recipe, starter, "starter", lambda pids: pids[-1])


STARTER = """\
import os, subprocess, sys, threading, time
started = []
def start():
    started.append(subprocess.Popen(sys.argv[2:]))
    while not os.path.exists(sys.argv[1]) and started[0].poll() is None:
        time.sleep(0.05)
thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.exit(started[0].wait())
"""
"""What mpirun does with many ranks: it starts them in threads that it ends. The variables are MPICH's."""


def by_thread(recipe: Recipe, size: int, *own: str) -> tuple[subprocess.Popen[str], Path]:
    arguments, run = recipe.words("launcher=mpi", *own)
    variables = {"PMI_RANK": "0", "PMI_SIZE": str(size), "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": str(size)}
    command = [sys.executable, "-c", STARTER, str(run / "metrics.jsonl"), *DDPEXP, *arguments]
    process = subprocess.Popen(
        command, cwd=recipe.folder, env={**recipe.ddpexp.environ, **variables}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return process, run


@pytest.mark.slow
def test_the_end_of_the_thread_that_started_a_command_is_not_its_starters_end(recipe: Recipe) -> None:
    done = finish(*by_thread(recipe, 1, "trainer.epochs=40"))
    assert (done.code, done.err) == (0, "")


def meets(pids: Iterable[int]) -> bool:
    """Return whether one of these processes holds a name at which ranks of this host meet.

    Other tests' ranks meet beside this one's, so that names alone say nothing.
    """
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    named = {f"socket:[{line[6]}]" for line in lines if line[-1].startswith("@ddpexp-")}
    return any(not named.isdisjoint(open_files(pid)) for pid in pids)


def open_files(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):  # it has ended, or closed one
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(one))
    return found


@pytest.mark.fault(7)
def test_a_command_that_waits_for_the_others_ends_with_its_starter_and_says_so(recipe: Recipe) -> None:
    before = ddpexp_processes()
    process, run = by_thread(recipe, 2)
    wait_for(lambda: meets(ddpexp_processes() - before))  # rank zero waits
    process.kill()
    wait_for(lambda: not ddpexp_processes() - before, SECONDS)
    done = finish(process, run)
    assert done.err == (
        f"ddpexp: mpirun (process {process.pid}), which started this command, is gone: it was killed, and its ranks "
        "end with it\n"
    )
    assert not run.exists()


@pytest.mark.fault(7)
def test_a_killed_starter_is_written_down(recipe: Recipe) -> None:
    process, run = by_thread(recipe, 1, *LONG)
    wait_for(lambda: trained(run, 3))
    process.kill()
    finish(process, run)
    error = json.loads((run / "error.json").read_text())
    assert (error["rank"], error["kind"]) == (0, "StarterLost")
    assert json.loads((run / "result.json").read_text())["status"] == "failed"


KINDS = ("starter", "command", "fork server", "worker")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.fault(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("starter", [pytest.param(SPAWN, id="spawn"), *params(sizes=False)])
def test_nothing_outlives_any_killed_process(recipe: Recipe, starter: Starter, kind: str) -> None:
    skip_without(starter)
    if kind == "starter" and starter.name in (
        "spawn",
        "spawn, new interpreters",
        "spawn on two machines",
        "variables in shells",
    ):
        pytest.skip("the commands are typed")
    draw = random.Random(f"{starter} {kind}")
    times = int(os.environ.get("DDPEXP_TEST_TIMES", "20"))
    who = [kill_one(recipe, starter, kind, draw.choice) for _ in range(times)]
    print(*(f"{name}: {len(list(all_))}" for name, all_ in itertools.groupby(sorted(who))))
