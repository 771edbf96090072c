"""Runs the job of a command, records and reports how it ended, and returns the exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ddpexp.errors import (
    ENDS,
    EXIT_FAILED,
    DdpexpError,
    End,
    Failure,
    FinishedError,
    RefusedError,
    StoppedError,
    WorkerError,
    first_end,
)
from ddpexp.launch import Done, Failed, Interrupted, Job, Outcome
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.workers.client import Server
from ddpexp.system import caller
from ddpexp.system.limits import reason, reason_with_limit
from ddpexp.system.terminal import print_json, print_message

_NAMED = 16  # ranks named in a message; the others are only counted
_REPEAT_SECONDS = 2.0  # a second signal within this time counts as the same one
_NOTHING_TO_REQUEUE = "there is nothing to requeue: that is for launcher=slurm"


def exit_code_of(work: Callable[[], int], as_json: bool = False) -> int:
    """Do the work of a command, report an error, and return the exit code.

    `as_json`: print the fields of the error on standard output too, below `error`.
    """
    try:
        code = work()
        ignore_signals()
        return code
    except FinishedError as error:
        ignore_signals()
        if not error.quiet:
            print_message(f"ddpexp: {error}", sys.stdout)
        return error.exit_code
    except WorkerError as error:
        ignore_signals()
        _report_to_torchrun(error)
        failure = error.failure.as_dict()
        if not error.quiet and not caller.report(caller.End("failed", _summary(error), failure=failure)):
            print_message(_first_cause(error))
            if as_json:
                print_json({"error": failure})
        return error.exit_code
    except ENDS as error:
        ignore_signals()
        _drop_refused(error)
        _report_to_torchrun(error)
        if not error.quiet and not caller.report(_end_of(error)):
            print_message(f"ddpexp: {error}")
            if as_json:
                fields = error.as_dict() if isinstance(error, DdpexpError) else {}
                print_json({"error": {"kind": type(error).__name__, "message": str(error), **fields}})
        if isinstance(error, StoppedError) and error.then is not None:
            print_message(f"ddpexp: {error.then()}")
        return error.exit_code
    except (OSError, MemoryError, RuntimeError) as error:
        ignore_signals()
        if reason(error) is None:
            raise
        print_message(f"ddpexp: {reason_with_limit(error)}.")
        return EXIT_FAILED


def launch(launcher: Launcher, job: Job, server: Server | None, as_member: bool = False) -> int:
    """Run the job; one of the commands that run it records its end."""
    stop_on_signals()
    try:
        run = launcher.member if as_member else launcher.launch  # type: ignore[attr-defined]
        code: int = run(job, server)
        ignore_signals()
        job.lifecycle.end(Done())
        return code
    except StoppedError as error:
        ignore_signals()
        end = first_end(error)
        if not isinstance(end, StoppedError):
            job.lifecycle.end(_outcome_of(end))
            raise end from None
        end.quiet = end.quiet or error.quiet
        raise _stopped(end, job.lifecycle.end(_outcome_of(end))) from None
    except BaseException as error:
        ignore_signals()
        job.lifecycle.end(_outcome_of(error))
        raise


def _outcome_of(error: BaseException) -> Outcome | None:
    """Return what this command records of the end of its job; None: another command does, or there is nothing."""
    if isinstance(error, WorkerError):
        return Failed(error.failure) if error.leader is None else None
    if isinstance(error, StoppedError):
        return None if error.quiet else Interrupted(error.step, error.saved)
    if isinstance(error, RefusedError):
        if error.quiet:
            return None
        _drop_refused(error)
        return Failed(Failure.of_refusal(error))
    if isinstance(error, OSError | MemoryError | RuntimeError) and (limit := reason(error)) is not None:
        return Failed(Failure.of_command(type(error).__name__, reason_with_limit(error), limit=limit))
    return None


def _stopped(end: StoppedError, left: str) -> StoppedError:
    """Return the error that is reported of a stop, with what is left."""
    stopped = StoppedError(end.signum, left, end.step, by=end.by)
    stopped.quiet = end.quiet
    if not end.quiet:
        nothing = (lambda: _NOTHING_TO_REQUEUE) if end.signum == signal.SIGUSR2 else None
        stopped.then = end.then or nothing
    return stopped


def _drop_refused(error: End) -> None:
    if isinstance(error, DdpexpError) and "=" in error.suggestion:
        from ddpexp.config.suggestions import drop_refused  # late: it loads the schema, and what may not be installed

        drop_refused(error)


def _report_to_torchrun(error: End) -> None:
    """Write the error to the file from which torchrun's summary reads it. Source: torch's ErrorHandler."""
    trace = error.failure.traceback if isinstance(error, WorkerError) else None
    write_torchrun_error(_first_line(error), trace)


def write_torchrun_error(summary: str, trace: str | None = None) -> None:
    """Write what torchrun's summary is to say about this rank, where torchrun has started it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    from ddpexp.system.files import write_json  # late: it loads YAML, and most commands are not torchrun's

    extra = {"py_callstack": f"{trace}{summary}" if trace else summary, "timestamp": str(int(time.time()))}
    try:
        write_json(Path(path), {"message": {"message": summary, "extraInfo": extra}})
    except OSError:
        pass  # torchrun has exited and removed the folder


