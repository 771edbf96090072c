"""The commands `ddpexp profile`, `stacks`, `save` and `stop`: they ask something of a run that is running."""

from __future__ import annotations

import os
import platform
import pwd
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ddpexp.checkpoint.format import folder_name, is_checkpoint
from ddpexp.cli.status import resume_command, since
from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, DdpexpError, RefusedError, StoppedError
from ddpexp.launch import requests
from ddpexp.launch.requests import Answer, Kind, Request
from ddpexp.launch.supervise.stacks import Stack, shown, threads
from ddpexp.launch.workers.rank_log import Log
from ddpexp.run import lock
from ddpexp.run.directory import RunDir
from ddpexp.settings.key import Key
from ddpexp.settings.profile import MOST_STEPS, StepWindow
from ddpexp.sweep.arguments import sweeps_and_runs
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.job_status import STATUSES
from ddpexp.sweep.rows import Row, rows_of
from ddpexp.system import files
from ddpexp.system.terminal import print_json, print_message, show
from ddpexp.system.text import counted, first_few, one_line

_ANSWER_SECONDS = 90.0  # for the run to see a request: some network file systems show new files after a minute
_FOLDER_SECONDS = 20.0  # for a start to come to its workers
_WORK_SECONDS = 3600.0  # for what it then does
_STACK_SECONDS = 5.0
_NOTICE_SECONDS = 2.0  # after which a wait is said
_POLL_SECONDS = 0.1
_OF_LAUNCH = re.compile(r"/ddpexp/(launch|system)/|^<string>$")  # of every rank's stack, below its own work
_LOOK_SECONDS = 1.0  # from one look at the run's own status to the next
_SCHEDULER_SECONDS = 20.0  # the same, where a scheduler knows it


@dataclass(frozen=True)
class _Options:
    steps: Annotated[int, Key(at_least=1, at_most=MOST_STEPS)] = 10


def profile(call: Call) -> int:
    """Have a running run profile its next steps, and wait for the traces."""
    with _asked(call) as waiting:
        begin = waiting.until("agreed").step
        waiting.say(f"the run profiles {counted(waiting.request.steps, 'step')} after step {begin}")
        answer = waiting.until("done")
    assert answer.step is not None
    assert answer.end is not None
    if answer.missing == waiting.run.layout().world_size:
        raise DdpexpError("No rank could write its profile", place=waiting.run.path, suggestion="See the run's output.")
    folder, window = waiting.run.profile(answer.step), StepWindow(answer.step, answer.end)
    if call.as_json:
        print_json({"directory": str(folder.absolute()), **window._asdict(), "missing": answer.missing})
        return EXIT_DONE
    lacks = f" (without {answer.missing} ranks: see the run's output)" if answer.missing else ""
    show(f"profile of {window}: {files.typed(folder)}{lacks}")
    show("Open rank0.trace.json.gz at https://ui.perfetto.dev or chrome://tracing.")
    show("rank0.operators.txt lists the operators that took most.")
    return EXIT_DONE


def save(call: Call) -> int:
    """Have a running run save a checkpoint and continue."""
    with _asked(call) as waiting:
        step = waiting.until("done").step
        assert step is not None
        folder = waiting.run.checkpoints / folder_name(step)
        waiting.say(f"the run saves after step {step}")
        waiting.for_(lambda: is_checkpoint(folder), f"the run has not saved step {step}")
    if call.as_json:
        print_json({"step": step, "directory": str(folder.absolute())})
    else:
        show(f"saved step {step}: {files.typed(folder)}. The run continues.")
    return EXIT_DONE


def stop(call: Call) -> int:
    """Have a running run save and end, as on a signal."""
    with _asked(call) as waiting:
        step = waiting.until("agreed", "done").step
        waiting.say("the run ends" if step is None else f"the run saves after step {step}, and ends")
        waiting.for_end()
    [row] = rows_of(waiting.run.path)
    resume = resume_command(row)
    if call.as_json:
        print_json({"status": row.status, "step": row.step, "resume": resume or None})
        return EXIT_DONE
    show(f"{row.status}: {STATUSES[row.status]}{'' if row.step is None else f' (step {row.step})'}")
    if resume:
        show(f"resume: {one_line(resume)}")
    return EXIT_DONE


