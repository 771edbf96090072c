"""A model of a job of several commands with one rank each: what can happen to it next, and how it ends.

Commands are states for `decide`; links keep the order of messages; a rank is what its process can still do. A `World`
is a value, so that a search visits each once.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, Failure
from ddpexp.launch.supervise import events, messages
from ddpexp.launch.supervise.decide import decide
from ddpexp.launch.supervise.state import Rank, Stage, State
from ddpexp.launch.supervise.verdict import Verdict, verdict_on

STOPPED = 128 + signal.SIGTERM
GRACE_SECONDS = 4.0
TICK_SECONDS = 1.25
LONGEST_SECONDS = GRACE_SECONDS + 20.0  # a stop is followed, or ranks are killed, and the other commands are waited for


def failure(rank: int, kind: str, **fields: Any) -> Failure:
    return Failure(rank=rank, host=f"node{rank}", kind=kind, message="", phase="train", **fields)


DEATH = {"kind": "SIGKILL", "signal": signal.SIGKILL}
BY_TERM = {"kind": "SIGTERM", "signal": signal.SIGTERM}


@dataclass(frozen=True)
class Process:
    """A rank's process."""

    lives: bool = True
    is_killed: bool = False  # SIGKILL has been sent
    is_dismissed: bool = False  # SIGTERM has been sent, and it is to exit at once
    has_errored: bool = False  # an error is reported, and the exit comes next
    waits: bool = False  # at a step boundary, for the step of an agreement
    stops: bool = False  # the step at which all stop is known to it
    is_sound: bool = True  # the process has neither died nor failed


@dataclass(frozen=True)
class World:
    """The job at a moment."""

    commands: tuple[State | None, ...]  # None: killed
    processes: tuple[Process, ...]
    mail: tuple[tuple[tuple[Any, ...], ...], ...]  # by sender, by receiver; None for the end of a connection
    now: float = 1.0
    is_trained: bool = False  # the last step is done: ranks end by themselves
    happened: frozenset[str] = frozenset()

    @classmethod
    def new(cls, size: int, has_begun: bool = True) -> World:
        """Return a job whose ranks train, or build their models."""
        commands = tuple(
            State(
                (Rank(rank),),
                first_rank=rank,
                grace_seconds=GRACE_SECONDS,
                leader_host=None if rank == 0 else "node0",
                others=frozenset(range(1, size)) if rank == 0 else frozenset([0]),
                rank_zero_trains=rank == 0 and has_begun,
                rank_zero_has_stepped=rank == 0 and has_begun,
            )
            for rank in range(size)
        )
        return cls(commands, (Process(),) * size, (((),) * size,) * size)

    @property
    def is_over(self) -> bool:
        return all(state is None or state.stage is Stage.OVER for state in self.commands)

    def verdicts(self) -> list[Verdict | None]:
        """Return how the run has ended for each command that lives."""
        return [None if state is None else verdict_on(state) for state in self.commands]


