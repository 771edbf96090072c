"""Shared memory between the command, torch's agent and the ranks of one machine under launcher=elastic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ddpexp.errors import EXIT_DONE, RefusedError

_PATH_VARIABLE = "DDPEXP_AGENT_STATUS"  # the environment variable with the path of the shared memory
_BYTES = 4  # per number: the phase, then the exit code of each rank of this machine

# torch's C++ code prints call stacks when a connection of the agent breaks. It reads the level once, when it is loaded;
# the second variable marks the first as set by ddpexp for the agent, not by the user and not for the ranks.
_LEVEL, _LEVEL_IS_OURS = "TORCH_CPP_LOG_LEVEL", "DDPEXP_AGENT_LOG_LEVEL"

# Exit codes of the agent when it ends for reasons other than its ranks; the command prints why.
JOB_ENDED = 3
FEW_CAME = 4
LIST_LOST = 5


class Phase(IntEnum):
    """What the agent is doing."""

    FIRST = 0  # waits for the first machines
    RUNS = 1  # has started the ranks
    LOOKS = 2  # checks the ranks, and ends all of them if one has failed; otherwise this takes microseconds
    MEETS = 3  # ends the ranks, if there are any, and starts a new round with the machines that are there now


@dataclass(frozen=True)
class AgentStatus:
    """The agent's phase and the ranks' exit codes, in shared memory that this user's processes can open by its path."""

    path: Path

    @classmethod
    def here(cls) -> AgentStatus:
        """Return the status that the command has created; for the agent and the ranks.

        Raises:
            RefusedError: there is none.
        """
        if _PATH_VARIABLE not in os.environ:
            raise RefusedError(
                "is not set: `ddpexp member` is for the agent that launcher=elastic starts", place=_PATH_VARIABLE
            )
        return cls(Path(os.environ[_PATH_VARIABLE]))

    @classmethod
    @contextmanager
    def make(cls, ranks: int) -> Iterator[AgentStatus]:
        """Create a status that lives as long as this process."""
        with memory(bytes((1 + ranks) * _BYTES)) as path:
            yield cls(path)

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which the agent and the ranks find it."""
        return {_PATH_VARIABLE: str(self.path)}

    def phase(self) -> Phase:
        """Return the agent's phase; RUNS once the command, and the status with it, is gone."""
        try:
            return Phase(self._numbers()[0])
        except (OSError, IndexError, ValueError):
            return Phase.RUNS

    def note(self, phase: Phase) -> None:
        """Publish the agent's phase."""
        self._write(0, phase)

    def codes(self) -> list[int]:
        """Return the nonzero exit codes of the ranks, in the order of local ranks."""
        return [code for code in self._numbers()[1:] if code != EXIT_DONE]

    def leave(self, local_rank: int, code: int) -> None:
        """Publish a rank's exit code."""
        self._write(1 + local_rank, code)

    def _numbers(self) -> list[int]:
        data = self.path.read_bytes()
        return [int.from_bytes(data[i : i + _BYTES], "little") for i in range(0, len(data), _BYTES)]

    def _write(self, index: int, number: int) -> None:
        with suppress(OSError), open(self.path, "r+b", buffering=0) as file:  # the command may be gone
            os.pwrite(file.fileno(), number.to_bytes(_BYTES, "little"), index * _BYTES)


@contextmanager
def memory(data: bytes) -> Iterator[Path]:
    """Hold data in memory under a path that this user's other processes on the host can open, until this one ends."""
    descriptor = os.memfd_create("ddpexp")
    try:
        os.write(descriptor, data)
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def quiet_agent(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that silence torch's C++ logging in the agent, unless the user has chosen a level."""
    return {} if _LEVEL in environ else {_LEVEL: "FATAL", _LEVEL_IS_OURS: "1"}


def not_for_ranks() -> None:
    """Remove these variables in the agent, so that its ranks do not inherit them."""
    if os.environ.pop(_LEVEL_IS_OURS, None):
        os.environ.pop(_LEVEL, None)
