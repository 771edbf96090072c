"""Watch workers from outside: show what they say, notice the first that fails, end the others, leave nothing behind."""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, Failure, RefusedError, StoppedError, WorkerError
from ddpexp.launch import WorkerRequest
from ddpexp.launch.rendezvous.meeting import Meeting, Peer
from ddpexp.launch.supervise.causes import (
    Heard,
    Worker,
    cause_of,
    failure_of,
    is_mismatch,
    keep,
    rank_causes,
    weight,
    with_places,
)
from ddpexp.launch.supervise.stacks import is_stack
from ddpexp.launch.supervise.stop_agreement import Agreement
from ddpexp.launch.supervise.watchdog import Watchdog
from ddpexp.launch.workers.client import check_answer
from ddpexp.launch.workers.control import SIGNALS, Lines
from ddpexp.system.oom import Memory
from ddpexp.system.process import exit_code, is_stopped
from ddpexp.system.terminal import Terminal

# After the first failure the others may still report theirs: a rank that was killed says nothing, and its peers' broken
# connections arrive first.
_FAILURE_SECONDS = 1.0
_LEAVE_SECONDS = 5.0  # from a stop request to SIGKILL where there is nothing to save
_REPEAT_SECONDS = 2.0  # a second signal sooner than this is the same one
_TAIL_SECONDS = 0.1
_HOLD_SECONDS = 0.3  # a warning of another rank waits this long for the same one of rank zero
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SIGNALS = (*_END_SIGNALS, signal.SIGUSR2)  # SIGUSR2: to go on later, in another start
_COMMAND, _ELSEWHERE = -1, 1 << 32  # sources of signals that are no rank; of another command its number is added
_FAREWELL_SECONDS = 10.0  # for the other commands' last words, when this one's workers have ended
_KILL_SECONDS = 2.0  # for the fork server to end its workers; one that does not is ended itself, and they with it
_LOADER_KILLED = "killed by signal: Killed"  # what torch says of a DataLoader worker


