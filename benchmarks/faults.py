"""`python -m benchmarks.faults [--lightning PYTHON] [NAME ...]`: the same faults in ddpexp, torchrun and Lightning.

Two CPU workers train; something breaks in rank 1, or from outside. Written down: the seconds until the command has
ended, its exit code, whether its output says which rank broke, and what is still alive five seconds later. All three
wait ten seconds for a silent rank. `--lightning` is a Python that has Lightning installed beside the same torch.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.race import environ

_TIMEOUT = 10
_BOUND = 60.0
_STEP = 40

# What is done: inside of rank 1 at a step, or from outside to the command or to a rank.
FAULTS: dict[str, tuple[str, str]] = {
    "1 rank raises": ("inside", "raise"),
    "3 rank killed (SIGKILL)": ("inside", "kill"),
    "4 rank crashes (SIGSEGV)": ("inside", "segv"),
    "5 rank frozen (SIGSTOP)": ("inside", "stop"),
    "6 rank spins, lock held": ("inside", "spin"),
    "7 command killed (SIGKILL)": ("command", "SIGKILL"),
    "8 SIGTERM to the command": ("command", "SIGTERM"),
    "9 SIGTERM to one rank": ("rank", "SIGTERM"),
    "14 SIGINT to the command": ("command", "SIGINT"),
    "15 SIGINT to one rank": ("rank", "SIGINT"),
    "18 rank calls sys.exit(3)": ("inside", "exit=3"),
    "19 rank leaves with 0": ("inside", "leave=0"),
}


@dataclass(frozen=True)
class Way:
    """How one framework is started, and where it shows how far it is."""

    name: str
    words: Callable[[Path], list[str]]
    environ: dict[str, str]
    trains: Callable[[Path], bool]  # some steps are done
    pid: Callable[[Path], int]  # of rank 1
    last: Callable[[Path], float]  # when a step was done last
    names: str  # what output must match that says which rank


def main() -> None:
    """Break everything once with every framework, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--lightning", help="a Python with Lightning")
    parser.add_argument("which", nargs="*", help="words that the names of faults begin with, such as 3 or 7")
    words = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background of a shell all that is started would ignore it
    ways = [
        ours(),
        peer("torchrun", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
    ]
    if words.lightning:
        ways.append(peer("lightning", [words.lightning]))
    print("| fault | " + " | ".join(way.name for way in ways) + " |\n|---|" + "---|" * len(ways))
    for name, (where, what) in FAULTS.items():
        if not words.which or name.split()[0] in words.which:
            print(f"| {name} | " + " | ".join(broken(way, where, what) for way in ways) + " |", flush=True)


def ours() -> Way:
    """Return ddpexp's way: synthetic digits, a linear model, a record every step."""

    def command(folder: Path) -> list[str]:
        typed = [
            "recipe=mnist", "model=linear", "data.source=embedded", "data.embedded_train=6400",
            "data.embedded_test=100",
            "trainer.gpus=2", "trainer.epochs=200", "trainer.eval_every=0", "trainer.log_every=1", "logger=none",
            "trainer.global_batch_size=32", f"trainer.timeout.step_seconds={_TIMEOUT}",
            "trainer.timeout.init_seconds=20",
            f"run.dir={folder / 'run'}",
        ]  # fmt: skip
        return [sys.executable, "-m", "ddpexp", *typed]

    def metrics(folder: Path) -> Path:
        return folder / "run/metrics.jsonl"

    def pid(folder: Path) -> int:
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "fd/1").readlink() == folder / "run/ranks/1.log":
                    found[int(entry.name)] = _parent(int(entry.name))
            except OSError:
                continue
        return next(one for one, parent in found.items() if parent not in found)

    return Way(
        "ddpexp", command, {"DDPEXP_FAULT": f"step:ACTION:1:{_STEP}"},
        lambda folder: metrics(folder).exists() and metrics(folder).read_text().count("\n") >= 10, pid,
        lambda folder: metrics(folder).stat().st_mtime, r"ddpexp: rank 1 on \S+ failed",
    )  # fmt: skip


def peer(name: str, before: list[str]) -> Way:
    """Return the way of the hand-written program under torchrun, or of Lightning's."""

    def command(folder: Path) -> list[str]:
        return [
            *before,
            "-m",
            "benchmarks.peers.faulty",
            "--with",
            name,
            "--folder",
            str(folder),
            "--timeout",
            str(_TIMEOUT),
        ]

    def mark(folder: Path) -> list[str]:
        path = folder / "rank1"
        return path.read_text().split() if path.exists() else []

    return Way(
        name, command, {"DDPEXP_FAULT": f"step:ACTION:1:{_STEP}"},
        lambda folder: len(mark(folder)) > 1 and int(mark(folder)[1]) >= 10,
        lambda folder: int(mark(folder)[0]), lambda folder: (folder / "rank1").stat().st_mtime,
        r"rank\s*:\s*1\b|local_rank: 1\b|[Rr]ank 1\b",
    )  # fmt: skip


def broken(way: Way, where: str, what: str) -> str:
    """Run once with the fault; return what a cell of the table says."""
    tag = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name).resolve()
        inside = {key: value.replace("ACTION", what) for key, value in way.environ.items()} if where == "inside" else {}
        own = {**inside, "FAULTS_TAG": tag, "OMP_NUM_THREADS": "1"}
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                way.words(folder),
                env=environ(own),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            begin = time.time()
            while not way.trains(folder) and process.poll() is None and time.time() - begin < _BOUND:
                time.sleep(0.01)
            struck = time.time()
            if where != "inside":
                os.kill(process.pid if where == "command" else way.pid(folder), signal.Signals[what])
            try:
                code: int | None = process.wait(_BOUND)
            except subprocess.TimeoutExpired:
                code = None
            ended = time.time()
            if where == "inside":
                struck = min(way.last(folder), ended)
            time.sleep(5)
            left = _processes(tag)
            named = re.search(way.names, (folder / "output").read_text()) is not None
        finally:
            for pid in _processes(tag):
                os.kill(pid, signal.SIGKILL)
            process.wait()
    if code is None:
        return f"hangs on after {_BOUND:.0f} s" + (", says rank 1" if named else "")
    says = "" if where != "inside" else ", says rank 1" if named else ", does not say which rank"
    rest = f", **{len(left)} left alive**" if left else ""
    return f"{ended - struck:.1f} s, exit {code if code >= 0 else 128 - code}{says}{rest}"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _processes(tag: str) -> list[int]:
    """Return the living processes that one run has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ours_ = f"FAULTS_TAG={tag}".encode() in (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if ours_ and state not in "ZX":
            found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main()
