"""The family of errors and the exit codes of the command."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2


class DdpexpError(Exception):
    """An error whose text is one sentence for the user: what happened, why it matters, what to do."""

    exit_code = EXIT_FAILED
    quiet = False  # another command of the same job says it


class RefusedError(DdpexpError):
    """Something is wrong before training: configuration, usage, environment or data. Nothing was lost."""

    exit_code = EXIT_REFUSED


class AbsentError(RefusedError):
    """Another command of the job did not come, or left before the job began."""


class FinishedError(DdpexpError):
    """The run that was asked for is finished: there is nothing to do, and nothing is wrong."""

    exit_code = EXIT_DONE


class CodeError(DdpexpError):
    """An error of the user's own code, under its own name and with its own traceback, and what it was about."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        """`kind` is the name of the error's class."""
        super().__init__(kind, message, trace)  # all of them: it comes from other processes too
        self.kind, self.message, self.trace = kind, message, trace

    def __str__(self) -> str:
        return self.message


class PeerError(DdpexpError):
    """A rank that this one waited for has died or is silent.

    Mostly a consequence, whose cause that rank tells itself.
    """


@dataclass(frozen=True)
class Failure:
    """How one worker failed: what error.json holds."""

    rank: int
    host: str
    kind: str  # the exception's class, or the signal's name
    message: str
    step: int | None = None
    phase: str | None = None
    signal: int | None = None
    traceback: str | None = None
    exit_code: int = EXIT_FAILED

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


class LoaderError(BaseException):
    """A DataLoader worker died, hangs, or has no room for its batches.

    A signal brings the first, wherever its rank is: no `Exception`, which libraries catch and forget.
    """

    exit_code = EXIT_FAILED


class WorkerError(DdpexpError):
    """A worker failed: the first genuine cause, and the ranks that only went down with it."""

    def __init__(
        self,
        failure: Failure,
        others: tuple[int, ...] = (),
        shown: bool = False,
        leader: str | None = None,
        quiet: bool = False,
    ) -> None:
        """Keep the first failure, the other ranks that ended because of it.

        And whether its last words are on the terminal.

        `leader` is the host of the command that reports it, where that is another one than this.
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

    It can come anywhere, so it is no `Exception`: libraries catch those, and OmegaConf raises them anew as it likes.
    """

    quiet = False  # another command of the same job says it
    told = False  # another command of the same job has written it down and says it
    then: Callable[[], str] | None = (
        None  # what is done when the end is written down and said; returns what to say of it
    )

    def __init__(
        self,
        signum: int,
        rest: str = "nothing was started",
        step: int | None = None,
        saved: bool = False,
        began: int | None = None,
    ) -> None:
        """Keep the signal's number: the exit code is 128 more; `rest` says what is left.

        `step` is how far the run was, where that is known, and `saved` whether all of it is saved; `began` is where
        this start began.
        """
        super().__init__(f"interrupted by {signal.Signals(signum).name}; {rest}")
        self.signum = signum
        self.exit_code = 128 + signum
        self.step = step
        self.saved = saved
        self.began = began


End: TypeAlias = DdpexpError | StoppedError
ENDS = (DdpexpError, StoppedError)  # all that a command has a sentence and an exit code for


def first_end(error: End) -> End:
    """Return how the job ended, where a signal came while that was on its way.

    What starts commands may end all with the first.

    A failure or a refusal counts before a stop.
    """
    found: End = error
    cause = error.__context__
    while cause is not None:
        if isinstance(cause, WorkerError | RefusedError):
            return cause
        found = cause if isinstance(cause, StoppedError) else found
        cause = cause.__context__
    return found
