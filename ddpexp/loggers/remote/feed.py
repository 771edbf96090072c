"""Feed a remote logger; the run directory stores which steps it has, so that none is sent twice and none is lost."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpexp.loggers.remote.base import NotReadyError, Remote, Row
from ddpexp.loggers.remote.source import Records
from ddpexp.system.files import read_json, sha256, write_json
from ddpexp.system.text import one_line

FOLDER = "remote"  # of the marks, in the run directory
_BATCH = 100  # rows between two marks
_LONGEST = 300  # characters of a library's error
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # between two attempts to reach a logger. Units: seconds


@dataclass
class Mark:
    """The last step of each name that a remote logger has received."""

    path: Path
    id: str
    sent: dict[str, int] = field(default_factory=dict)
    sending: dict[str, int] = field(default_factory=dict)  # at least `sent`; between the two it may have arrived
    checkpoint: int | None = None  # the step of the checkpoint that was sent
    ended: bool = False  # the remote run has ended as done
    destination: str = ""  # a hash of what the logger says

    @classmethod
    def of(cls, run_dir: Path, name: str) -> Mark:
        """Read the mark of the logger `name`, or make a new one.

        Raises OSError and ValueError.
        """
        path = run_dir / FOLDER / f"{name}.json"
        for temporary in path.parent.glob(f".{path.name}.*"):  # of a process that was killed while it wrote
            temporary.unlink(missing_ok=True)
        try:
            values = read_json(path)
            sent, sending = (
                {str(name): int(step) for name, step in values[key].items()} for key in ("sent", "sending")
            )
            checkpoint = values["checkpoint"]
            ended = bool(values["ended"])
            destination = values["destination"]
            return cls(path, str(values["id"]), sent, sending, checkpoint, ended, destination)
        except FileNotFoundError:
            mark = cls(path, secrets.token_hex(4))
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is damaged: remove it, and everything is sent again") from None
        path.parent.mkdir(exist_ok=True)
        mark.write()
        return mark

    def write(self) -> None:
        """Replace the file. Raises OSError."""
        write_json(self.path, {name: value for name, value in vars(self).items() if name != "path"})

    def move_to(self, destination: str) -> None:
        """Forget what was sent to another destination."""
        destination = sha256(destination)[:16]
        if self.destination not in ("", destination):
            self.sent = {}
            self.sending = {}
            self.checkpoint = None
            self.ended = False
        self.destination = destination


class Feed:
    """The records of a run that a remote logger lacks, and their delivery."""

    def __init__(
        self, records: Records, mark: Mark, connect: Callable[[str], Remote], report: Callable[[str], None]
    ) -> None:
        """`connect` makes the remote logger of an id; `report` is called with messages for the user."""
        self.mark = mark
        self.num_sent = 0  # rows
        self.problem: str | None = None  # why the last attempt failed
        self.gave_up = False  # a later attempt cannot succeed
        self._records = records
        self._connect = connect
        self._report = report
        self._pending: list[Row] = []
        self._final = False  # the pending rows include the newest step
        self._remote: Remote | None = None
        self._is_lost = False  # the open remote logger failed, and may have lost rows
        self._at: Mapping[str, int] = {}
        self._retry_at, self._pause = 0.0, _FIRST_PAUSE

    def count_unsent(self) -> int:
        """Return how many rows are not sent, without sending any; everything that is recorded counts."""
        self.mark.move_to(self._connect(self.mark.id).destination())
        self._pending += self._records.take(final=True)
        return self.num_left

    @property
    def num_left(self) -> int:
        """Return how many rows that were read are not sent."""
        return sum(bool(row.after(self.mark.sent).names) for row in self._pending)

    def push(self, final: bool = False) -> bool:
        """Send the complete rows, or with `final` all rows; return whether none of them is left."""
        self._final = final
        self._pending += self._records.take(final)
        if self.gave_up or time.monotonic() < self._retry_at:
            return False
        if not self._pending and self._remote is not None:
            return True
        try:
            self._send()
        except Exception as error:
            self._fail(error)
            return False
        if self.problem is not None:
            self.problem, self._pause = None, _FIRST_PAUSE
            self._report("has everything again")
        return True

    def end(self, done: bool, checkpoint: tuple[Path, int] | None, best: tuple[int, str, float] | None = None) -> bool:
        """End the remote run, with the checkpoint that is to be sent; return whether that succeeded.

        `best` is the step, the metric and the value by trainer.keep_best.
        """
        try:
            remote = self._open()
            if checkpoint is not None and self.mark.checkpoint != checkpoint[1]:
                remote.send_checkpoint(*checkpoint)
                self.mark.checkpoint = checkpoint[1]
            if best is not None:
                remote.best(*best)
            remote.close(done)
            self.mark.ended = done
            self.mark.write()
        except Exception as error:
            self._fail(error)
            return False
        self._remote = None
        return True

    def _open(self) -> Remote:
        if self._remote is None:
            remote = self._connect(self.mark.id)
            self.mark.move_to(remote.destination())
            remote.open()
            sent, sending = self.mark.sent, self.mark.sending
            self._at = {**sent, **remote.arrived(sent, sending)}
            if self._is_lost:
                self._records.rewind()
                self._pending = self._records.take(self._final)
            self._remote, self._is_lost = remote, False
        return self._remote

    def _send(self) -> None:
        remote = self._open()
        while self._pending:
            batch = self._pending[:_BATCH]
            rows = [row for row in (row.after(self._at) for row in batch) if row.names]
            at = {**self._at, **{name: row.step for row in rows for name in row.names}}
            if rows:
                self.mark.sending = {**self.mark.sending, **at}
                self.mark.write()
            for row in rows:
                remote.send(row)
            remote.flush()
            self._at = self.mark.sent = self.mark.sending = at
            if rows:
                self.mark.write()
            self.num_sent += len(rows)
            del self._pending[: len(batch)]

    def _fail(self, error: Exception) -> None:
        self._is_lost |= self._remote is not None
        self._remote = None
        self._retry_at, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self.gave_up = isinstance(error, NotReadyError)
        first, self.problem = self.problem is None, reason_of(error)
        if self.gave_up:
            self._report(f"records nothing: {self.problem}")
        elif first:
            self._report(f"waits ({self.problem}): what it lacks stays in metrics.jsonl, and is sent later")

    def retry_now(self) -> None:
        """Do not wait any longer before the next attempt than a moment."""
        self._pause = _FIRST_PAUSE
        self._retry_at = min(self._retry_at, time.monotonic() + _FIRST_PAUSE)


def reason_of(error: Any) -> str:
    """Return an error as one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = one_line(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
    return text if isinstance(error, NotReadyError) else f"{type(error).__name__}: {text}"
