"""The exceptions of `ddpexp.run` and `ddpexp.sweep`, beside `RefusedError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddpexp.errors import DdpexpError, Failure

if TYPE_CHECKING:
    from ddpexp.cli.api.opened import Run
    from ddpexp.cli.api.opened_sweep import Sweep


class RunFailedError(DdpexpError):
    """A run, or jobs of a sweep, failed; the text is the sentence that the command would print.

    Attributes:
        run: The run, if one was started; open to everything that `ddpexp.open_run` offers.
        sweep: The sweep, if one was started.
        failure: The worker that failed, with `rank`, `host`, `step`, `phase`, `kind`, `message` and `traceback`; None
            if no single worker is the cause.
        exit_code: The exit code of the command.
        reason, key, value, suggestion, place: Those of the error that the command or its worker raised.
    """

    def __init__(
        self,
        sentence: str,
        exit_code: int,
        failure: Failure | None,
        run: Run | None = None,
        sweep: Sweep | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        """Store the attributes; `fields` are those of the error that the command or its worker raised."""
        super().__init__(**(fields or {"reason": sentence}))
        self._sentence = sentence
        self.exit_code = exit_code
        self.failure = failure
        self.run = run
        self.sweep = sweep

    def __str__(self) -> str:
        return self._sentence

    @property
    def rank(self) -> int | None:
        """The rank that failed first."""
        return self.failure.rank if self.failure is not None else None

    @property
    def traceback(self) -> str | None:
        """The traceback of the rank that failed first."""
        return self.failure.traceback if self.failure is not None else None


class RunInterruptedError(KeyboardInterrupt):
    """A signal ended a run or a sweep, usually the notebook's interrupt or Ctrl-C; the text has the command to resume.

    A KeyboardInterrupt, so that `except Exception` does not discard it and a notebook stops.

    Attributes:
        run: The run, if one was started. Everything up to its last checkpoint is saved.
        sweep: The sweep, if one was started.
        signum: The signal's number.
    """

    def __init__(self, sentence: str, signum: int, run: Run | None = None, sweep: Sweep | None = None) -> None:
        """Store the attributes."""
        super().__init__(sentence)
        self.signum = signum
        self.run = run
        self.sweep = sweep


class WorkerTraceback(Exception):
    """The traceback of a failed worker, as the cause of a `RunFailedError`."""

    def __init__(self, text: str) -> None:
        """Store the text."""
        super().__init__(text)

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0].rstrip()}\n"""'