class Server(Protocol):
    """What starts workers on request and reports their ends."""

    channel: socket.socket
    memory: Memory
    pid: int

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer, or None when the server is gone."""
        ...

    def kill(self, signum: int, spared: int | None = None) -> None:
        """Send a signal to every living worker, but for the process `spared`."""
        ...

    def lost(self) -> tuple[str, int | None]:
        """Say how it ended, once it is gone, and by which signal."""
        ...

    def destroy(self) -> None:
        """End the server by force, and with it every worker."""
        ...


@dataclass
class _Other:
    """Another command of the job, as heard over the meeting."""

    peer: Peer
    lines: Lines


@dataclass
class _Got:
    """The signals that a worker gets itself."""

    worker: Worker


@dataclass
class _Watch:
    workers: Sequence[Worker]
    agreement: Agreement
    watchdog: Watchdog
    grace_seconds: float
    send: Callable[[Mapping[str, Any]], None]  # of the leading command to all others, of another one to the leading one
    others: Sequence[_Other] = ()  # those
    living: dict[int, Peer] = field(default_factory=dict)  # of them by number those that have not ended
    leads: bool = True
    speaks: bool = True  # somebody looks at this terminal who does not see the leading command's
    heard: list[Heard] = field(default_factory=list)
    passed_on: set[int] = field(default_factory=set)  # ranks whose failure the leading command has been told
    leader_lost: bool = False
    parted: bool = False  # the leading command has been told how this one ended, and may go
    failed_at: float | None = None
    stopped_by: int | None = None
    stopped_at: float = 0.0
    at_once: bool = False  # without saving: there is nothing to save
    began: int | None = None  # the step at which this start began
    since: dict[int, float] = field(default_factory=dict)  # when each of the signals that end nothing was last followed
    first_end: dict[int, float] = field(default_factory=dict)  # when the first signal to end was heard from each source
    killed_at: float | None = None
    said: set[str] = field(default_factory=set)  # warnings that were shown: every rank has the same ones
    held: dict[str, tuple[int, float]] = field(default_factory=dict)  # those that were not: which rank's, since when
    server_stopped_at: float | None = None  # when the fork server was first seen to be stopped


def supervise(
    server: Server,
    workers: Sequence[Worker],
    terminal: Terminal,
    meeting: Meeting | None,
    asked: WorkerRequest,
    on_gpus: bool = False,
) -> int:
    """Watch until every worker has ended; return the exit code of the run.

    Where several commands run the job, `meeting` connects them: a failure in one ends all, and the leading one tells
    why. A stop signal has the ranks save and leave within `request.grace_seconds`; a hang ends the run after
    `request.timeout`.

    Raises:
        WorkerError: the first genuine failure. RefusedError: the workers refused to start.
        StoppedError: a signal to this process, another command or a rank ended the run.
    """
    send = meeting.send if meeting is not None else lambda message: None
    agreement = Agreement([worker.status_page for worker in workers], send)
    leads = meeting is None or meeting.leads
    watchdog = Watchdog(workers, asked.timeout, leads, send, lambda: _dump(server, watch), server.pid, on_gpus)
    watch = _Watch(workers, agreement, watchdog, asked.grace_seconds, send)
    if meeting is not None:
        watch.leads, watch.speaks = meeting.leads, meeting.speaks
        watch.others = [_Other(peer, peer.lines()) for peer in meeting.peers]
        watch.living = {peer.index: peer for peer in meeting.peers}
    shown = next((worker for worker in workers if worker.rank == 0), None)
    with selectors.DefaultSelector() as selector, signals_as_bytes() as signals:
        selector.register(server.channel, selectors.EVENT_READ, "server")
        selector.register(signals, selectors.EVENT_READ, "signals")
        for worker in workers:
            selector.register(worker.control.channel, selectors.EVENT_READ, worker)
            selector.register(worker.signals, selectors.EVENT_READ, _Got(worker))
        for other in watch.others:
            selector.register(other.lines.channel, selectors.EVENT_READ, other)

        def look() -> None:
            for key, _ in selector.select(_TAIL_SECONDS):
                if key.data == "server":
                    if not _answer(server, watch, terminal):
                        selector.unregister(server.channel)
                elif key.data == "signals":
                    for number in signals.recv(64):
                        _take(server, watch, number, _COMMAND)
                elif isinstance(key.data, _Got):
                    numbers = key.data.worker.signals.recv(64)
                    for number in numbers:
                        _take_from(server, watch, number, key.data.worker)
                    if not numbers:
                        selector.unregister(key.data.worker.signals)
                elif isinstance(key.data, _Other):
                    if not _hear(key.data, server, watch):
                        selector.unregister(key.data.lines.channel)
                elif not _listen(key.data, watch, terminal):
                    selector.unregister(key.data.control.channel)
            if watch.leads:
                watch.agreement.advance(watch.living.keys())

        try:
            while any(worker.code is None for worker in workers):
                look()
                if shown is not None:
                    written = shown.log.size()  # what was said before that is in the channel now, and is shown first
                    _listen(shown, watch, terminal)
                    _show_output(shown, terminal, until=written, but=is_stack if watch.watchdog.writes_stacks else None)
                    _show_warnings(watch, terminal, held_since=time.monotonic() - _HOLD_SECONDS)
                _pass_on(watch)
                _do_without_server(server, watch, terminal)
                _end_hangs(server, watch)
                _end_in_time(server, watch)
            while _may_be_stopped(watch):
                look()
            for worker in workers:
                _listen(worker, watch, terminal)
            _pass_on(watch)
            if shown is not None:
                _show_warnings(watch, terminal, held_since=math.inf)
                _show_output(shown, terminal, last=True)
            for worker in workers:
                keep(worker)
            _part(watch, look)
        finally:
            terminal.close()
            for worker in workers:
                worker.control.channel.close()
                worker.signals.close()
    return _verdict(watch)


def _hear(other: _Other, server: Server, watch: _Watch) -> bool:
    """Take in what another command says; False when its connection is closed."""
    messages, open_ = other.lines.read()
    for message in messages:
        kind = message["kind"]
        if kind == "failed":
            watch.heard.append(Heard(Failure(**message["failure"]), message["weight"], time.monotonic()))
            watch.failed_at = watch.failed_at or time.monotonic()
        elif kind == "warning":
            _hold(watch, message["rank"], message["text"])
        elif kind == "done":
            _count_out(watch, other.peer.index)
        elif kind == "stopped":
            _count_out(watch, other.peer.index)
            if watch.stopped_by is None:
                _take(server, watch, message["signal"], other.peer.index + _ELSEWHERE)
        elif kind == "signal":
            _take(server, watch, message["signal"], other.peer.index + _ELSEWHERE, message["again"])
        elif kind == "leave":
            _stopped_by(watch, message["signal"])
            _leave(server, watch)
        elif kind == "stop":
            _stopped_by(watch, message["signal"])
        elif kind in ("begin", "bound", "settle"):
            watch.agreement.hear(message, other.peer.index)
        elif kind in ("silence", "look", "seen"):
            watch.watchdog.hear(message, other.peer.index)
        elif kind == "end":
            if message["signal"] is not None:
                _stopped_by(watch, message["signal"])
            if message["cause"] is not None:
                watch.heard.append(Heard(Failure(**message["cause"]), -1, time.monotonic()))
            _kill(server, watch)
    if not open_ and _count_out(watch, other.peer.index):
        now = time.monotonic()
        if watch.leads:
            rank, host = other.peer.first_rank, other.peer.host
            text = f"the command of rank {rank} on {host} is gone: it was killed, or its host is cut off"
            failure = Failure(rank=rank, host=host, kind="CommandLost", message=text)
            watch.heard.append(Heard(failure, 1, now))
            watch.failed_at = watch.failed_at or now
        else:
            watch.leader_lost = not watch.parted
            _kill(server, watch)
    return open_


def _count_out(watch: _Watch, number: int) -> bool:
    """Note that another command has ended; tell whether that is new."""
    watch.agreement.forget(number)
    return watch.living.pop(number, None) is not None


def _pass_on(watch: _Watch) -> None:
    """Tell the leading command of every failure here as soon as it is known."""
    if watch.leads:
        return
    [leader] = watch.others
    for worker in watch.workers:
        known = worker.failure is not None or (worker.code is not None and not worker.well)
        if known and not worker.ended and worker.rank not in watch.passed_on and not watch.at_once:
            watch.passed_on.add(worker.rank)
            cause = cause_of(worker)
            leader.peer.send({"kind": "failed", "failure": cause.as_dict(), "weight": weight(cause)})


def _part(watch: _Watch, look: Callable[[], None]) -> None:
    """Take leave of the other commands: the leading one hears how all ended, the others are heard before they go."""
    if not watch.others:
        return
    bad = watch.failed_at is not None or watch.stopped_by is not None
    if watch.leads:
        while watch.living and _may_hear_the_cause(watch):
            look()
        if bad:
            _end_others(watch)
        seconds = _FAREWELL_SECONDS
    else:
        watch.parted = True
        stopped = watch.stopped_by
        watch.others[0].peer.send({"kind": "done"} if stopped is None else {"kind": "stopped", "signal": stopped})
        seconds = (
            _FAREWELL_SECONDS if bad else 0.0
        )  # what started this command may end all others at once when it leaves
    deadline = time.monotonic() + seconds
    while watch.living and time.monotonic() < deadline:
        look()


def _may_be_stopped(watch: _Watch) -> bool:
    """Tell whether a stop signal has ended workers and may be on its way here: schedulers send it to every process."""
    if watch.stopped_by is not None or watch.failed_at is None or time.monotonic() - watch.failed_at > _FAILURE_SECONDS:
        return False
    causes = [cause_of(worker) for worker in watch.workers if not worker.well]
    causes += [heard.failure for heard in watch.heard]
    by_signal = [cause.signal in _STOP_SIGNALS for cause in causes]
    return any(by_signal) and all(
        stopped or weight(cause) > 1 for stopped, cause in zip(by_signal, causes, strict=True)
    )


def _may_hear_the_cause(watch: _Watch) -> bool:
    """Tell whether only consequences are known yet, and not for long."""
    if watch.failed_at is None or time.monotonic() - watch.failed_at > _FAILURE_SECONDS:
        return False
    causes = [cause_of(worker) for worker in watch.workers if not worker.well]
    return all(weight(cause) > 1 for cause in causes) and all(heard.weight > 1 for heard in watch.heard)


@contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """Turn the signals of the table in docs/launchers.md into bytes on a socket for the time of the watch."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)  # first, or a signal between is lost
    before = {}
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number not in _END_SIGNALS:  # nohup ignores SIGHUP
            before[number] = signal.signal(number, lambda *_: None)
    try:
        yield ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        ours.close()
        theirs.close()


