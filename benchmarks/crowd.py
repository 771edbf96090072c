"""A job of thousands of commands on one machine.

The real leading command among light ones, that only speak its protocol.

`--commands N --workers W --end failure|stop|hang` prints JSON. The leading command is real from `team.run` on: the
meeting over loopback, the fork server, the watch. Its ranks are processes that do nothing but step and ask `Control`
what all do now. Each other command is a connection that this process holds, and says what a real one with W ranks
would.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddpexp.config.compose import compose
from ddpexp.errors import EXIT_FAILED, Failure
from ddpexp.launch import Job, Layout, Lifecycle, Participants, Work, WorkerRequest
from ddpexp.launch.rendezvous.environment import LaunchEnvironment
from ddpexp.launch.rendezvous.kinds import Fixed
from ddpexp.launch.supervise.assignment import versions
from ddpexp.launch.supervise.hangs import Account
from ddpexp.launch.workers.control import Control
from ddpexp.system.limits import raise_files
from ddpexp.system.network import LOOPBACK, boot_id

_ON_A_HOST = 8  # ranks
_STEP_SECONDS = 0.01
_IDLE_SECONDS = 3.0
_PATIENCE_SECONDS = 60.0
_STOPPED = 128 + signal.SIGTERM
_STACK = "\n".join(
    f'  File "/usr/lib/python3/site-packages/package/module_{n}.py", line {n} in function_{n}' for n in range(25)
)
_TRACE = f"Traceback (most recent call last):\n{_STACK}\nRuntimeError: Connection closed by peer\n"


@dataclass(frozen=True)
class Crowded(Lifecycle):
    """A job whose ranks only step; its identity is that of a real one."""

    workers: int  # CPU workers; one is what a starter of ranks gives each command
    mark: str  # a file that they make

    @property
    def job(self) -> Job:
        """Return what is started."""
        request = WorkerRequest(gpus=self.workers if self.workers > 1 else "auto", device="cpu", threads=1)
        return Job(self, request, identity=_identity())

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Return what the ranks do."""
        return Work("benchmarks.crowd:rank", [self.mark])


def _identity() -> Mapping[str, Any]:
    composed = compose(["recipe=mnist"])
    assert composed is not None
    return composed.values


def rank(mark: str) -> int:
    """Be a rank of the leading command: step after step, and what all ranks agree on.

    Rank zero trains when `mark` is there.
    """
    control = Control.from_environ()
    control.send_nowait("began", step=0)
    control.status.set_phase("train")
    step = 0
    while True:
        time.sleep(_STEP_SECONDS)
        step += 1
        if step == 2 and os.environ["RANK"] == "0":
            Path(mark).touch()
        if control.poll(step) == "stop":
            control.send("stopped", step=step)
            return _STOPPED


def lead(port: int, commands: int, workers: int, mark: str) -> int:
    """Be the leading command."""
    from ddpexp.launch.supervise import coordinator
    from ddpexp.launch.workers.client import Server, check_answer
    from ddpexp.run import outcome

    raise_files()
    outcome.stop_on_signals()
    server = Server()
    check_answer(server.receive() or {"kind": "gone"})  # its imports are not what is timed
    one_rank = LaunchEnvironment(0, commands, True, 0, min(commands, _ON_A_HOST))
    place = one_rank if workers == 1 else LaunchEnvironment(0, commands, nodes=commands)
    way = Fixed(LOOPBACK, port, ("port", "port"))
    try:
        return outcome.exit_code_of(lambda: coordinator.run(Crowded(workers, mark).job, place, way, server))
    finally:
        server.close()


@dataclass(eq=False)
class _Other:
    """One of the other commands: its end of the connection."""

    index: int
    channel: socket.socket
    heard: bytes = b""
    waiting: bytes = b""  # to be sent
    parted: bool = False  # it has said its last word