def stop_on_signals() -> None:
    """Raise StoppedError on stop signals, inside `exit_code_of`. While workers run, the supervisor handles signals.

    A second signal within two seconds is ignored, so that it does not interrupt the cleanup after the first one.
    """
    ignored_until = 0.0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal ignored_until
        if time.monotonic() >= ignored_until:
            ignored_until = time.monotonic() + _REPEAT_SECONDS
            raise StoppedError(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    for number in (signal.SIGUSR1, signal.SIGQUIT):  # there is nothing to save and no rank to look at yet
        signal.signal(number, signal.SIG_IGN)


def ignore_signals() -> None:
    """Ignore further signals while the command reports how it ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _end_of(error: End) -> caller.End:
    if isinstance(error, StoppedError):
        return caller.End("stopped", str(error), signum=error.signum)
    return caller.End("refused" if isinstance(error, RefusedError) else "failed", str(error), fields=error.as_dict())


def _first_cause(error: WorkerError) -> str:
    hidden = error.leader is not None or error.shown or error.failure.limit is not None  # the rank's log has it
    trace = None if hidden else error.failure.traceback
    return "\n".join([*([trace.rstrip()] if trace else []), f"ddpexp: {_summary(error)}"])


def _summary(error: WorkerError) -> str:
    """Return which rank failed, where and why, and which ranks were terminated as a consequence."""
    failure = error.failure
    step = f" after step {failure.step}" if failure.step is not None else ""
    phase = f" ({failure.phase}{step})" if failure.phase else step
    summary = f"rank {failure.rank} on {failure.host} failed{phase}: {_message(failure)}"
    if error.leader is not None:
        return f"{summary} (the whole report is with rank zero, on {error.leader})"
    if error.others:
        ranks, more = ", ".join(map(str, error.others[:_NAMED])), len(error.others) - _NAMED
        also = f" and {more:,} others" if more > 0 else ""
        summary += f" (rank{'s' if len(error.others) > 1 else ''} {ranks}{also} terminated as a consequence)"
    return summary


def _first_line(error: End) -> str:
    """Return the error in one line, with its rank if it has one."""
    if isinstance(error, WorkerError):
        failure = error.failure
        return f"rank {failure.rank} on {failure.host}: {_message(failure)}"
    return str(error)


def _message(failure: Failure) -> str:
    """Return a failure's message; an error of other code has its kind in front, and the user's line at the end."""
    if failure.kind == "DdpexpError":
        return failure.message
    is_shown = failure.reason is not None or failure.place is None or failure.place in failure.message
    return f"{failure.kind}: {failure.message}{'' if is_shown else f' ({failure.place})'}"
