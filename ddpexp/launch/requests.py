"""Requests to a running run: files in its directory, which another command writes and the leading command answers.

Each is a JSON object in a file of its own, in which the answer is added: a file that exists is seen at once on other
hosts too, a new one on some network file systems after up to a minute.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ddpexp.settings.profile import MOST_STEPS
from ddpexp.system import files

Kind = Literal["profile", "save", "stacks", "stop"]
State = Literal["waits", "agreed", "done", "ended"]
NAME = re.compile(r"[0-9a-f]{16}\.json")
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Request:
    """What a person asks of a run."""

    kind: Kind
    steps: int = 1  # to profile

    def __post_init__(self) -> None:
        """Check what a file says.

        Raises:
            ValueError: it is none of the requests.
        """
        if self.kind not in get_args(Kind) or type(self.steps) is not int or not 1 <= self.steps <= MOST_STEPS:
            raise ValueError(f"no request: {self.kind} {self.steps}")


@dataclass(frozen=True)
class Answer:
    """What the run has done of it so far.

    Attributes:
        state: `waits`: until the training has begun. `agreed`: after `step`. `done`. `ended`: the run has ended before.
        step: After which all ranks save, stop, or begin to profile; None: at once, where there is nothing to save.
        end: The last step of a profile.
        missing: The number of ranks whose profile could not be written.
    """

    state: State
    step: int | None = None
    end: int | None = None
    missing: int = 0


def write(path: Path, request: Request, answer: Answer | None = None) -> None:
    """Write or replace the file of a request. Raises OSError."""
    files.write_json(path, {**asdict(request), "answer": None if answer is None else asdict(answer)})


def read(path: Path, owner: int | None = None) -> tuple[Request, Answer | None]:
    """Read the file of a request, of which this user, root, or the user `owner` must be the owner.

    Raises: OSError, ValueError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid(), owner):
            raise ValueError("not a file of this user")
        content = files.parse_json(os.read(descriptor, _MOST_BYTES))
    finally:
        os.close(descriptor)
    if not isinstance(content, Mapping):
        raise ValueError("not an object")
    request = Request(content.get("kind"), content.get("steps", 1))  # type: ignore[arg-type]
    answer = content.get("answer")
    return request, None if answer is None else _answer_of(answer)


def _answer_of(fields: Any) -> Answer:
    if not isinstance(fields, Mapping) or fields.get("state") not in get_args(State):
        raise ValueError("no answer")
    step, end, missing = (fields.get(name) for name in ("step", "end", "missing"))
    if not all(number is None or type(number) is int for number in (step, end)) or type(missing) is not int:
        raise ValueError("no answer")
    return Answer(fields["state"], step, end, missing)
