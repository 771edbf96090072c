"""Signals to a command, a rank or all: every rank saves and stops after the same step, whatever the ranks wait for."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ddpexp.errors import DdpexpError, RefusedError, StoppedError, first_end
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.page import What
from tests.conftest import PATIENCE, Done, finish
from tests.launch.commands import Command
from tests.points import session, wait_for
from tests.refusals import refused

CODE = """\
import os
import random
import sys
import time

import torch

from ddpexp.launch import Layout
from ddpexp.train.process import Interrupted, run_rank
from ddpexp.distributed.world import World


def main(folder, *how):
    return run_rank(lambda control: work(control, folder, how))


def work(control, folder, how):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mark(folder, "pid", rank, str(os.getpid()))
    torch.set_num_threads(1)
    random.seed(os.getpid())
    control.status.set_phase("join")
    world = World.join(Layout(1, size, "cpu", "gloo", 1))
    if "builds" in how:
        mark(folder, "builds", rank)
        time.sleep(600)
    control.send_nowait("began", step=0)
    control.status.set_phase("train")
    one, done = torch.ones(1), 0
    last = next((int(word[5:]) for word in how if word.startswith("last=")), 1 << 30)
    with open(f"{folder}/seen{rank}", "w", buffering=1) as seen:
        while done < last:
            if "long" in how and done == 5 and rank == size - 1:
                mark(folder, "long", rank)
                time.sleep(600)
            if "slow" in how:
                time.sleep(0.01)
            if "apart" in how:  # as on GPUs, whose hosts run ahead: nothing in a step keeps the ranks together
                time.sleep(0.001 + random.random() * 0.001 * rank)
            else:
                world.sum(one.fill_(1))
            done += 1
            control.status.step = done
            mark(folder, "trains", rank) if done == 3 else None
            if done == last:
                break
            what = control.poll(done, save="wishes" in how and random.random() < max(10 / last, 0.005))
            if what is not None:
                seen.write(f"{what} {done}\\n")
            if what == "stop" and "fails" in how and rank == size - 1:
                raise ValueError("the disk is full")
            if what == "stop":
                break
    world.barrier()
    if done < last:
        raise Interrupted(done)


def mark(folder, name, rank, text=""):
    with open(f"{folder}/.{name}{rank}", "w") as file:
        file.write(text)
    os.replace(f"{folder}/.{name}{rank}", f"{folder}/{name}{rank}")
"""

COMMAND = """\
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from tests.warm import forks

forks.install()

from ddpexp.run.outcome import launch, stop_on_signals
from ddpexp.errors import ENDS, StoppedError
from ddpexp.launch import Interrupted, Job, Lifecycle, Work, WorkerRequest
from ddpexp.launch.supervise import coordinator
from ddpexp.launch.workers.client import Server
from ddpexp.launch.rendezvous.environment import LaunchEnvironment
from ddpexp.launch.launchers.local import Spawn


class Polls(Lifecycle):
    def __init__(self, folder, how):
        self.work = Work("polls:main", [folder, *how], Path(folder, "logs"))

    def begin(self, layout, participants):
        return self.work

    def enter(self, shared, layout):
        return self.work

    def end(self, outcome):
        return f"step {outcome.step} saved: {outcome.saved}" if isinstance(outcome, Interrupted) else ""


def polling(folder, size, how, grace_seconds, nodes):
    return Job(Polls(folder, how), WorkerRequest(nodes=nodes, gpus=size, grace_seconds=grace_seconds))


def main():
    folder, size, how, grace_seconds, launcher, nodes = json.loads(sys.argv[1])
    stop_on_signals()
    try:
        code = launch(Spawn(**launcher), polling(folder, size, how, grace_seconds, nodes), None)
    except ENDS as error:
        print(error, file=sys.stderr, flush=True)
        code = error.exit_code
    os._exit(code)