def _answer(server: Server, watch: _Watch, terminal: Terminal) -> bool:
    """Take one answer of the server; False when it is gone, which takes every worker with it."""
    message = server.receive()
    if message is None:
        for worker in watch.workers:
            if worker.code is None:
                worker.code = -signal.SIGKILL
                if worker.failure is None and not worker.ended:
                    worker.failure = _server_lost(worker, server)
        return False
    check_answer(message)
    if message["kind"] == "started":
        next(worker for worker in watch.workers if worker.rank == message["rank"]).pid = message["pid"]
    elif message["kind"] == "failed":  # the server could not fork
        worker = next(worker for worker in watch.workers if worker.rank == message["rank"])
        worker.code, worker.failed_at = EXIT_FAILED, time.monotonic()
        worker.failure = replace(failure_of(worker, message["error"], message["message"]), traceback=None)
        watch.failed_at = watch.failed_at or worker.failed_at
    elif message["kind"] == "exit":
        worker = next(worker for worker in watch.workers if worker.pid == message["pid"])
        _take_end(worker, message["code"], server, watch, terminal)
    return True


def _take_end(worker: Worker, code: int, server: Server, watch: _Watch, terminal: Terminal) -> None:
    """Take in how a worker's process has ended."""
    if worker.code is not None:
        return  # seen before the server said so
    worker.code = code
    if worker.code == -signal.SIGKILL and not worker.ended:
        worker.killed_for = server.memory.verdict()
    _listen(worker, watch, terminal)  # its last words
    if worker.failure is not None and _LOADER_KILLED in worker.failure.message and (why := server.memory.verdict()):
        worker.failure = replace(worker.failure, message=f"{worker.failure.message} ({why})")
    if not worker.well:
        worker.failed_at = worker.failed_at or time.monotonic()
        watch.failed_at = watch.failed_at or worker.failed_at
        if is_mismatch(cause_of(worker)):
            _dump(server, watch)  # where the others are tells which one is wrong


