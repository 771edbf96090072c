"""The events that `decide` takes, and the actions that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ddpexp.errors import Failure
from ddpexp.launch.requests import Kind
from ddpexp.launch.supervise import messages
from ddpexp.launch.workers.page import What

# Sources of signals: a rank has its own number, another command has its number plus OTHER_COMMANDS.
COMMAND, OTHER_COMMANDS = -1, 1 << 32


@dataclass(frozen=True)
class FromRank:
    """A rank has sent a message."""

    rank: int
    message: messages.TrainingBegan | messages.WorkerDone | messages.WorkerStopped | messages.DebuggerQuit


@dataclass(frozen=True)
class RankErrored:
    """A rank has reported its own failure."""

    rank: int
    failure: Failure


@dataclass(frozen=True)
class RankExited:
    """A rank's process has ended, after its last message."""

    rank: int
    code: int
    seen: Failure  # how it ended, as seen from outside


@dataclass(frozen=True)
class RankZeroMoved:
    """Rank zero has done its first step, or wants another agreement."""

    has_stepped: bool
    wish: tuple[int, What]


@dataclass(frozen=True)
class BoundRead:
    """No rank of this command can be past this step boundary: the answer to `BeginBoundary`."""

    number: int
    step: int


@dataclass(frozen=True)
class Signalled:
    """The command, or one of its ranks, has received a signal."""

    number: int
    source: int  # COMMAND, or the rank


@dataclass(frozen=True)
class Requested:
    """A person has requested something of the run by another command."""

    kind: Kind
    steps: int = 0  # to profile


@dataclass(frozen=True)
class FromCommand:
    """Another command has sent a message."""

    command: int
    message: messages.EndMessage | messages.StopMessage | messages.AgreementMessage


@dataclass(frozen=True)
class CommandLost:
    """The connection to another command is closed."""

    command: int
    failure: Failure


@dataclass(frozen=True)
class HangFound:
    """The leading command's watchdog names the cause of a hang; the `absent` commands do not answer."""

    failure: Failure
    absent: Sequence[int] = ()


@dataclass(frozen=True)
class LeaderSilent:
    """The leading command does not answer a report of silence."""


@dataclass(frozen=True)
class Tick:
    """Time has passed, and all that had arrived is handled."""


Event: TypeAlias = (
    FromRank
    | RankErrored
    | RankExited
    | RankZeroMoved
    | BoundRead
    | Signalled
    | Requested
    | FromCommand
    | CommandLost
    | HangFound
    | LeaderSilent
    | Tick
)


@dataclass(frozen=True)
class Send:
    """Send a message to all other commands from the leading one, else to the leading one."""

    message: messages.PeerMessage


@dataclass(frozen=True)
class BeginBoundary:
    """Make the ranks wait at their next step boundary, and find out which one none of them can be past."""

    number: int


@dataclass(frozen=True)
class CommitBoundary:
    """Tell the ranks the step of an agreement."""

    committed: messages.CommitStep


@dataclass(frozen=True)
class ShowStop:
    """Show the ranks the signal that stops the run."""

    signum: int


@dataclass(frozen=True)
class DismissRanks:
    """Make the ranks exit at once, without saving, in their own way."""


@dataclass(frozen=True)
class KillRanks:
    """Kill the ranks."""


@dataclass(frozen=True)
class KillServer:
    """Kill the process that did not kill the ranks in time, and with it every rank."""


@dataclass(frozen=True)
class DumpStacks:
    """Make the ranks dump their stacks, but for the one that a signal came from: it has done so."""

    source: int = COMMAND


@dataclass(frozen=True)
class ShowLastOutput:
    """Show and log what the ranks have left: all have ended, and no other command has heard of it yet."""


Action: TypeAlias = (
    Send
    | BeginBoundary
    | CommitBoundary
    | ShowStop
    | DismissRanks
    | KillRanks
    | KillServer
    | DumpStacks
    | ShowLastOutput
)