def again():
    # Many runs from one server, each stopped at a random moment by a signal to a random process or to all.
    folder, size, how, count, seed = json.loads(sys.argv[1])
    generator = random.Random(seed)
    server = Server()
    for number in range(count):
        place = Path(folder, str(number))
        place.mkdir()
        stop = threading.Thread(target=signals, args=(place, size, generator))
        stop.start()
        try:
            coordinator.run(polling(str(place), size, how, 25.0, 1), LaunchEnvironment(), None, server)
            print("no end by a signal", flush=True)
        except StoppedError as error:
            print(error.step, error.saved, flush=True)
        stop.join()
    server.close()
    os._exit(0)


def signals(place, size, generator):
    while len(list(place.glob("trains*"))) < size:
        time.sleep(0.001)
    time.sleep(generator.random() * 0.05)
    pids = [os.getpid(), *(int(path.read_text()) for path in place.glob("pid*"))]
    generator.shuffle(pids)
    for pid in pids[: generator.choice([1, len(pids)])]:
        os.kill(pid, signal.SIGTERM)
"""


LATER = 4.0
"""Seconds after which a signal is another one: two, and what a busy machine may take to notice the first."""


class Polls:
    """Commands whose workers only count steps and follow instructions."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        (folder / "code").mkdir()
        (folder / "code/polls.py").write_text(CODE)
        (folder / "code/command.py").write_text(COMMAND)
        self.environ = {**environ, "PYTHONPATH": f"{environ['PYTHONPATH']}:{folder / 'code'}"}
        self.processes: list[subprocess.Popen[str]] = []
        self.size = 0

    def start(self, size: int, *how: str, grace_seconds: float = 600.0, nodes: int = 1) -> Polls:
        """Start the commands, each with `size` ranks, and return when all ranks have begun.

        What ends has not waited for the time of grace, unless a test sets a short one.
        """
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        for node in range(nodes):
            launcher = {"node_rank": node, "master_addr": "127.0.0.1", "master_port": port} if nodes > 1 else {}
            self.run("main", [str(self.folder), size, how, grace_seconds, launcher, nodes])
        self.size = size * nodes
        wait_for(lambda: len(self.marks("builds" if "builds" in how else "trains")) == self.size)
        return self

    def run(self, function: str, overrides: list[object]) -> subprocess.Popen[str]:
        import json

        program = [sys.executable, "-c", f"import command; command.{function}()", json.dumps(overrides)]
        process = subprocess.Popen(
            program, cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def marks(self, name: str) -> list[Path]:
        return sorted(self.folder.glob(f"{name}*"))

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.marks("pid")]

    def signal(self, number: int, whom: str) -> None:
        """Send a signal to the first or last command, to the last rank, or to every process there is."""
        command, last = self.processes[0].pid, self.processes[-1].pid
        everything = [command, last, *self.pids(), *session(command)]
        targets = {
            "command": [command],
            "last command": [last],
            "rank": [self.pids()[-1]],
            "rank zero": [self.pids()[0]],
        }
        for pid in dict.fromkeys(targets.get(whom, everything)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def finish(self) -> list[Done]:
        return [finish(process, self.folder) for process in self.processes]

    def seen(self) -> list[str]:
        """Return what the ranks were instructed to do and when, which was the same for all."""
        seen = [path.read_text().splitlines() for path in self.marks("seen")]
        assert len(seen) == self.size
        assert all(one == seen[0] for one in seen), seen
        return seen[0]

    def log(self, rank: int) -> str:
        return (self.folder / f"logs/{rank}.log").read_text()

    def stopped(self, number: int) -> int:
        """Check that all have stopped by this signal, and return the step."""
        ended = self.finish()
        assert [done.code for done in ended] == [128 + number] * len(ended), ended
        told = self.seen()
        what, step = told[-1].split()
        assert what == "stop"
        assert ended[0].err == f"interrupted by {signal.Signals(number).name}; step {step} saved: True\n"
        return int(step)


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Signals are tested, not how fork servers start: they are forks."""
    return warm_environ


@pytest.fixture
def polls(tmp_path: Path, environ: dict[str, str]) -> Polls:
    return Polls(tmp_path, environ)


# ------------------------------------------------------------------------------------------------------------ the
# signals


@pytest.mark.variants(4)
@pytest.mark.fault(8, 9, 15, 16)
@pytest.mark.parametrize("whom", ["command", "rank", "all"])
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2], ids=lambda number: number.name
)
def test_a_signal_has_every_rank_stop_after_the_same_step(polls: Polls, number: signal.Signals, whom: str) -> None:
    polls.start(2).signal(number, whom)
    polls.stopped(number)
    assert len(polls.seen()) == 1


@pytest.mark.parametrize("size", [1, 4])
def test_one_rank_stops_as_four_do(polls: Polls, size: int) -> None:
    polls.start(size).signal(signal.SIGTERM, "all")
    polls.stopped(signal.SIGTERM)
    assert len(polls.seen()) == 1


@pytest.mark.variants(2)
@pytest.mark.parametrize("whom", ["command", "rank zero", "all"])
def test_usr1_has_every_rank_save_and_continue(polls: Polls, whom: str) -> None:
    polls.start(2, "slow").signal(signal.SIGUSR1, whom)
    time.sleep(0.2)
    polls.signal(signal.SIGUSR1, whom)  # the same one
    wait_for(lambda: bool(polls.marks("seen1")[0].read_text()))
    time.sleep(0.2)
    polls.signal(signal.SIGTERM, whom)
    polls.stopped(signal.SIGTERM)
    assert [line.split()[0] for line in polls.seen()] == ["save", "stop"]


def test_a_stop_right_after_a_save_is_both_or_the_stop_alone(polls: Polls) -> None:
    polls.start(4)
    polls.signal(signal.SIGUSR1, "command")
    polls.signal(signal.SIGTERM, "command")
    polls.stopped(signal.SIGTERM)
    assert [line.split()[0] for line in polls.seen()] in (["save", "stop"], ["stop"])


def test_rank_zeros_wishes_are_followed_by_all_and_the_end_is_an_end(polls: Polls) -> None:
    polls.start(2, "slow", "wishes", "last=700")
    assert [done.code for done in polls.finish()] == [0]
    told = polls.seen()
    assert {line.split()[0] for line in told} == {"save"}
    assert len({line.split()[1] for line in told}) == len(told)


@pytest.mark.fault(11)
def test_a_signal_before_the_training_ends_all_at_once(polls: Polls) -> None:
    polls.start(2, "builds").signal(signal.SIGTERM, "command")
    [done] = polls.finish()
    assert (done.code, done.err) == (143, "interrupted by SIGTERM; step None saved: False\n")


def test_what_has_nothing_to_save_ends_by_the_signal_that_came(polls: Polls) -> None:
    polls.start(2, "builds").signal(signal.SIGUSR2, "all")  # the ranks are then ended with another one
    [done] = polls.finish()
    assert (done.code, done.err) == (140, "interrupted by SIGUSR2; step None saved: False\n")


@pytest.mark.slow
def test_the_end_of_the_job_replaces_the_stop_for_a_requeue(polls: Polls) -> None:
    polls.start(2, "long")
    wait_for(lambda: bool(polls.marks("long")))
    polls.signal(signal.SIGUSR2, "command")
    time.sleep(LATER)
    polls.signal(signal.SIGTERM, "command")
    time.sleep(LATER)
    assert polls.processes[0].poll() is None
    polls.signal(signal.SIGTERM, "command")
    [done] = polls.finish()
    assert done.code == 143


# ---------------------------------------------------------------------------------------------------- what does not go
# well


@pytest.mark.fault(17)
def test_what_does_not_save_in_time_is_killed(polls: Polls) -> None:
    polls.start(2, "long", grace_seconds=2)
    wait_for(lambda: bool(polls.marks("long")))
    polls.signal(signal.SIGTERM, "command")
    [done] = polls.finish()
    assert (done.code, done.err) == (143, "interrupted by SIGTERM; step 5 saved: False\n")


@pytest.mark.slow
@pytest.mark.fault(13)
@pytest.mark.parametrize("whom", ["command", "rank zero"])
def test_a_second_signal_within_two_seconds_is_the_same_and_a_later_one_ends_at_once(polls: Polls, whom: str) -> None:
    polls.start(2, "long")
    wait_for(lambda: bool(polls.marks("long")))
    polls.signal(signal.SIGINT, whom)
    time.sleep(0.1)
    polls.signal(signal.SIGTERM, whom)
    time.sleep(LATER)
    assert polls.processes[0].poll() is None
    polls.signal(signal.SIGTERM, "command" if whom == "command" else "last command")
    if whom != "command":  # that was the first one there: a late copy, for all that is known
        time.sleep(LATER)
        assert polls.processes[0].poll() is None
        polls.signal(signal.SIGTERM, "command")
    [done] = polls.finish()
    assert (done.code, done.err) == (128 + signal.SIGINT, "interrupted by SIGINT; step 5 saved: False\n")


def test_a_rank_that_fails_while_it_saves_has_failed(polls: Polls) -> None:
    polls.start(2, "fails").signal(signal.SIGTERM, "command")
    [done] = polls.finish()
    assert (done.code, done.err) == (1, "the disk is full\n")


def test_a_rank_that_is_killed_after_the_request_has_failed(polls: Polls) -> None:
    polls.start(2, "long")
    wait_for(lambda: bool(polls.marks("long")))
    polls.signal(signal.SIGTERM, "command")
    time.sleep(0.3)
    polls.signal(signal.SIGKILL, "rank zero")
    [done] = polls.finish()
    assert (done.code, done.err) == (1, "killed by SIGKILL\n")


# ---------------------------------------------------------------------------------------------------------- where they
# are


@pytest.mark.variants(1)
@pytest.mark.parametrize("whom", ["command", "rank", "all"])
def test_quit_writes_every_ranks_stacks_and_the_run_continues(polls: Polls, whom: str) -> None:
    polls.start(2).signal(signal.SIGQUIT, whom)
    wait_for(lambda: all("in work" in polls.log(rank) for rank in range(2)))
    time.sleep(0.3)
    if whom != "all":  # where a rank may get its own before the command's
        assert [polls.log(rank).count("(most recent call first)") for rank in range(2)] == [
            polls.log(rank).count("Current thread")
            + polls.log(rank).count("\nThread ")
            + polls.log(rank).startswith("Thread ")
            for rank in range(2)
        ]
        assert [polls.log(rank).count("Current thread") for rank in range(2)] == [1, 1]
    polls.signal(signal.SIGTERM, "command")
    polls.stopped(signal.SIGTERM)


# ---------------------------------------------------------------------------------------------------------- several
# commands


@pytest.mark.variants(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2], ids=lambda number: number.name)
@pytest.mark.parametrize("whom", ["command", "last command", "rank", "all"])
def test_two_commands_stop_after_the_same_step(polls: Polls, number: signal.Signals, whom: str) -> None:
    polls.start(2, nodes=2).signal(number, whom)
    polls.stopped(number)


def test_two_commands_save_and_show_where_they_are(polls: Polls) -> None:
    polls.start(1, "slow", nodes=2).signal(signal.SIGUSR1, "last command")
    wait_for(lambda: bool(polls.marks("seen1")[0].read_text()))
    polls.signal(signal.SIGQUIT, "last command")
    wait_for(lambda: all("in work" in polls.log(rank) for rank in range(2)))
    polls.signal(signal.SIGTERM, "last command")
    polls.stopped(signal.SIGTERM)
    assert [line.split()[0] for line in polls.seen()] == ["save", "stop"]


@pytest.mark.variants(1)
@pytest.mark.parametrize("whom", ["command", "last command"])
def test_two_commands_end_in_time(polls: Polls, whom: str) -> None:
    polls.start(1, "long", nodes=2, grace_seconds=2)
    wait_for(lambda: bool(polls.marks("long")))
    polls.signal(signal.SIGTERM, whom)
    ended = polls.finish()
    assert [done.code for done in ended] == [143, 143]
    assert ended[0].err == "interrupted by SIGTERM; step 5 saved: False\n"


def test_two_commands_leave_at_once_before_the_training(polls: Polls) -> None:
    polls.start(1, "builds", nodes=2).signal(signal.SIGHUP, "last command")
    assert [done.code for done in polls.finish()] == [129, 129]


# ------------------------------------------------------------------------------------------------------ at random
# moments


OTHERS: list[tuple[int, list[str]]] = [(1, []), (2, ["wishes"]), (4, [])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "how"),
    [(3, ["apart", "wishes"]), *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)],
    ids=str,
)
def test_the_ranks_never_part(polls: Polls, size: int, how: list[str]) -> None:
    count, seed = 50, random.randrange(1 << 30)
    process = polls.run("again", [str(polls.folder), size, how, count, seed])
    done = finish(process, polls.folder, 3 * PATIENCE)
    lines = done.out.splitlines()
    assert (done.code, len(lines)) == (0, count), (seed, done.err)
    for number, line in enumerate(lines):
        seen = [path.read_text().splitlines() for path in sorted((polls.folder / str(number)).glob("seen*"))]
        assert len(seen) == size
        assert all(one == seen[0] for one in seen), (seed, number, seen)
        assert seen[0][-1] == f"stop {line.split()[0]}", (seed, number, seen, line)
        assert line.endswith("True")


# ----------------------------------------------------------------------------------------------------------- the
# protocol


def test_the_step_is_the_first_that_no_rank_has_passed(stack: ExitStack) -> None:
    command = Command(stack, 0, 3)
    command.poll(1)
    command.ranks[1].poll(2)
    command.ranks[2].status.step = 2  # as a loop says before it polls
    command.want("save")
    command.advance()
    assert [command.ranks[0].poll(2), command.ranks[2].poll(2)] == [None, None]
    assert command.poll(3) == ["save"] * 3
    assert command.poll(4) == [None] * 3


def test_a_stop_takes_the_place_of_a_save_at_the_same_step(stack: ExitStack) -> None:
    command = Command(stack, 0, 2)
    command.poll(1)
    whats: list[What] = ["save", "stop", "save"]
    for what in whats:
        command.want(what)
        command.advance()
    assert command.poll(2) == ["stop"] * 2
    assert command.poll(3) == [None] * 2  # nothing follows a stop


def test_no_step_is_named_before_rank_zero_has_done_one(stack: ExitStack) -> None:
    command = Command(stack, 0, 2)
    command.want("save")
    command.advance()
    assert command.poll(1000) == [None, None]  # a start that resumes from step 999
    command.advance()
    assert command.poll(1001) == ["save"] * 2


def test_a_wish_is_followed_once(stack: ExitStack) -> None:
    command = Command(stack, 0, 2)
    first, second = command.ranks
    assert second.poll(1, save=True) is None
    command.advance()
    assert command.poll(1) == [None, None]
    assert first.poll(2, save=True) is None
    command.advance()
    assert first.poll(3, save=True) == "save"
    command.advance()
    assert second.poll(3) == "save"
    assert command.poll(4) == [None, None]


def test_a_step_that_has_passed_is_an_error_and_no_silence(stack: ExitStack) -> None:
    command = Command(stack, 0, 1)
    command.poll(5)
    page = command.decider.workers[0].page
    page.agreements.commit(1, 4, "save")
    page.agreements.begin(1)
    with refused("the ranks would diverge here", DdpexpError):
        command.poll(6)


def test_without_a_command_only_the_rank_itself_requests_something() -> None:
    control = Control.from_environ({})
    control.status.step = 3
    assert (control.poll(3), control.stop_requested, control.status.step) == (None, False, 3)
    assert [control.poll(3, save=True), control.poll(3, save=True, end=True)] == ["save", "end"]


@pytest.mark.parametrize("number", [signal.SIGUSR2, None], ids=["stop", "refusal"])
def test_a_signal_at_shutdown_does_not_change_how_a_job_has_ended(number: signal.Signals | None) -> None:
    end = RefusedError("no") if number is None else StoppedError(number, step=7, saved=True)
    last = StoppedError(signal.SIGTERM)
    last.__context__ = end
    assert first_end(last) is end
    assert first_end(end) is end
