"""The interface of a remote logger, and the values that it gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key

END_SECONDS = 10.0
"""How long the end of a run waits for a remote logger that has no `end_seconds` of its own."""


@dataclass(frozen=True)
class Keys:
    """The keys of every remote logger, in a configuration; its class gets the others."""

    end_seconds: Annotated[float, Key(at_least=0, below=math.inf)] = END_SECONDS
    checkpoint: Literal["best", "last"] | None = None

    def check(self, experiment: ExperimentSettings, where: str) -> None:
        """Check that the best checkpoint is defined where it is to be sent.

        Raises:
            RefusedError: it is not.
        """
        if self.checkpoint == "best" and experiment.trainer.keep_best is None:
            raise RefusedError(
                "needs a metric that chooses the best checkpoint",
                key=f"{where}.checkpoint",
                value="best",
                suggestion=f"Type trainer.keep_best=min:eval/loss, for example, or use {where}.checkpoint=last.",
            )


class NotReadyError(Exception):
    """A remote logger cannot be used at all: its package or a login is missing. The message says what to do."""


@dataclass(frozen=True)
class RunInfo:
    """The run that is recorded."""

    path: Path  # the run directory
    recipe: str
    id: str  # made once for each logger of a run; the same at every start
    config: Mapping[str, Any]  # config.yaml: secrets are references such as ${oc.env:TOKEN}


@dataclass(frozen=True)
class Medium:
    """A text, an image or a histogram."""

    kind: Literal["text", "image", "histogram"]
    name: str
    text: str = ""
    png: bytes = b""
    counts: Sequence[int] = ()
    edges: Sequence[float] = ()  # one more than there are counts

    @property
    def key(self) -> str:
        """Return the name under which it is marked as sent, which differs from any scalar's."""
        return f"{self.kind}:{self.name}"

    @staticmethod
    def is_key(name: str) -> bool:
        """Return whether a name that is marked as sent belongs to a medium."""
        return name.startswith(("text:", "image:", "histogram:"))

    @staticmethod
    def name_of(key: str) -> str:
        """Return the name in a medium's key; a scalar's key is its name."""
        return key.partition(":")[2] if Medium.is_key(key) else key


@dataclass(frozen=True)
class Row:
    """The records of a step; they come in one row, unless the run was interrupted between them."""

    step: int
    epoch: float
    time: float  # seconds since 1970
    scalars: Mapping[str, float] = field(default_factory=dict)
    media: Sequence[Medium] = ()

    def after(self, sent: Mapping[str, int]) -> Row:
        """Return the unsent part of this row; `sent` is the last step that was sent, by name."""
        scalars = {name: value for name, value in self.scalars.items() if self.step > sent.get(name, -1)}
        media = [medium for medium in self.media if self.step > sent.get(medium.key, -1)]
        return Row(self.step, self.epoch, self.time, scalars, media)

    @property
    def names(self) -> list[str]:
        """Return the names of its records, as they are marked as sent."""
        return [*self.scalars, *(medium.key for medium in self.media)]


class Remote:
    """A logger on another machine, such as a tracker's server: the base class.

    The class that `_target_` of a logger names is called with a `RunInfo` and the keys beside `_target_`, in a process
    of its own that does not import torch. Where a method raises, the object is discarded and a new one is made a while
    later, so that an outage delays this logger and nothing else.
    """

    # Keys that say to whom records go: their values in a run directory are not trusted.
    restate_on_resume: ClassVar[Sequence[str]] = ()

    @classmethod
    def check(cls, experiment: ExperimentSettings, where: str) -> None:
        """Check the logger, whose key is `where`, against the rest of the configuration.

        Raises:
            RefusedError: they contradict each other; names the keys.
        """

    def destination(self) -> str:
        """Return where this sends to, without opening it; everything is sent again to a new destination."""
        return ""

    def open(self) -> None:
        """Create the remote run of this run's `id`, or continue it.

        Raises:
            NotReadyError: that is useless to try again.
        """

    def arrived(self, sent: Mapping[str, int], sending: Mapping[str, int]) -> Mapping[str, int]:
        """Return the last step that has arrived, by name, of names for which the remote side can answer that; -1: none.

        `sent` are the last steps that this process knows to have arrived, and `sending` those that it may have sent
        before it was last interrupted. Without an answer for a name `sent` counts, and later steps are sent again.
        """
        return {}

    def send(self, row: Row) -> None:
        """Send a row, or keep it for `flush`. Rows come in order.

        On return it has arrived, or `arrived` would report that it has not, or `flush` will send it.
        """

    def flush(self) -> None:
        """Send the rows that `send` has kept; called after at most 100 of them, and before they count as sent."""

    def send_checkpoint(self, folder: Path, step: int) -> None:
        """Send the folder of a checkpoint as an artifact; called where a key `checkpoint` asks for one."""

    def best(self, step: int, metric: str, value: float) -> None:
        """Send the best step of a run that is done, by its trainer.keep_best; it may be sent again."""

    def close(self, done: bool) -> None:
        """Send remaining records and end the remote run; `done`: training is complete, and was not interrupted."""