class Crowd:
    """All commands but the leading one."""

    def __init__(self, commands: int, workers: int) -> None:
        """Make ready what each is to say."""
        self._commands, self._workers = commands, workers
        self._selector = selectors.DefaultSelector()
        self._identity, self._versions, self._boot = _identity(), versions(), boot_id()
        self.heard: Counter[str] = Counter()  # of each kind of message how many
        self.last: dict[str, float] = {}  # and when the last one came
        self.others = [_Other(index, socket.socket(), waiting=self._hello(index)) for index in range(1, commands)]

    def come(self, port: int) -> None:
        """Connect all of them at once; the leading one listens."""
        for other in self.others:
            other.channel.setblocking(False)
            other.channel.connect_ex((LOOPBACK, port))
            self._selector.register(other.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, other)

    def wait_for(self, kind: str) -> float:
        """Answer all messages until every command has heard one of this kind; return when the last one did."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self.heard[kind] < len(self.others):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.heard[kind]} of {len(self.others)} commands have heard {kind}: {self.heard}")
            self.turn()
        del self.heard[kind]
        return self.last[kind]

    def turn(self, seconds: float = 0.1) -> None:
        """Read what has come, send what can be sent."""
        for key, events in self._selector.select(seconds):
            if events & selectors.EVENT_WRITE:
                self._send(key.data)
            if events & selectors.EVENT_READ:
                self._hear(key.data)

    def send_nowait(self, other: _Other, message: Mapping[str, Any]) -> None:
        """Send a message, as far as there is room at once."""
        other.waiting += json.dumps(message).encode() + b"\n"
        self._send(other)

    def report(self, kind: str, weight: int, other: _Other) -> None:
        """Report that the ranks of a command have failed."""
        for number in range(self._workers if weight > 1 else 1):
            failure = Failure(
                other.index * self._workers + number, _host(other.index, self._workers), kind, "a wrong turn", 100
            )
            failed = {**failure.as_dict(), "phase": "train", "traceback": _TRACE}
            self.send_nowait(other, {"kind": "failed", "failure": failed, "weight": weight})

    def close(self) -> None:
        """Close what the leading command has not."""
        for other in self.others:
            other.channel.close()

    def _send(self, other: _Other) -> None:
        try:
            other.waiting = other.waiting[other.channel.send(other.waiting) :]
        except BlockingIOError:
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if other.waiting else 0)
        self._selector.modify(other.channel, events, other)

    def _hear(self, other: _Other) -> None:
        try:
            data = other.channel.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self.heard["closed"] += 1
            self.last["closed"] = time.monotonic()
            self._selector.unregister(other.channel)
            return
        *lines, other.heard = (other.heard + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.heard[message["kind"]] += 1
            self.last[message["kind"]] = time.monotonic()
            answer = self._answer(message, other)
            if answer is not None:
                self.send_nowait(other, answer)

    def _answer(self, message: Mapping[str, Any], other: _Other) -> Mapping[str, Any] | None:
        kind = message["kind"]
        if kind == "refused":
            raise RuntimeError(message["message"])
        if kind == "go":
            return {"kind": "ready"}
        if kind == "begin":
            return {"kind": "bound", "number": message["number"], "step": 1}
        if not other.parted and (kind == "end" or (kind == "settle" and message["what"] == "stop")):
            other.parted = True
            return {"kind": "done"} if kind == "end" else {"kind": "stopped", "signal": int(signal.SIGTERM)}
        if kind == "look":
            return {"kind": "seen", "accounts": self._accounts(other)}
        return None

    def _accounts(self, other: _Other) -> list[dict[str, Any]]:
        """Say what this command sees of its ranks; the last one's hold all others up."""
        silent = 700.0 if other is self.others[-1] else 1.0
        first, host = other.index * self._workers, _host(other.index, self._workers)
        found = (
            Account(
                first + n, host, 1, "train", 100, silent, 600.0, "step_seconds", "asleep", "in step (task.py:1)", _STACK
            )
            for n in range(self._workers)
        )
        return [asdict(one) for one in found]

    def _hello(self, index: int) -> bytes:
        externally = self._workers == 1
        handshake = {
            "index": index, "size": self._commands, "word": "", "host": _host(index, self._workers), "boot": self._boot,
            "versions": self._versions, "identity": self._identity, "layout": asdict(Layout(1, self._workers, "cpu",
                "gloo", 1)),
            "workers": self._workers, "externally_launched": externally,
            "local_rank": index % _ON_A_HOST if externally else None,
            "local_world_size": min(self._commands, _ON_A_HOST) if externally else None, "cores": list(range(64)),
            "quota": None,
            "gpus": [], "owner": f"slurm:cluster:1.{index}",
        }  # fmt: skip
        return json.dumps(handshake).encode() + b"\n"