def _listen(worker: Worker, watch: _Watch, terminal: Terminal) -> bool:
    messages, open_ = worker.control.read()
    for message in messages:
        kind = message.pop("kind")
        if kind == "progress":
            worker.step = message["done"]
            _show_output(worker, terminal, until=message["after"])
            terminal.progress(message)
        elif kind == "began":
            watch.began, worker.trains = message["step"], True
        elif kind == "warning" and worker.rank == 0:  # it stands in rank zero's output, which is shown
            watch.said.add(message["text"])
            watch.held.pop(message["text"], None)
        elif kind == "warning":
            _hold(watch, worker.rank, message["text"])
        elif kind == "error":
            kind, step = message.pop("error"), message.pop("step")
            worker.failure = Failure(rank=worker.rank, kind=kind, step=step, phase=worker.status_page.phase, **message)
            worker.failed_at = time.monotonic()
            watch.failed_at = watch.failed_at or worker.failed_at
        elif kind == "done":
            worker.done = True
        elif kind == "stopped":
            worker.stopped, worker.step = watch.stopped_by is not None, message["step"]
    return open_


def _hold(watch: _Watch, rank: int, text: str) -> None:
    """Keep another rank's warning until rank zero has had the time to give the same; the leading command shows them."""
    if watch.leads:
        if text not in watch.said:
            watch.held.setdefault(text, (rank, time.monotonic()))
    elif text not in watch.said:
        watch.said.add(text)
        watch.others[0].peer.send({"kind": "warning", "rank": rank, "text": text})


def _show_output(
    worker: Worker,
    terminal: Terminal,
    last: bool = False,
    until: float = math.inf,
    but: Callable[[str], bool] | None = None,
) -> None:
    for line in worker.log.new_lines(last, until):
        if but is None or not but(line):
            terminal.line(line)


def _show_warnings(watch: _Watch, terminal: Terminal, held_since: float) -> None:
    """Show the other ranks' warnings that rank zero has not given meanwhile, with the rank that gave each first."""
    for text, (rank, since) in list(watch.held.items()):
        if since <= held_since:
            terminal.line(f"[rank {rank}] {text}")
            watch.said.add(text)
            del watch.held[text]


def _take_from(server: Server, watch: _Watch, number: int, worker: Worker) -> None:
    """Take a signal that a rank has passed on, unless it has it from here."""
    if number == signal.SIGQUIT and worker.dumps:
        worker.dumps -= 1
    elif number in SIGNALS and not watch.at_once:
        _take(server, watch, number, worker.rank)