def stacks(call: Call) -> int:
    """Show where every rank of a running run is."""
    waiting = _Waiting(_running(call), request_of(call))
    run = waiting.run
    logs = {int(path.stem): Log.reading(path) for path in run.ranks.glob("*.log") if path.stem.isdecimal()}
    sizes = {rank: log.size() for rank, log in logs.items()}
    with waiting.asked():
        waiting.until("done")
    deadline = time.monotonic() + _STACK_SECONDS
    while (found := {rank: _stacks_in(log.text(sizes[rank])) for rank, log in logs.items()}) and not all(
        found.values()
    ):
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    world_size = run.layout().world_size
    of_ranks = {rank: found.get(rank) or [] for rank in range(world_size)}
    if call.as_json:
        print_json({"ranks": [{"rank": rank, "threads": _as_lists(all_)} for rank, all_ in of_ranks.items()]})
    else:
        show("\n".join(_lines(of_ranks, run)))
    return EXIT_DONE


def _asked(call: Call) -> AbstractContextManager[_Waiting]:
    request = request_of(call)
    return _Waiting(_running(call), request).asked()


def request_of(call: Call) -> Request:
    """Return what a command asks.

    Raises:
        RefusedError: it names no run or several, or a number of steps that cannot be.
    """
    if len(call.operands) != 1:
        reason = "takes one directory, of a running run"
        raise RefusedError(reason, place=call.name, suggestion=f"Type ddpexp {call.name} RUN_DIR.")
    numbers = {name: text for name, text in call.options.items() if name == "--steps"}
    steps = replace(call, options=numbers).typed(_Options()).steps
    kind: Kind = call.name  # type: ignore[assignment]
    return Request(kind, steps)


def _running(call: Call) -> RunDir:
    """Return the running run that a command names.

    Raises:
        RefusedError: there is none, it does not run, or it is somebody else's.
    """
    place = Path(call.operands[0])
    paths = sweeps_and_runs(place)
    if paths != [place] or SweepDir(place).is_sweep():
        rows = [row for path in paths for row in rows_of(path) if row.status == "running"]
        names = first_few([files.typed(row.path) for row in rows])
        suggestion = f"Name one of its runs that are running: {names}." if rows else "None of its runs is running."
        raise RefusedError("holds several runs", place=place, suggestion=suggestion)
    [row] = rows_of(place)
    if row.status != "running":
        raise _not_running(row)
    owner = place.stat().st_uid
    if os.geteuid() not in (0, owner):
        reason = f"belongs to {_user(owner)}, who alone can ask something of this run"
        raise RefusedError(reason, place=place)
    return RunDir(place)


def _not_running(row: Row) -> RefusedError:
    moment = since(row)
    what = f"does not run: it is {row.status} ({STATUSES[row.status]}){f', since {moment}' if moment else ''}"
    resume = resume_command(row)
    return RefusedError(what, place=row.path, suggestion=f"Resume it with: {resume}" if resume else "")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