class Change:
    """A world that changes."""

    def __init__(self, world: World) -> None:
        self.world = world

    def set(self, **fields: Any) -> None:
        self.world = replace(self.world, **fields)

    def set_process(self, rank: int, **fields: Any) -> None:
        before = self.world.processes
        self.set(processes=(*before[:rank], replace(before[rank], **fields), *before[rank + 1 :]))

    def take(self, command: int, event: events.Event) -> None:
        """Have a command decide, and perform its actions."""
        waiting = deque([event])
        while waiting:
            state = self.world.commands[command]
            if state is None or state.stage is Stage.OVER:
                return
            state, actions = decide(state, waiting.popleft(), self.world.now)
            commands = self.world.commands
            self.set(commands=(*commands[:command], state, *commands[command + 1 :]))
            for action in actions:
                if isinstance(action, events.Send):
                    self.send(command, action.message)
                elif isinstance(action, events.BeginBoundary):
                    # The training's last boundary is the second one, at which nobody asks for an agreement.
                    self.set_process(command, waits=not self.world.is_trained)
                    waiting.append(events.BoundRead(action.number, 2 if self.world.is_trained else 1))
                elif isinstance(action, events.CommitBoundary):
                    committed = action.committed
                    self.set_process(command, waits=False, stops=committed.what == "stop" and committed.step == 1)
                elif isinstance(action, events.DismissRanks):
                    self.set_process(command, is_dismissed=True)
                elif isinstance(action, events.KillRanks | events.KillServer):
                    self.set_process(command, is_killed=True)
            if state.stage is Stage.OVER:
                self.send(command, None)

    def send(self, sender: int, message: messages.PeerMessage | None) -> None:
        links = [list(row) for row in self.world.mail]
        for receiver in range(1, len(links)) if sender == 0 else [0]:
            links[sender][receiver] = (*links[sender][receiver], message)
        self.set(mail=tuple(tuple(row) for row in links))

    def deliver(self, sender: int, receiver: int) -> None:
        """Deliver a link's first message."""
        links = [list(row) for row in self.world.mail]
        message, *rest = links[sender][receiver]
        links[sender][receiver] = tuple(rest)
        self.set(mail=tuple(tuple(row) for row in links))
        if message is None:
            lost = events.CommandLost(sender, failure(sender, "CommandLost"))
            self.take(receiver, lost)
        else:
            self.take(receiver, events.FromCommand(sender, message))

    def exit(self, rank: int, code: int, kind: dict[str, Any] | None = None, is_sound: bool = True) -> None:
        self.set_process(rank, lives=False, is_sound=self.world.processes[rank].is_sound and is_sound)
        self.take(rank, events.RankExited(rank, code, failure(rank, **(kind or {"kind": "SystemExit"}))))

    def react(self, rank: int) -> None:
        """Have a process do what it does next, see `may_react`."""
        process = self.world.processes[rank]
        if process.is_killed:
            self.exit(rank, -signal.SIGKILL, DEATH, is_sound=False)
        elif process.has_errored:
            self.exit(rank, EXIT_FAILED, is_sound=False)
        elif process.is_dismissed:
            self.exit(rank, STOPPED, BY_TERM, is_sound=False)
        elif not all(other.is_sound for other in self.world.processes):
            self.set_process(rank, has_errored=True, is_sound=False)
            self.take(rank, events.RankErrored(rank, failure(rank, "PeerError", exit_code=EXIT_FAILED)))
        elif process.stops:
            self.take(rank, events.FromRank(rank, messages.WorkerStopped(1)))
            self.exit(rank, STOPPED)
        else:
            self.take(rank, events.FromRank(rank, messages.WorkerDone()))
            self.exit(rank, EXIT_DONE)


def may_react(world: World, rank: int, notices: bool = True) -> bool:
    """Return whether a process does something by itself now; `notices`: that a connection to another one is broken."""
    process, everyone = world.processes[rank], world.processes
    if not process.lives:
        return False
    if process.is_killed or process.is_dismissed or process.has_errored:
        return True
    if not all(other.is_sound for other in everyone):
        return notices
    if process.waits:
        return False
    # The last step that all do together needs all of them.
    return world.is_trained or (process.stops and all(other.stops or not other.lives for other in everyone))


def steps(world: World) -> Iterator[World]:
    """Yield each world that the delivery of one message, or the next action of one process, leads to."""
    for sender, row in enumerate(world.mail):
        for receiver, waiting in enumerate(row):
            if waiting:
                change = Change(world)
                change.deliver(sender, receiver)
                yield change.world
    for rank in range(len(world.processes)):
        if may_react(world, rank):
            change = Change(world)
            change.react(rank)
            yield change.world


def incidents(world: World, names: Iterable[str]) -> Iterator[World]:
    """Yield the worlds in which something happens to the job, each thing once."""
    for name in names:
        for number in range(len(world.commands)):
            label = f"{name} {number}"
            if label not in world.happened:
                now = round(world.now + 0.01, 2)
                change = Change(replace(world, now=now, happened=world.happened | {label}))
                if _happens(change, name, number):
                    yield change.world


