"""The first second of a command: what started it is killed, or it is killed itself."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ddpexp_processes
from tests.faults.harness import ended, gone
from tests.faults.test_leftovers import LONG, clear_queue
from tests.launch.starters import DDPEXP, STARTERS, Starter, skip_without
from tests.points import Recipe, wait_for

TIMES = int(os.environ.get("DDPEXP_TEST_TIMES", "40"))
PROMISED = 5.0


def is_command(pid: int) -> bool:
    """Return whether a process runs `python -m ddpexp`, and has begun to.

    Before its exec it shows its starter's words.
    """
    try:
        overrides = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return (
        b"ddpexp" in overrides[2:4]
        and overrides[overrides.index(b"ddpexp") - 1] == b"-m"
        and set(overrides[1:3]) <= {b"-u", b"-m", b"ddpexp"}
    )


def first_command(before: set[int], seconds: float = 40) -> int:
    """Wait for the first command among what is new."""
    found: list[int] = []

    def look() -> bool:
        found.extend(filter(is_command, ddpexp_processes() - before))
        return bool(found)

    wait_for(look, seconds)
    return found[0]


def say_largest(recipe: Recipe, seconds: Sequence[float]) -> None:
    """Print how long what was killed lived on, and clear away the files with which Python's tempfile tries a folder.

    They are there for an instant, when a process imports torch: one that is killed in it leaves its own.
    """
    for path in Path(recipe.ddpexp.environ["TMPDIR"]).glob("????????"):
        if path.is_file() and path.read_bytes() in (b"", b"blat"):
            path.unlink()
    over = sum(one > PROMISED for one in seconds)
    print(
        f"{len(seconds)} times, the last process was gone after {max(seconds):.2f} s at most, {over} times over "
        f"{PROMISED} s"
    )


# What becomes the parent of a starter's orphans, in the same session, as a service manager or a notebook's kernel may.
ADOPTER = """\
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.Popen(sys.argv[1:])
codes = []
while True:
    try:
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    except ChildProcessError:
        sys.exit(codes[0])