def _host(index: int, workers: int) -> str:
    number = index * workers // _ON_A_HOST
    return f"node{number}" if number else platform.node()


@contextmanager
def _leading(commands: int, workers: int, mark: Path, code: int) -> Iterator[tuple[int, int]]:
    """Start the leading command; give its process and port when it listens, and see that it ends with a code."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = int(probe.getsockname()[1])
    words = ["--lead", str(port), "--commands", str(commands), "--workers", str(workers), "--mark", str(mark)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.crowd", *words], stderr=subprocess.PIPE, text=True)
    try:
        _wait(lambda: process.poll() is not None or _listens(port))
        yield process.pid, port
        said = process.communicate(timeout=_PATIENCE_SECONDS)[1]
        if process.returncode != code:
            raise RuntimeError(f"the leading command ended with {process.returncode}: {said}")
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    wanted = f":{port:04X} 00000000:0000 0A"
    return wanted in Path("/proc/net/tcp").read_text()


def _wait(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not happens():
        if time.monotonic() > deadline:
            raise RuntimeError("the leading command does not come to it")
        time.sleep(0.05)


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, without its children's; the kernel counts it in nanoseconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _train(crowd: Crowd, pid: int) -> dict[str, float]:
    """Let all train for a while, and save once."""
    time.sleep(1.0)  # what was to be done once is done
    before, begin = _cpu_seconds(pid), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    found = {"idle share": (_cpu_seconds(pid) - before) / (time.monotonic() - begin)}
    before, begin = _cpu_seconds(pid), time.monotonic()
    os.kill(pid, signal.SIGUSR1)
    found["save"] = crowd.wait_for("settle") - begin
    time.sleep(0.2)
    return {**found, "save cpu": _cpu_seconds(pid) - before, "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


def _end(crowd: Crowd, pid: int, how: str) -> dict[str, float]:
    """End the run; return how long that took, until all have the news and until the leading command leaves."""
    before, begin = _cpu_seconds(pid), time.monotonic()
    if how == "stop":
        os.kill(pid, signal.SIGTERM)
        told = crowd.wait_for("settle")
    elif how == "failure":
        crowd.report("ValueError", 1, crowd.others[-1])
        for other in crowd.others[:-1]:
            if not other.parted:
                crowd.report("RuntimeError", 2, other)
            crowd.turn(0)
        told = crowd.wait_for("end")
    else:
        crowd.send_nowait(crowd.others[-1], {"kind": "silence"})
        told = crowd.wait_for("end")
    cpu = _cpu_seconds(pid) - before
    return {how: told - begin, f"{how} cpu": cpu, f"{how} left": crowd.wait_for("closed") - begin}


def measure(commands: int, workers: int, end: str) -> dict[str, float]:
    """Meet, train where the end is a failure, and end."""
    crowd, code = Crowd(commands, workers), _STOPPED if end == "stop" else EXIT_FAILED
    with TemporaryDirectory() as folder, _leading(commands, workers, Path(folder, "trains"), code) as (pid, port):
        before, begin = _cpu_seconds(pid), time.monotonic()
        crowd.come(port)
        found = {"welcome": crowd.wait_for("welcome") - begin}
        found["meet"] = crowd.wait_for("start") - begin
        found["meet cpu"] = _cpu_seconds(pid) - before
        _wait(Path(folder, "trains").exists)
        found |= _train(crowd, pid) if end == "failure" else {}
        found |= _end(crowd, pid, end)
        crowd.close()
    return found


def main() -> None:
    """Lead, or be all the others and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lead", type=int, metavar="PORT")
    parser.add_argument("--mark", help="the file that says that the leading command's ranks train")
    parser.add_argument("--commands", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--end", choices=("failure", "stop", "hang"), default="failure")
    words = parser.parse_args()
    if words.lead is not None:
        sys.exit(lead(words.lead, words.commands, words.workers, words.mark))
    raise_files()
    print(json.dumps(measure(words.commands, words.workers, words.end)))


if __name__ == "__main__":
    main()