INCIDENTS = (
    "die",  # SIGKILL to a rank
    "fail",  # a rank's own error
    "train",  # the last step is done
    "command",  # SIGTERM to a command
    "rank",  # SIGTERM to a rank, which forwards it
    "requeue",  # SIGUSR2 to a command
    "save",  # SIGUSR1 to a command
    "scheduler",  # SIGTERM ends a rank that cannot forward it
    "hang",  # the watchdog names a rank
    "silence",  # the leading command does not answer
    "kill",  # SIGKILL to a command
    "later",  # time passes in which nothing arrives
)


def may_finish(world: World) -> bool:
    """Return whether the ranks can do the last step."""
    return all(
        process.is_sound and not process.waits and not process.stops and not process.is_dismissed
        for process in world.processes
    )


def _happens(change: Change, name: str, number: int) -> bool:
    """Have something happen to a command or its rank; return whether it can."""
    world = change.world
    state, process = world.commands[number], world.processes[number]
    alive = process.lives and not process.has_errored and not process.is_killed
    if name == "train":
        if number == 0 and may_finish(world):
            change.set(is_trained=True)
            return True
        return False
    if name == "later":
        if number == 0:
            wait(change, 3.0)
        return number == 0
    if state is None or state.stage is Stage.OVER:
        return False
    if name == "kill":
        kill(change, number)
    elif name in ("command", "requeue", "save"):
        signum = {"command": signal.SIGTERM, "requeue": signal.SIGUSR2, "save": signal.SIGUSR1}[name]
        change.take(number, events.Signalled(signum, events.COMMAND))
    elif name == "silence":
        if number == 0 or state.is_ending or state.stage is not Stage.WATCHING:
            return False
        change.take(number, events.LeaderSilent())
    elif name == "hang":
        leader = world.commands[0]
        if leader is None or leader.is_ending or leader.stage is not Stage.WATCHING or not alive:
            return False
        change.take(0, events.HangFound(failure(number, "Hang")))
    elif not alive:
        return False
    elif name == "die":
        change.exit(number, -signal.SIGKILL, DEATH, is_sound=False)
    elif name == "scheduler":
        change.exit(number, STOPPED, BY_TERM, is_sound=False)
    elif name == "rank":
        change.take(number, events.Signalled(signal.SIGTERM, number))
    elif name == "fail":
        change.set_process(number, has_errored=True, is_sound=False)
        change.take(number, events.RankErrored(number, failure(number, "ValueError", exit_code=EXIT_FAILED)))
    return True


def kill(change: Change, number: int) -> None:
    """Kill a command; its ranks die with it."""
    commands = change.world.commands
    change.set(commands=(*commands[:number], None, *commands[number + 1 :]))
    process = change.world.processes[number]
    change.set_process(number, lives=False, is_sound=process.is_sound and not process.lives)
    change.send(number, None)


def wait(change: Change, seconds: float) -> None:
    change.set(now=change.world.now + seconds)
    for number in range(len(change.world.commands)):
        change.take(number, events.Tick())


def settled(world: World, notices: bool = True) -> World:
    """Return the world after every message has arrived, and every process has gone as far as it can."""
    change = Change(world)
    moved = True
    while moved:
        moved = False
        for sender, row in enumerate(change.world.mail):
            for receiver in range(len(row)):
                while change.world.mail[sender][receiver]:
                    change.deliver(sender, receiver)
                    moved = True
        for rank in range(len(change.world.processes)):
            if may_react(change.world, rank, notices):
                change.react(rank)
                moved = True
    return change.world


def end_of(world: World, notices: bool = True) -> World:
    """Return the world when nothing more happens to it, and everything takes its course.

    `notices`: ranks whose peers are gone notice it; else they wait until they are killed.
    """
    until = world.now + LONGEST_SECONDS
    while not world.is_over and world.now < until:
        change = Change(settled(world, notices))
        wait(change, TICK_SECONDS)
        if all(state is None or not state.is_ending for state in change.world.commands) and may_finish(change.world):
            change.set(is_trained=True)
        world = change.world
    return world
