"""The exceptions that every part of ddpexp raises, as data, and the exit codes that they become."""

from __future__ import annotations

import platform
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, TypeVar

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2

_KEY = re.compile(r"[\w.]+")
Error = TypeVar("Error", bound="DdpexpError")


class Absent(Enum):
    """The type of the value of an error that is about no value, or about a key that has none."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT


class DdpexpError(Exception):
    """Base of all errors for the user, as data; `str()` is the sentence that `sentence` makes of the fields.

    Attributes:
        reason: What happened with these values, and why it matters. With a key or a place: a clause that continues
            it, such as "is not a folder", or a sentence that begins with a capital. Without a full stop, unless it is
            all that there is.
        key: The key or option, as it is typed.
        value: Its value; `ABSENT` if there is none.
        suggestion: What to do, in full sentences, with overrides as they are typed.
        place: The file, row or other object that the reason is about. Of an error in the user's code, file:line.
        further: Errors of the same command besides; each has a line of the text.
    """

    exit_code = EXIT_FAILED
    quiet = False  # another command of the same job reports it

    def __init__(
        self,
        reason: str = "",
        *,
        key: str | None = None,
        value: Any = ABSENT,
        suggestion: str = "",
        place: object = None,
    ) -> None:
        """Store the fields; `place` as a text. A `key` that is given with its value, KEY=VALUE, is divided."""
        super().__init__(reason)
        if key is not None and value is ABSENT and "=" in key:
            key, _, value = key.partition("=")
        self.reason = reason
        self.key = key
        self.value = value
        self.suggestion = suggestion.strip()
        self.place = None if place is None else str(place)
        self.further: tuple[DdpexpError, ...] = ()

    def __str__(self) -> str:
        return "\n".join([sentence(self), *map(str, self.further)])

    @classmethod
    def from_dict(cls: type[Error], fields: Mapping[str, str | None]) -> Error:
        """Return the error of which `as_dict` has returned the fields."""
        return cls(**{name: text for name, text in fields.items() if text is not None})

    def as_dict(self) -> dict[str, str | None]:
        """Return the fields for JSON, with the value as it is typed; None for those that are missing."""
        return {
            "reason": self.reason,
            "key": self.key,
            "value": self.typed_value,
            "suggestion": self.suggestion,
            "place": self.place,
        }

    @property
    def typed_value(self) -> str | None:
        """The value as it is typed; None if there is none."""
        return None if self.value is ABSENT else shown(self.value)


def sentence(error: DdpexpError) -> str:
    """Return an error as text: `KEY=VALUE: PLACE REASON. SUGGESTION`, where each of them may be missing."""
    typed = error.key if error.typed_value is None else f"{error.key}={error.typed_value}"
    subject = ": ".join(text for text in (typed, error.place) if text is not None)
    if not subject and not error.suggestion:
        return error.reason
    reason, suggestion = error.reason, error.suggestion
    if not reason:
        return f"{subject}: {suggestion[:1].lower()}{suggestion[1:]}" if subject else suggestion
    text = f"{subject}{' ' if reason[0].islower() else ': '}{reason}" if subject else reason
    return f"{text}{'' if text[-1] in '.?!' else '.'} {suggestion}".rstrip()


def subject(description: str, place: object = None) -> dict[str, Any]:
    """Return the fields for what an error is about: an override as it is typed or something else, and a place in it."""
    key, is_override, value = description.partition("=")
    if is_override and _KEY.fullmatch(key):
        return {"key": key, "value": value, "place": place}
    return {"place": description if place is None else f"{description}: {place}"}


def shown(value: Any) -> str:
    """Write a value as it is typed."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_shown_inside(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown_inside, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown_inside(value: Any) -> str:
    return repr(value) if isinstance(value, str) else shown(value)


class RefusedError(DdpexpError):
    """The start was refused before training: configuration, usage, environment or data. Nothing was lost."""

    exit_code = EXIT_REFUSED


class SweptError(RefusedError):
    """Several values in a command for one run, or a key of sweeps."""


class AbsentError(RefusedError):
    """Another command of the job did not arrive, or left before the job began."""


class FinishedError(DdpexpError):
    """The requested run is already finished: there is nothing to do, and nothing is wrong."""

    exit_code = EXIT_DONE


class CodeError(DdpexpError):
    """An error in the user's own code, with its original class name, message and traceback."""

    def __init__(self, kind: str, message: str, trace: str, place: str | None = None) -> None:
        """`kind` is the name of the original exception's class; `place`, the user's file and line."""
        super().__init__(message, place=place)
        self.args = (kind, message, trace, place)  # all arguments, so that it can be pickled between processes
        self.kind = kind
        self.message = message
        self.trace = trace

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
    refused: bool = False  # by a RefusedError
    limit: str | None = None  # of the machine or the shell, which the error is about
    reason: str | None = None  # this and the following are the fields of a DdpexpError
    key: str | None = None
    value: str | None = None  # as it is typed
    suggestion: str | None = None
    place: str | None = None  # of other exceptions, the file and line of the user's code

    @classmethod
    def of_command(cls, kind: str, message: str, **fields: Any) -> Failure:
        """Return the failure of a command itself, which counts as that of its first rank."""
        return cls(rank=0, host=platform.node(), kind=kind, message=message, **fields)

    @classmethod
    def of_refusal(cls, error: RefusedError) -> Failure:
        """Return what error.json holds of a refusal by the command."""
        return cls.of_command("RefusedError", str(error), exit_code=error.exit_code, refused=True, **error.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    def error_fields(self) -> dict[str, str | None]:
        """Return the fields of the DdpexpError, from which `from_dict` makes one."""
        names = ("key", "value", "suggestion", "place")
        return {"reason": self.message if self.reason is None else self.reason} | {
            name: getattr(self, name) for name in names
        }


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

    quiet = False  # another command of the same job records and reports it
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
