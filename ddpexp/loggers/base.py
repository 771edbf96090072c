"""Record what happens in a run: rank zero writes, the others hold an object that does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddpexp.system.secrets import masked

if TYPE_CHECKING:
    from torch import Tensor


class Tracker(Protocol):
    """Where scalars, text and images go."""

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Record named numbers at a step."""
        ...

    def text(self, name: str, text: str) -> None:
        """Record a text (Markdown) once."""
        ...

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Record a picture. Shapes: (height, width, 3) uint8."""
        ...

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Record what was chosen, once, at the start."""
        ...

    def done(self) -> None:
        """Record that the run has reached its end."""
        ...

    def flush(self) -> Mapping[Path, int]:
        """Bring everything to the files, and tell how many bytes of which files that is."""
        ...

    def close(self) -> None:
        """Flush, and record nothing more."""
        ...


class Null:
    """Records nothing: what every rank but zero holds."""

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
        """Name no file."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Many:
    """Records everything in several places."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        """Hold the trackers, in the order in which they are told."""
        self._trackers = tuple(trackers)

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Tell each; the names, which the recipe chooses, without secrets."""
        values = {_masked(name): value for name, value in values.items()}
        for tracker in self._trackers:
            tracker.scalars(step, epoch, values)

    def text(self, name: str, text: str) -> None:
        """Tell each."""
        for tracker in self._trackers:
            tracker.text(name, text)

    def image(self, name: str, pixels: Tensor, step: int) -> None:
        """Tell each."""
        for tracker in self._trackers:
            tracker.image(name, pixels, step)

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        """Tell each."""
        for tracker in self._trackers:
            tracker.hyperparameters(values)

    def done(self) -> None:
        """Tell each."""
        for tracker in self._trackers:
            tracker.done()

    def flush(self) -> Mapping[Path, int]:
        """Flush each, and name the files of all."""
        return {path: size for tracker in self._trackers for path, size in tracker.flush().items()}

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()


@lru_cache(1024)
def _masked(name: str) -> str:
    """Leave secrets out of a name.

    To look through the environment for each name of each record would take as long as steps.
    """
    return masked(name)