def _take(server: Server, watch: _Watch, number: int, source: int, again: bool = False) -> None:
    """Do what a signal asks for, whichever of the job's processes got it.

    `source` is a rank, or one of the names below.

    Schedulers signal all processes at once, some of them after a while, and some commands pass on what they get: from
    each source the first is the same as the others'. `again`: another command tells of a second one.
    """
    now = time.monotonic()
    if number in (signal.SIGUSR1, signal.SIGQUIT):
        if now - watch.since.get(number, -math.inf) > _REPEAT_SECONDS:
            watch.since[number] = now
            _save(watch) if number == signal.SIGUSR1 else _dump_all(server, watch, source)
        return
    if number in _END_SIGNALS:
        again = again or now - watch.first_end.setdefault(source, now) > _REPEAT_SECONDS
    if watch.stopped_by is not None and again:
        _tell_leader(watch, number, again)
        _kill(server, watch)
    elif watch.stopped_by is None or (watch.stopped_by == signal.SIGUSR2 != number and not watch.parted):
        anew = watch.stopped_by is not None  # such as the end of a job that was to go on later
        _stopped_by(watch, number)
        _tell_leader(watch, number)
        if watch.leads and (anew or _trains(watch)):
            _tell_others(watch, {"kind": "stop", "signal": number})
            watch.agreement.want("stop")
        elif watch.leads:
            _tell_others(watch, {"kind": "leave", "signal": number})
            _leave(server, watch)


def _stopped_by(watch: _Watch, number: int) -> None:
    watch.stopped_at = watch.stopped_at if watch.stopped_by is not None else time.monotonic()
    watch.stopped_by = number
    for worker in watch.workers:
        worker.status_page.stop(number)


def _leave(server: Server, watch: _Watch) -> None:
    """End the workers, which have nothing to save yet."""
    watch.at_once = True
    for worker in watch.workers:
        worker.status_page.leave()
    server.kill(signal.SIGTERM)


def _trains(watch: _Watch) -> bool:
    """Tell whether the training has begun, as rank zero says: before there is nothing to save."""
    first = watch.workers[0]
    return first.rank == 0 and (first.trains or first.status_page.step is not None)


def _save(watch: _Watch) -> None:
    """Have all ranks save and go on."""
    _tell_leader(watch, signal.SIGUSR1)
    if watch.leads and _trains(watch):
        watch.agreement.want("save")


def _dump(server: Server, watch: _Watch, source: int = _COMMAND) -> None:
    """Have all ranks of this command write where they are; the one that got the signal itself has done so."""
    for worker in watch.workers:
        worker.dumps += worker.rank != source
    server.kill(signal.SIGQUIT, next((worker.pid for worker in watch.workers if worker.rank == source), None))


def _dump_all(server: Server, watch: _Watch, source: int) -> None:
    _dump(server, watch, source)
    _tell_leader(watch, signal.SIGQUIT)
    _tell_others(watch, {"kind": "signal", "signal": int(signal.SIGQUIT), "again": False})


def _tell_leader(watch: _Watch, number: int, again: bool = False) -> None:
    if not watch.leads:
        watch.others[0].peer.send({"kind": "signal", "signal": number, "again": again})


def _tell_others(watch: _Watch, message: dict[str, Any]) -> None:
    if watch.leads:
        watch.send(message)


def _end_in_time(server: Server, watch: _Watch) -> None:
    now = time.monotonic()
    asked = watch.at_once and (watch.failed_at or now) >= watch.stopped_at  # to end, which is no failure then
    failed = watch.failed_at is not None and not asked and now - watch.failed_at > _FAILURE_SECONDS
    grace = min(_LEAVE_SECONDS, watch.grace_seconds) if watch.at_once else watch.grace_seconds
    if failed or (watch.stopped_by is not None and now - watch.stopped_at > grace):
        _kill(server, watch)
    if watch.killed_at is not None and now - watch.killed_at > _KILL_SECONDS:
        server.destroy()


def _do_without_server(server: Server, watch: _Watch, terminal: Terminal) -> None:
    """See for oneself which ranks have ended while the fork server, which reports it otherwise, is stopped.

    And warn of that.

    Ranks that train need no server. One that hangs meanwhile is the watchdog's.
    """
    if not is_stopped(server.pid):
        watch.server_stopped_at = None
        return
    now = time.monotonic()
    watch.server_stopped_at = watch.server_stopped_at or now
    for worker in watch.workers:
        if worker.pid is not None and (code := exit_code(worker.pid)) is not None:
            _take_end(worker, code, server, watch, terminal)
    text = (
        f"ddpexp: warning: the fork server, process {server.pid}, is stopped (by SIGSTOP or a debugger). The ranks "
        "train without "
        f"it; `kill -CONT {server.pid}` continues it."
    )
    if now - watch.server_stopped_at > watch.watchdog.timeout.step_seconds and text not in watch.said:
        watch.said.add(text)
        terminal.line(text)


