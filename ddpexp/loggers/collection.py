"""Several loggers as one, which hands all of them names and texts without secrets, and pictures of one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpexp.errors import DdpexpError
from ddpexp.loggers.base import Logger, Truncatable
from ddpexp.system.pixels import rgb_of
from ddpexp.system.secrets import masked_tree, masker


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

    def image(self, name: str, pixels: Any, step: int) -> None:
        """Forward to each as (height, width, 3) uint8.

        Raises:
            DdpexpError: it is no picture.
        """
        name = masker()(name)
        image = torch.from_numpy(rgb_of(pixels, f"logger.image({name!r})"))
        for logger in self._loggers:
            logger.image(name, image, step)

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

    def best(self, step: int, metric: str, value: float) -> None:
        """Forward to each."""
        metric = masker()(metric)
        for logger in self._loggers:
            logger.best(step, metric, value)

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