@dataclass
class _Waiting:
    """A request, and the wait for what the run does about it."""

    run: RunDir
    request: Request
    began: float = field(default_factory=time.monotonic)
    said: str = ""

    @property
    def path(self) -> Path:
        """The file of the request."""
        return self.run.requests / self._name

    def __post_init__(self) -> None:
        """Choose a name that nobody else chooses."""
        self._name = f"{secrets.token_hex(8)}.json"
        self._looked_at = self._asked_at = time.monotonic()
        self._over = False

    @contextmanager
    def asked(self) -> Iterator[_Waiting]:
        """Write the request; its file is gone when this is over, whatever happens."""
        refusal = "takes no requests: an older version of ddpexp has started it, or its workers have not started yet"
        self._until(self._takes_requests, _FOLDER_SECONDS, "the workers of the run have not started yet", refusal)
        try:
            requests.write(self.path, self.request)
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            raise RefusedError(reason, place=self.run.requests) from None
        try:
            yield self
        except StoppedError:
            self.say("the request is withdrawn, unless the run has begun to follow it")
            raise
        finally:
            with suppress(OSError):
                self.path.unlink()
            if self._is_over():
                with suppress(OSError):
                    self.run.requests.rmdir()

    def until(self, *states: requests.State) -> Answer:
        """Wait until the run has come so far.

        Raises:
            DdpexpError: it has ended before, or does not answer.
        """
        found: list[Answer] = []

        def has_come() -> bool:
            answer = self._answer()
            if answer is not None and answer.state == "waits":
                self.began = time.monotonic()  # it has answered
                self._say_late("the run has not begun to train: it follows after its first step")
            if answer is not None and answer.state == "ended":
                raise self._ended()
            if answer is not None and answer.state in (*states, "done"):
                found.append(answer)
            return bool(found)

        if self._answer() is None:
            seconds, notice = _ANSWER_SECONDS, "the run has not answered yet"
            silence = f"has not answered for {seconds:.0f} s: its command, or its host, is stopped or cut off"
        else:
            seconds, notice, silence = _WORK_SECONDS, self._where, "has not done it within an hour"
        self._until(has_come, seconds, notice, silence)
        return found[0]

    def for_(self, happens: Callable[[], bool], silence: str) -> None:
        """Wait for something that the run does."""
        self._until(happens, _WORK_SECONDS, self._where, silence)

    def for_end(self) -> None:
        """Wait until the run has ended."""

        def has_ended() -> bool:
            return self._over or lock.read(self.run.path / lock.NAME) is None

        self._until(has_ended, _WORK_SECONDS, self._where, "has not ended within an hour")

    @property
    def _where(self) -> str:
        return f"waiting for it; ddpexp stacks {files.typed(self.run.path)} shows where the ranks are"

    def say(self, text: str) -> None:
        """Say how far it is, once."""
        if text and text != self.said:
            print_message(f"ddpexp: {text}")
            self.said = text

    def _say_late(self, text: str) -> None:
        if time.monotonic() - self.began > _NOTICE_SECONDS:
            self.say(text)

    def _takes_requests(self) -> bool:
        try:
            return self.run.requests.is_dir() and not self.run.requests.is_symlink()
        except OSError:
            return False

    def _answer(self) -> Answer | None:
        with suppress(ValueError):
            return requests.read(self.path, self.run.path.stat().st_uid)[1]  # root may ask other users' runs
        return None

    def _until(self, happens: Callable[[], bool], seconds: float, notice: str, silence: str) -> None:
        self.began = time.monotonic()
        while True:
            try:
                if happens():
                    return
            except FileNotFoundError:
                raise self._ended() from None
            now = time.monotonic()
            if now - self._looked_at > _LOOK_SECONDS:
                self._looked_at = now
                if self._is_over():
                    if happens():  # it was its last action
                        return
                    raise self._ended()
            self._say_late(notice)
            if now - self.began > seconds:
                raise DdpexpError(silence, place=self.run.path, suggestion="See ddpexp status, and the run's output.")
            time.sleep(_POLL_SECONDS)

    def _is_over(self) -> bool:
        """Look whether the run has ended; its lock says so, unless it was killed."""
        owner = lock.read(self.run.path / lock.NAME)
        now = time.monotonic()
        if owner is None:
            self._over = True
        elif owner.host == platform.node() or now - self._asked_at > _SCHEDULER_SECONDS:
            self._asked_at = now
            self._over = owner.is_alive() is False
        return self._over

    def _ended(self) -> DdpexpError:
        [row] = rows_of(self.run.path)
        again = "it has been started again" if row.status == "running" else f"it is {row.status}"
        return DdpexpError(f"The run ended before it did this: {again}", place=self.run.path)


def _stacks_in(text: str) -> list[Stack]:
    """Return the stacks of the threads in what a rank has written, the main thread's last; none if it is not whole."""
    return threads(text) if text.endswith("\n") else []


def _as_lists(stacks: list[Stack]) -> list[list[Mapping[str, Any]]]:
    return [[vars(frame) for frame in stack] for stack in stacks]


def _lines(of_ranks: Mapping[int, list[Stack]], run: RunDir) -> Iterator[str]:
    """Yield the stacks of the main threads; ranks with the same one together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, stacks in of_ranks.items():
        groups.setdefault(tuple(stacks[-1]) if stacks else (), []).append(rank)
    silent = groups.pop((), [])
    for stack, ranks in groups.items():
        yield f"rank {first_few(ranks, most=16)}: {one_line(str(shown(stack)))}"
        own = [frame for frame in stack if not _OF_LAUNCH.search(frame.file)] or stack
        yield from (f"    {one_line(str(frame))}" for frame in own)
    if silent:
        yield (
            f"rank {first_few(silent, most=16)}: no stack: the process is stopped, or the kernel holds it, as in a "
            "file system that does not answer"
        )
    yield f"All threads of each rank are in {files.typed(run.ranks)}/RANK.log."
