"""Loggers of a run: rank zero records, the other ranks hold one that does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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

    def image(self, name: str, pixels: Any, step: int) -> None:
        """Record an image. Shapes: (height, width, 3) uint8.

        The logger that a run hands to a task or a callback takes pictures of PIL, arrays and tensors, of bytes or of
        floats from 0 to 1, in grey, RGB or RGBA, with their channels first or last. Each destination gets the shape
        above.
        """

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Record the distribution of values at a step. Shapes: any."""

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Record the hyperparameters, once, at the start."""

    def best(self, step: int, metric: str, value: float) -> None:
        """Record the best step of a run by its trainer.keep_best, once, when it is finished."""

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
