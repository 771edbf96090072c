"""Loggers of a run: rank zero writes, the other ranks hold one that does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddpexp.system.secrets import masked

if TYPE_CHECKING:
    from torch import Tensor


class Logger(Protocol):
    """A destination for scalars, text and images."""

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Record named values at a step."""
        ...

    def text(self, name: str, text: str) -> None:
        """Record a text (Markdown) once."""
        ...

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Record an image. Shapes: (height, width, 3) uint8."""
        ...

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Record the hyperparameters, once, at the start."""
        ...

    def done(self) -> None:
        """Record that the run is finished."""
        ...

    def flush(self) -> Mapping[Path, int]:
        """Write everything out; return the files and their sizes. Units: bytes."""
        ...

    def close(self) -> None:
        """Flush and close; nothing is recorded afterwards."""
        ...


Tracker = Logger  # deprecated alias for recipes that annotate `on_eval` with it; to be removed in the next release


class Null:
    """Record nothing: the logger of every rank except zero."""

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def text(self, name: str, text: str) -> None:
        """Do nothing."""

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Do nothing."""

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Do nothing."""

    def done(self) -> None:
        """Do nothing."""

    def flush(self) -> Mapping[Path, int]:
        """Return no files."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Many:
    """Record everything with several loggers."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        """Forward to the loggers, in this order."""
        self._loggers = tuple(loggers)

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Forward to each, with secrets masked in the names, which the recipe chooses."""
        values = {_masked(name): value for name, value in values.items()}
        for logger in self._loggers:
            logger.scalars(step, epoch, values)

    def text(self, name: str, text: str) -> None:
        """Forward to each."""
        for logger in self._loggers:
            logger.text(name, text)

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Forward to each."""
        for logger in self._loggers:
            logger.image(name, pixels, step)

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Forward to each."""
        for logger in self._loggers:
            logger.hyperparameters(values)

    def done(self) -> None:
        """Forward to each."""
        for logger in self._loggers:
            logger.done()

    def flush(self) -> Mapping[Path, int]:
        """Flush each; return the files of all."""
        return {path: size for logger in self._loggers for path, size in logger.flush().items()}

    def close(self) -> None:
        """Close each."""
        for logger in self._loggers:
            logger.close()


@lru_cache(1024)
def _masked(name: str) -> str:
    """Mask secrets in a name; cached, since searching the environment takes about as long as a small step."""
    return masked(name)
