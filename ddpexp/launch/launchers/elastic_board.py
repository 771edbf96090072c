"""What the command, torch's agent and the ranks of one machine know of one another under launcher=elastic.

A page of memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ddpexp.errors import EXIT_DONE, RefusedError

_WHERE = "DDPEXP_BOARD"  # the variable that names the page
_BYTES = 4  # of a number: the phase, then the exit code of each rank of this machine

# torch's C++ writes its call stacks to the terminal where a connection of the agent breaks. It reads the level once,
# when it is loaded; the second variable says that the first is not the user's, and not for the ranks.
_LEVEL, _OURS = "TORCH_CPP_LOG_LEVEL", "DDPEXP_AGENT_LOG_LEVEL"

# How torch's agent ends when the ranks have no part in it; it leaves with these codes, for the command to say why.
JOB_ENDED, FEW_CAME, LIST_LOST = 3, 4, 5


class Phase(IntEnum):
    """What the agent does."""

    FIRST = 0  # waits for the first machines
    RUNS = 1  # has started the ranks
    LOOKS = 2  # looks after them, and ends all when one has failed: for microseconds otherwise
    MEETS = 3  # ends the ranks, if there are any, and meets the machines that are there by now


@dataclass(frozen=True)
class StoreMailbox:
    """The page, under a path that this user's other processes of the host can open."""

    path: Path

    @classmethod
    def here(cls) -> StoreMailbox:
        """Return the one that the command has made, in the agent and in a rank. Raises RefusedError where none has."""
        if _WHERE not in os.environ:
            raise RefusedError(f"{_WHERE} is not set: `ddpexp member` is for the agent that launcher=elastic starts.")
        return cls(Path(os.environ[_WHERE]))

    @classmethod
    @contextmanager
    def make(cls, ranks: int) -> Iterator[StoreMailbox]:
        """Make a page, which goes with this process."""
        with memory(bytes((1 + ranks) * _BYTES)) as path:
            yield cls(path)

    def variables(self) -> dict[str, str]:
        """Return what leads the agent and the ranks here."""
        return {_WHERE: str(self.path)}

    def phase(self) -> Phase:
        """Return what the agent does; as long as the command is gone, nothing is known."""
        try:
            return Phase(self._numbers()[0])
        except (OSError, IndexError, ValueError):
            return Phase.RUNS

    def note(self, phase: Phase) -> None:
        """Say what the agent does from now on."""
        self._write(0, phase)

    def codes(self) -> list[int]:
        """Return the exit codes of the ranks that did not end well, by rank."""
        return [code for code in self._numbers()[1:] if code != EXIT_DONE]

    def leave(self, local_rank: int, code: int) -> None:
        """Leave a rank's exit code where the command looks for it."""
        self._write(1 + local_rank, code)

    def _numbers(self) -> list[int]:
        found = self.path.read_bytes()
        return [int.from_bytes(found[i : i + _BYTES], "little") for i in range(0, len(found), _BYTES)]

    def _write(self, place: int, number: int) -> None:
        with suppress(OSError), open(self.path, "r+b", buffering=0) as page:  # the command may be gone
            os.pwrite(page.fileno(), number.to_bytes(_BYTES, "little"), place * _BYTES)


@contextmanager
def memory(data: bytes) -> Iterator[Path]:
    """Hold data in memory under a path that this user's other processes of the host can open.

    It goes with this process.
    """
    descriptor = os.memfd_create("ddpexp")
    try:
        os.write(descriptor, data)
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def quiet_agent(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep torch's C++ in the agent quiet, unless the user has chosen a level."""
    return {} if _LEVEL in environ else {_LEVEL: "FATAL", _OURS: "1"}


def not_for_ranks() -> None:
    """Take those variables away again, in the agent."""
    if os.environ.pop(_OURS, None):
        os.environ.pop(_LEVEL, None)
