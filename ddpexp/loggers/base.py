"""Loggers of a run: rank zero records, the other ranks hold one that does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ddpexp.errors import DdpexpError
from ddpexp.system.secrets import masked_tree, masker

if TYPE_CHECKING:
    from torch import Tensor


class Logger:
    """Base class of destinations for scalars, text, images and histograms; its methods record nothing.

    The class that `_target_` of a logger names is called with the run directory (a Path) and the keys beside
    `_target_`, on rank zero only; the other ranks hold this one. Its class method `check(experiment, where)`, if there
    is one, is called before, with the settings of the run and its own key.
    """

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Record named values at a step."""

    def text(self, name: str, text: str) -> None:
        """Record a text (Markdown) once."""

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Record an image. Shapes: (height, width, 3) uint8."""

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Record the distribution of values at a step. Shapes: any."""

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Record the hyperparameters, once, at the start."""

    def done(self) -> None:
        """Record that the run is finished."""

    def close(self) -> None:
        """Flush and close; nothing is recorded afterwards."""


@runtime_checkable
class Truncatable(Protocol):
    """A logger whose records are truncated when a run resumes, so that every step is recorded once.

    `ddpexp.loggers.append_file` does both for a file that only grows.
    """

    def position(self) -> Mapping[str, Any]:
        """Flush, and return how far it has recorded: values that JSON can hold, which a checkpoint stores.

        The length of a file in bytes stands under the file's path relative to the run directory; such a file is on
        disk before the checkpoint counts as complete. Names are shared with the other loggers of the run.
        """
        ...

    def truncate(self, position: Mapping[str, Any] | None, step: int) -> None:
        """Remove records beyond a position, before anything else is recorded.

        `position` is what the checkpoint of `step` stores of all loggers; None at step 0, when a run starts from the
        beginning, possibly in the directory of an attempt that left no checkpoint.
        """
        ...


class LoggerCollection(Logger):
    """Record everything with several loggers, which get all names and texts with their secrets masked."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        """Forward to the loggers, in this order."""
        self._loggers = tuple(loggers)

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Forward to each."""
        mask = masker()
        values = {mask(name): value for name, value in values.items()}
        for logger in self._loggers:
            logger.scalars(step, epoch, values)

    def text(self, name: str, text: str) -> None:
        """Forward to each."""
        mask = masker()
        name, text = mask(name), mask(text)
        for logger in self._loggers:
            logger.text(name, text)

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Forward to each."""
        name = masker()(name)
        for logger in self._loggers:
            logger.image(name, pixels, step)

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Forward to each."""
        name = masker()(name)
        for logger in self._loggers:
            logger.histogram(name, values, step)

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Forward to each."""
        values = masked_tree(values)
        for logger in self._loggers:
            logger.hyperparameters(values)

    def done(self) -> None:
        """Forward to each."""
        for logger in self._loggers:
            logger.done()

    def position(self) -> Mapping[str, Any]:
        """Flush each that can be truncated; return the positions of all."""
        positions: dict[str, Any] = {}
        for logger in self._loggers:
            if isinstance(logger, Truncatable):
                position: object = logger.position()
                if not isinstance(position, Mapping):
                    raise DdpexpError(
                        f"returned {type(position).__name__}, where a mapping belongs, such as "
                        "{self.file.path.name: self.file.num_bytes}",
                        place=f"{type(logger).__name__}.position()",
                    )
                positions |= position
        return positions

    def truncate(self, position: Mapping[str, Any] | None, step: int) -> None:
        """Truncate each that can be."""
        for logger in self._loggers:
            if isinstance(logger, Truncatable):
                logger.truncate(position, step)

    def close(self) -> None:
        """Close each."""
        for logger in self._loggers:
            logger.close()