"""


Wrap = Callable[[list[str]], list[str]]
ADOPTED: Wrap = lambda overrides: [sys.executable, "-c", ADOPTER, *overrides]  # noqa: E731


def under(wrap: Wrap, starter: Starter) -> Starter:
    """Return a starter whose words are wrapped in others."""
    ways = starter.commands
    return dataclasses.replace(
        starter, commands=lambda arguments, size: [(wrap(overrides), more) for overrides, more in ways(arguments, size)]
    )


def kill_starter(recipe: Recipe, starter: Starter, moment: float, adopted: bool = False) -> float:
    """Kill what has started a job so long after its first command's first moment.

    Return how long all of it lived on.
    """
    before = ddpexp_processes()
    if adopted:
        starter = under(ADOPTED, starter)
    started, _ = starter.start(recipe, 2, *LONG)
    with ended(before, *started):
        first_command(before)
        time.sleep(moment)
        victim = started[0].pid
        if adopted:
            victim = int(Path(f"/proc/{victim}/task/{victim}/children").read_text().split()[0])
        os.kill(victim, signal.SIGKILL)
        return gone(before, started, f"{starter} killed after {moment:.3f} s")


KILLED = ("torchrun", "Open MPI", "MPICH", "srun")
WAYS = [one for one in STARTERS if one.name in KILLED]


def marked(*often: str) -> list[Any]:
    return [
        pytest.param(
            one,
            marks=[*([pytest.mark.slurm] if one.cluster else []), *([] if one.name in often else [pytest.mark.slow])],
            id=one.name,
        )
        for one in WAYS
    ]


@pytest.mark.variants(1)
@pytest.mark.fault(7)
@pytest.mark.parametrize("starter", marked("torchrun", "Open MPI", "MPICH"))
def test_a_starter_that_is_killed_before_a_commands_first_line_leaves_nothing(recipe: Recipe, starter: Starter) -> None:
    skip_without(starter)
    kill_starter(recipe, starter, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.fault(7)
@pytest.mark.parametrize("adopted", [False, True], ids=["by init", "by a subreaper"])
@pytest.mark.parametrize("starter", marked())
def test_a_starter_that_is_killed_in_the_first_second_leaves_nothing(
    recipe: Recipe, starter: Starter, adopted: bool
) -> None:
    skip_without(starter)
    if adopted and starter.cluster:
        pytest.skip("Slurm starts the commands itself")
    draw = random.Random(f"{starter} {adopted}")
    found = []
    for number in range(TIMES if not adopted else TIMES // 4):
        found.append(
            kill_starter(recipe, starter, draw.uniform(0, 0.05) if number % 4 == 0 else draw.uniform(0, 1), adopted)
        )
        if starter.cluster:
            clear_queue()
    say_largest(recipe, found)


def kill_shell(recipe: Recipe, moment: float) -> float:
    """Kill a shell in whose terminal a command was started."""
    before = ddpexp_processes()
    arguments, _ = recipe.words("trainer.gpus=2", "trainer.threads=1", *LONG)
    terminal, theirs = os.openpty()
    try:
        shell = subprocess.Popen(
            ["setsid", "--ctty", "bash", "-c", '"$@"; true', "-", *DDPEXP, *arguments],
            cwd=recipe.folder, env=recipe.ddpexp.environ, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        with ended(before, shell):
            first_command(before)
            time.sleep(moment)
            shell.kill()
            return gone(before, [shell], f"a shell killed after {moment:.3f} s")
    finally:
        os.close(terminal)
        os.close(theirs)


@pytest.mark.fault(16)
def test_a_command_ends_with_the_shell_of_its_terminal(recipe: Recipe) -> None:
    kill_shell(recipe, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.fault(16)
def test_a_shell_that_is_killed_in_the_first_second_leaves_nothing(recipe: Recipe) -> None:
    draw = random.Random("a shell")
    say_largest(recipe, [kill_shell(recipe, draw.uniform(0, 1)) for _ in range(TIMES)])


def kill_command(recipe: Recipe, moment: float) -> float:
    before = ddpexp_processes()
    process, _ = recipe.start("trainer.gpus=2", "trainer.threads=1", *LONG)
    with ended(before, process):
        time.sleep(moment)
        process.kill()
        return gone(before, [process], f"the command killed after {moment:.3f} s")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.fault(7)
def test_a_command_that_is_killed_in_its_first_seconds_leaves_nothing(recipe: Recipe) -> None:
    draw = random.Random("a command")
    say_largest(recipe, [kill_command(recipe, draw.uniform(0, 1.5)) for _ in range(5 * TIMES)])


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")
# Ways in which a starter that is well has another parent than usual, or its commands have.
BETWEEN: dict[str, Wrap] = {
    "as process 1": lambda overrides: [*CONTAINER, *overrides],
    "under a shell as process 1": lambda overrides: [*CONTAINER, "bash", "-c", '"$@"; exit $?', "-", *overrides],
    "under a subreaper": ADOPTED,
    "in a session of its own": lambda overrides: ["setsid", "--wait", "nohup", *overrides],
    "with a script between": lambda overrides: [
        part for word in overrides for part in (("bash", "-c", '"$@"; exit $?', "-",
            word) if word == DDPEXP[0] else (word,))
    ],
}  # fmt: skip


def ways() -> list[Any]:
    often = {("torchrun", "as process 1"), ("Open MPI", "under a subreaper")}
    found = []
    for one in WAYS:
        for way in BETWEEN:
            if (one.name, way) == ("torchrun", "with a script between"):
                continue  # it starts Python itself
            marks = [
                *([pytest.mark.slurm] if one.cluster else []),
                *([] if (one.name, way) in often else [pytest.mark.slow]),
            ]
            found.append(pytest.param(one, way, marks=marks, id=f"{one.name} {way}"))
    return found


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a container")
@pytest.mark.parametrize(("starter", "way"), ways())
def test_a_healthy_starter_is_not_taken_for_a_lost_one(recipe: Recipe, starter: Starter, way: str) -> None:
    skip_without(starter)
    done = under(BETWEEN[way], starter)(recipe, 2, "trainer.epochs=2", "trainer.eval_every=0")
    assert done.code == 0, done.err
    assert done.result()["status"] == "done"
    assert "StarterLost" not in done.out + done.err
