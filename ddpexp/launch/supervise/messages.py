"""The messages that a supervisor receives from its workers, and those that the commands of a job send to one another.

On the wire each is a JSON object: its kind, then the fields of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from ddpexp.errors import Failure
from ddpexp.launch.supervise.hangs import Account
from ddpexp.launch.supervise.severity import Severity
from ddpexp.launch.workers.page import What

# From a worker to its supervisor.


@dataclass(frozen=True)
class Progress:
    """The worker has done `done` of `total` steps."""

    done: int
    total: int
    text: str  # beside a progress bar
    line: str  # instead of it, where there is no terminal
    after: int  # bytes of output that were written before


@dataclass(frozen=True)
class Activity:
    """The worker does something between two steps; `done` of `total` parts, of which 0 says that it has none."""

    text: str
    done: int
    total: int
    after: int  # bytes of output that were written before


@dataclass(frozen=True)
class TrainingBegan:
    """The training begins, after this step."""

    step: int


@dataclass(frozen=True)
class Warned:
    """The worker has logged a warning."""

    text: str


@dataclass(frozen=True)
class Errored:
    """The worker fails with this error."""

    host: str
    error: str  # the class of the exception
    message: str
    traceback: str | None
    step: int | None
    exit_code: int
    refused: bool = False  # by a RefusedError
    limit: str | None = None  # of the machine or the shell, which the error is about
    reason: str | None = None  # this and the following: see ddpexp.errors.Failure
    key: str | None = None
    value: str | None = None
    suggestion: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class WorkerDone:
    """The worker has done all its work."""


@dataclass(frozen=True)
class WorkerStopped:
    """The worker exits because of a stop request, after saving this step."""

    step: int | None


@dataclass(frozen=True)
class TerminalRequested:
    """The worker is at a breakpoint, and waits for the terminal."""

    number: int  # of the worker's requests


@dataclass(frozen=True)
class TerminalReturned:
    """The worker has left its prompt."""

    stepping: bool  # to execute a line and come back


@dataclass(frozen=True)
class DebuggerQuit:
    """The user has quit the debugger; `at_once`: the worker could not continue to the end of its step."""

    at_once: bool


@dataclass(frozen=True)
class Profiled:
    """The ranks have profiled the steps after `begin` up to `end`."""

    begin: int
    end: int
    missing: int  # ranks that could not write


# Between the commands of a job. The leading command sends its messages to all others.


@dataclass(frozen=True)
class RankFailed:
    """To the leading command: a rank failed."""

    failure: Failure
    severity: Severity


@dataclass(frozen=True)
class RankWarned:
    """To the leading command: a rank has logged a warning."""

    rank: int
    text: str


@dataclass(frozen=True)
class CommandDone:
    """To the leading command: all workers of this command have ended."""


@dataclass(frozen=True)
class CommandStopped:
    """To the leading command: all workers of this command have ended because of a signal."""

    signal: int


@dataclass(frozen=True)
class SignalReceived:
    """A command or a rank received a signal; `again`: a second one, which ends the run at once."""

    signal: int
    again: bool


@dataclass(frozen=True)
class StopRun:
    """From the leading command: a signal stops the run; the agreement tells the ranks when."""

    signal: int


@dataclass(frozen=True)
class LeaveNow:
    """From the leading command: a signal stops the run, and there is nothing to save."""

    signal: int


@dataclass(frozen=True)
class EndRun:
    """From the leading command: end all workers now."""

    cause: Failure | None
    signal: int | None


@dataclass(frozen=True)
class BeginAgreement:
    """From the leading command: all ranks wait at their next step boundary."""

    number: int


@dataclass(frozen=True)
class ReportBound:
    """To the leading command: no rank of this command can be past this step boundary."""

    number: int
    step: int


@dataclass(frozen=True)
class CommitStep:
    """From the leading command: the step of an agreement."""

    number: int
    step: int
    what: What
    profile: int = 0  # this many steps, whatever else they do


@dataclass(frozen=True)
class ReportSilence:
    """To the leading command: a rank makes no progress."""


@dataclass(frozen=True)
class BeginInquiry:
    """From the leading command: report what your ranks do."""

    number: int


@dataclass(frozen=True)
class ReportAccounts:
    """To the leading command: what this command's ranks do."""

    number: int
    accounts: Sequence[Account]


WorkerMessage: TypeAlias = (
    Progress
    | Activity
    | TrainingBegan
    | Warned
    | Errored
    | WorkerDone
    | WorkerStopped
    | TerminalRequested
    | TerminalReturned
    | DebuggerQuit
    | Profiled
)
EndMessage: TypeAlias = RankFailed | CommandDone | CommandStopped | EndRun
StopMessage: TypeAlias = SignalReceived | StopRun | LeaveNow
AgreementMessage: TypeAlias = BeginAgreement | ReportBound | CommitStep
InquiryMessage: TypeAlias = ReportSilence | BeginInquiry | ReportAccounts
PeerMessage: TypeAlias = RankWarned | EndMessage | StopMessage | AgreementMessage | InquiryMessage

_WORKER_KINDS: Mapping[str, type[WorkerMessage]] = {
    "progress": Progress,
    "activity": Activity,
    "began": TrainingBegan,
    "warning": Warned,
    "error": Errored,
    "done": WorkerDone,
    "stopped": WorkerStopped,
    "prompt": TerminalRequested,
    "prompted": TerminalReturned,
    "quit": DebuggerQuit,
    "profiled": Profiled,
}
_PEER_KINDS: Mapping[str, type[PeerMessage]] = {
    "failed": RankFailed,
    "warning": RankWarned,
    "done": CommandDone,
    "stopped": CommandStopped,
    "signal": SignalReceived,
    "stop": StopRun,
    "leave": LeaveNow,
    "end": EndRun,
    "begin": BeginAgreement,
    "bound": ReportBound,
    "settle": CommitStep,
    "silence": ReportSilence,
    "look": BeginInquiry,
    "seen": ReportAccounts,
}
_KIND_OF = {message: kind for kind, message in _PEER_KINDS.items()}
_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "failure": lambda fields: Failure(**fields),
    "severity": Severity,
    "cause": lambda fields: None if fields is None else Failure(**fields),
    "accounts": lambda accounts: [Account(**fields) for fields in accounts],
}


def encode(message: PeerMessage) -> dict[str, Any]:
    """Return a message between commands as it is sent."""
    return {"kind": _KIND_OF[type(message)], **asdict(message)}


def decode(fields: Mapping[str, Any]) -> PeerMessage | None:
    """Parse a message of another command; None for an unknown kind."""
    message = _PEER_KINDS.get(fields["kind"])
    if message is None:
        return None
    return message(
        **{
            name: _PARSERS[name](value) if name in _PARSERS else value
            for name, value in fields.items()
            if name != "kind"
        }
    )


def decode_worker(fields: Mapping[str, Any]) -> WorkerMessage | None:
    """Parse a message of a worker; None for an unknown kind."""
    message = _WORKER_KINDS.get(fields["kind"])
    if message is None:
        return None
    return message(**{name: value for name, value in fields.items() if name != "kind"})
