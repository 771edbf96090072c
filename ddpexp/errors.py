"""The exceptions that every part of ddpexp raises, and the exit codes that they become."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2


class DdpexpError(Exception):
    """Base of all errors whose text is one sentence for the user: what happened, why it matters, what to do."""

    exit_code = EXIT_FAILED
    quiet = False  # another command of the same job reports it


class RefusedError(DdpexpError):
    """The start was refused before training: configuration, usage, environment or data. Nothing was lost."""

    exit_code = EXIT_REFUSED


class AbsentError(RefusedError):
    """Another command of the job did not arrive, or left before the job began."""


class FinishedError(DdpexpError):
    """The requested run is already finished: there is nothing to do, and nothing is wrong."""

    exit_code = EXIT_DONE


class CodeError(DdpexpError):
    """An error in the user's own code, with its original class name, message and traceback."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        """`kind` is the name of the original exception's class."""
        super().__init__(kind, message, trace)  # all arguments, so that it can be pickled between processes
        self.kind, self.message, self.trace = kind, message, trace

    def __str__(self) -> str:
        return self.message


class PeerError(DdpexpError):
    """A rank that this one waited for has died or is silent.

    Usually a consequence: that rank reports the cause itself.
    """


@dataclass(frozen=True)
class Failure:
    """How one worker failed; the content of error.json."""

    rank: int
    host: str
    kind: str  # the exception's class, or the signal's name
    message: str
    step: int | None = None
    phase: str | None = None
    signal: int | None = None
    traceback: str | None = None
    exit_code: int = EXIT_FAILED
    limit: str | None = None  # of the machine or the shell, which the error is about

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


class LoaderError(BaseException):
    """A DataLoader worker died, hangs, or has no room for its batches.

    A worker's death is raised from a signal handler, wherever its rank is at that moment. Not an `Exception`, which
    libraries catch and discard.
    """

    exit_code = EXIT_FAILED


class WorkerError(DdpexpError):
    """A worker failed: the first genuine cause, and the ranks that were terminated as a consequence."""

    def __init__(
        self,
        failure: Failure,
        others: tuple[int, ...] = (),
        shown: bool = False,
        leader: str | None = None,
        quiet: bool = False,
    ) -> None:
        """Store the failure and the `others` that ended because of it.

        `shown`: its last output is already on the terminal. `leader`: the host of the command that reports the
        failure, where that is not this command.
        """
        super().__init__(failure.message)
        self.failure = failure
        self.others = others
        self.shown = shown
        self.leader = leader
        self.quiet = quiet
        self.exit_code = failure.exit_code


class StoppedError(BaseException):
    """A signal to the command, or to one of its ranks, ended the run.

    It can be raised anywhere, so it is not an `Exception`: libraries catch those, and OmegaConf re-raises them as
    errors of its own.
    """

    quiet = False  # another command of the same job reports it
    recorded = False  # another command of the same job has recorded it in the run directory and reports it
    then: Callable[[], str] | None = None  # called once the end is recorded; returns a sentence for the last message

    def __init__(
        self,
        signum: int,
        rest: str = "nothing was started",
        step: int | None = None,
        saved: bool = False,
        began: int | None = None,
        by: str | None = None,
    ) -> None:
        """Store the signal's number; the exit code is 128 + signum. `rest` describes what is left.

        `step`: the last step that was done, where that is known. `saved`: everything up to it is saved. `began`: the
        step at which this start began. `by`: what ended the run, if it is not the signal itself.
        """
        super().__init__(f"{by or f'interrupted by {signal.Signals(signum).name}'}; {rest}")
        self.by = by
        self.signum = signum
        self.exit_code = 128 + signum
        self.step = step
        self.saved = saved
        self.began = began


End: TypeAlias = DdpexpError | StoppedError
ENDS = (DdpexpError, StoppedError)  # every way to end for which a command has a sentence and an exit code


def first_end(error: End) -> End:
    """Return how the job really ended, where a signal arrived while another error was being handled.

    Launchers may terminate all commands as soon as the first one ends. A failure or a refusal takes precedence over a
    stop.
    """
    first: End = error
    cause = error.__context__
    while cause is not None:
        if isinstance(cause, WorkerError | RefusedError):
            return cause
        first = cause if isinstance(cause, StoppedError) else first
        cause = cause.__context__
    return first
