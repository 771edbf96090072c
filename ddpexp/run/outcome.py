"""One command's way to its end: run a job, have its end written down, say it, return the exit code."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from ddpexp.errors import ENDS, End, Failure, FinishedError, RefusedError, StoppedError, WorkerError, first_end
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.workers.client import Server
from ddpexp.system import secrets
from ddpexp.system.terminal import say

_NAMED = 16  # ranks that ended with the first; of thousands the others are counted
_REPEAT_SECONDS = 2.0  # a second signal sooner than this is the same one
_NOTHING_TO_REQUEUE = "there is nothing to requeue: that is for launcher=slurm"


def exit_code_of(work: Callable[[], int]) -> int:
    """Do the work of a command and return its exit code; an error is said first."""
    try:
        code = work()
        hear_no_more_signals()
        return code
    except FinishedError as error:
        hear_no_more_signals()
        if not error.quiet:
            say(f"ddpexp: {error}", sys.stdout)
        return error.exit_code
    except WorkerError as error:
        hear_no_more_signals()
        _tell_torchrun(error)
        if not error.quiet:
            say(_first_cause(error))
        return error.exit_code
    except ENDS as error:
        hear_no_more_signals()
        _tell_torchrun(error)
        if not error.quiet:
            say(f"ddpexp: {error}")
        if isinstance(error, StoppedError) and error.then is not None:
            say(f"ddpexp: {error.then()}")
        return error.exit_code


def launch(launcher: Launcher, job: Job, server: Server | None, as_member: bool = False) -> int:
    """Run the job and have its end written down, by one of the commands that run it."""
    stop_on_signals()
    try:
        run = launcher.member if as_member else launcher.launch  # type: ignore[attr-defined]
        code: int = run(job, server)
        hear_no_more_signals()
        return code
    except (WorkerError, RefusedError) as error:
        _record(job, error)
        raise
    except StoppedError as error:
        hear_no_more_signals()
        end = first_end(error)
        if not isinstance(end, StoppedError):
            assert isinstance(end, WorkerError | RefusedError)
            _record(job, end)
            raise end from None
        if end.told:
            end.quiet = True
            raise end from None
        stopped = StoppedError(end.signum, job.interrupt(end.step, end.saved), end.step)
        stopped.quiet = not job.leads  # the leading command says it
        if job.leads:
            nothing = (lambda: _NOTHING_TO_REQUEUE) if end.signum == signal.SIGUSR2 else None
            stopped.then = end.then or nothing
        raise stopped from None
    finally:
        job.close()


def _record(job: Job, error: WorkerError | RefusedError) -> None:
    hear_no_more_signals()
    if isinstance(error, WorkerError):
        if error.leader is None:
            job.fail(error.failure)
    elif not error.quiet:
        job.fail(
            Failure(rank=0, host=platform.node(), kind="RefusedError", message=str(error), exit_code=error.exit_code)
        )


def _tell_torchrun(error: End) -> None:
    """Leave the error where torchrun looks for it, so that its summary shows it. Source: torch's ErrorHandler."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    trace = error.failure.traceback if isinstance(error, WorkerError) else None
    summary = _first_line(error)
    extra = {"py_callstack": f"{trace}{summary}" if trace else summary, "timestamp": str(int(time.time()))}
    try:
        with open(path, "w") as file:
            json.dump(secrets.masked_tree({"message": {"message": summary, "extraInfo": extra}}), file)
    except OSError:
        pass  # its folder is gone with it


def stop_on_signals() -> None:
    """Turn stop signals into an error, inside of `exit_code_of`.

    While workers run, their watch hears the signals instead.

    One that follows within two seconds is the same: what the first one undoes is not cut short by it.
    """
    again = 0.0  # when the next one counts

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal again
        if time.monotonic() >= again:
            again = time.monotonic() + _REPEAT_SECONDS
            raise StoppedError(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    for number in (signal.SIGUSR1, signal.SIGQUIT):  # there is nothing to save and no rank to look at yet
        signal.signal(number, signal.SIG_IGN)


def hear_no_more_signals() -> None:
    """What started this command may send it a signal while it says how it ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _first_cause(error: WorkerError) -> str:
    failure = error.failure
    place = f" at step {failure.step}" if failure.step is not None else ""
    phase = f" ({failure.phase}{place})" if failure.phase else place
    summary = f"ddpexp: rank {failure.rank} on {failure.host} failed{phase}: {_described(failure)}"
    if error.leader is not None:
        return f"{summary} (the whole report is with rank zero, on {error.leader})"
    lines = [] if error.shown or not failure.traceback else [failure.traceback.rstrip()]
    if error.others:
        ranks, more = ", ".join(map(str, error.others[:_NAMED])), len(error.others) - _NAMED
        also = f" and {more:,} others" if more > 0 else ""
        summary += f" (rank{'s' if len(error.others) > 1 else ''} {ranks}{also} ended with it)"
    return "\n".join([*lines, summary])


def _first_line(error: End) -> str:
    """Return the error in one line, with its rank where it has one."""
    if isinstance(error, WorkerError):
        failure = error.failure
        return f"rank {failure.rank} on {failure.host}: {_described(failure)}"
    return str(error)


def _described(failure: Failure) -> str:
    """Return a failure's message; an error that is not a sentence of ours has its kind in front."""
    return failure.message if failure.kind == "DdpexpError" else f"{failure.kind}: {failure.message}"