def _end_hangs(server: Server, watch: _Watch) -> None:
    """End the run when a rank holds the others up for too long. A stop, or a failure, has a time of its own."""
    if watch.stopped_by is not None or watch.failed_at is not None or watch.killed_at is not None:
        return
    cause = watch.watchdog.look(watch.living)
    if cause is not None:
        watch.failed_at = time.monotonic()
        for number in watch.watchdog.absent:
            _count_out(watch, number)  # nobody waits for its farewell
        watch.heard.append(Heard(cause, 0, watch.failed_at))
        _kill(server, watch)
    elif watch.watchdog.leader_is_silent:
        watch.failed_at, watch.leader_lost = time.monotonic(), True
        watch.living.clear()
        _kill(server, watch)


def _kill(server: Server, watch: _Watch) -> None:
    """End the workers that are left, because of another's failure or of a stop that they did not follow in time."""
    if watch.killed_at is not None:
        return
    for worker in watch.workers:
        worker.ended = worker.code is None
    server.kill(signal.SIGKILL)
    watch.killed_at = time.monotonic()
    _end_others(watch)


def _end_others(watch: _Watch) -> None:
    """Have the other commands end their workers, and tell them why: the first cause is everybody's."""
    known = rank_causes(watch.workers, watch.heard, watch.at_once)
    cause = known[0].as_dict() if known and _failed(watch) else None
    _tell_others(watch, {"kind": "end", "cause": cause, "signal": watch.stopped_by})


def _failed(watch: _Watch) -> bool:
    """Tell whether what is known of ended ranks is a failure, and not a stop.

    A rank that the same signal has ended did not fail: schedulers send it to every process. Nor did one that had
    nothing to save and was to leave, once it was asked to.
    """
    if watch.stopped_by is None:
        return True
    bad = [worker for worker in watch.workers if (worker.failure or worker.code is not None) and not worker.well]
    known = [(worker.failed_at, cause_of(worker)) for worker in bad if not worker.ended]
    known += [(heard.at, heard.failure) for heard in watch.heard]
    causes = [cause for at, cause in known if not watch.at_once or 0 < at < watch.stopped_at]
    by_signal = any(cause.signal in _STOP_SIGNALS for cause in causes)
    weights = [weight(cause) for cause in causes if cause.signal not in _STOP_SIGNALS]
    return any(weight < 2 or (weight == 2 and not by_signal and not watch.at_once) for weight in weights)


def _verdict(watch: _Watch) -> int:
    asked = any(worker.stopped for worker in watch.workers)
    if all(worker.well for worker in watch.workers) and not watch.heard and not asked:
        return EXIT_DONE  # a signal that came when all was done changes nothing
    if watch.stopped_by is not None and not _failed(watch) and not (watch.leader_lost and not watch.at_once):
        raise _stopped(watch)
    failures = rank_causes(watch.workers, watch.heard, watch.at_once)
    if watch.leader_lost:
        host = watch.others[0].peer.host
        text = f"the command of rank zero on {host} is gone: it was killed or stopped, or its host is cut off"
        failures.insert(0, Failure(rank=0, host=host, kind="CommandLost", message=text))
    first = with_places(failures[0], watch.workers) if is_mismatch(failures[0]) else failures[0]
    others = tuple(sorted({failure.rank for failure in failures} - {first.rank}))
    if first.exit_code == EXIT_REFUSED and first.traceback is None:
        raise RefusedError(first.message)
    shown = first.rank == 0 and any(worker.rank == 0 and worker.failure is None for worker in watch.workers)
    told = not watch.leads and not watch.leader_lost
    raise WorkerError(
        first, others, shown, leader=watch.others[0].peer.host if told else None, quiet=told and not watch.speaks
    )


def _stopped(watch: _Watch) -> StoppedError:
    """Return how far the run is, which rank zero knows: it is the one that saves."""
    assert watch.stopped_by is not None
    first = next((worker for worker in watch.workers if worker.rank == 0), None)
    if first is None or watch.at_once:
        return StoppedError(watch.stopped_by)
    step = first.step if first.stopped else first.last_step
    return StoppedError(watch.stopped_by, step=step, saved=first.stopped, began=watch.began)


def _server_lost(worker: Worker, server: Server) -> Failure:
    text, signum = server.lost()
    return replace(failure_of(worker, "ServerLost", text, signum), traceback=None)
