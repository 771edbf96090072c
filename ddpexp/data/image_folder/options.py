"""How images are cut and changed, as configured: the keys of `data=image_folder` below the cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from ddpexp.data.images.files import check_norm
from ddpexp.errors import RefusedError

MOST_PIXELS = 4096
_MARGIN = 8 / 7  # of what is stored or shown to what is cut out of it: 256 pixels for 224
_WORTHWHILE = 1.5  # times the side in the cache: less is not worth the time to reduce an image, and its detail
_MOST_MAGNITUDE = 30


class StoredSize(NamedTuple):
    """How large images are in the cache: those whose shortest side is above `largest` are reduced to `side`.

    Units: pixels.
    """

    side: int
    largest: int


@dataclass(frozen=True)
class TransformOptions:
    """The transforms of training and evaluation; see conf/data/image_folder.yaml."""

    size: int = 224
    eval_size: int | Literal["auto"] = "auto"
    scale: tuple[float, ...] = (0.08, 1.0)
    ratio: tuple[float, ...] = (0.75, 1.3333)
    flip: bool = True
    color_jitter: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    rand_augment: int = 0
    rand_augment_magnitude: int = 9
    mixup: float = 0.0
    cutmix: float = 0.0
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    channels: int = 3
    augment_on: Literal["host", "device"] = "host"
    sizes: tuple[tuple[int, ...], ...] = ()  # of training images, each with the epoch from which on it counts

    def resolved(self) -> TransformOptions:
        """Return the options without `auto`, checked. Raises: RefusedError."""
        if self.augment_on not in ("host", "device"):
            raise RefusedError(key="data.augment_on", value=self.augment_on, suggestion="Use host or device.")
        eval_size = math.ceil(self.size * _MARGIN) if self.eval_size == "auto" else self.eval_size
        if not self.size <= eval_size <= MOST_PIXELS:
            raise RefusedError(
                f"is smaller than data.size={self.size}, the size of the crop",
                key="data.eval_size",
                value=eval_size,
                suggestion=f"Use {self.size} to {MOST_PIXELS} pixels.",
            )
        self._check_sizes()
        for key, pair, most in (("scale", self.scale, 1.0), ("ratio", self.ratio, math.inf)):
            if len(pair) != 2 or not 0 < pair[0] <= pair[1] <= most:
                example = "[0.08, 1.0]" if key == "scale" else "[0.75, 1.3333]"
                raise RefusedError(
                    "is not a range",
                    key=f"data.{key}",
                    value=list(pair),
                    suggestion=f"Use two numbers such as {example}.",
                )
        self._check_strengths()
        check_norm(self.mean, self.std, (1, 3))
        mean, std = (tuple(values * self.channels if len(values) == 1 else values) for values in (self.mean, self.std))
        return replace(self, eval_size=eval_size, mean=mean[: self.channels], std=std[: self.channels])

    def _check_sizes(self) -> None:
        for pair in self.sizes:
            if len(pair) != 2 or pair[0] < 0 or not 1 <= pair[1] <= self.size:
                raise RefusedError(
                    f"holds {list(pair)}",
                    key="data.size_from_epoch",
                    suggestion=f"Use pairs of an epoch, from 0, and an image size, at most data.size={self.size} as "
                    f"in evaluations, such as [[0, {self.size // 2}]].",
                )

    def size_in(self, epoch: int) -> int:
        """Return the height and width of training images in an epoch. Units: pixels."""
        return next((size for first, size in sorted(self.sizes, reverse=True) if first <= epoch), self.size)

    def _check_strengths(self) -> None:
        if len(self.color_jitter) != 4 or not all(0 <= one <= 1 for one in self.color_jitter[:3]) or not (
            0 <= self.color_jitter[3] <= 0.5
        ):  # fmt: skip
            raise RefusedError(
                key="data.color_jitter",
                value=list(self.color_jitter),
                suggestion="Use four strengths, of brightness, contrast and saturation from 0 to 1 and of "
                "hue from 0 to 0.5, such as [0.4, 0.4, 0.4, 0.1].",
            )
        for key, number, most in (
            ("rand_augment", self.rand_augment, 10),
            ("rand_augment_magnitude", self.rand_augment_magnitude, _MOST_MAGNITUDE),
        ):
            if not 0 <= number <= most:
                raise RefusedError(key=f"data.{key}", value=number, suggestion=f"Use 0 to {most}.")

    def stored_size(self, cache_size: int | Literal["auto"]) -> StoredSize:
        """Return how large images are in the cache. Raises: RefusedError."""
        if cache_size == "auto":
            side = math.ceil(self.size * _MARGIN)
            return StoredSize(side, int(side * _WORTHWHILE))
        if not 1 <= cache_size <= MOST_PIXELS:
            raise RefusedError(
                key="data.cache_size", value=cache_size, suggestion=f"Use auto, or 1 to {MOST_PIXELS} pixels."
            )
        return StoredSize(cache_size, cache_size)

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def options_of(prepared: Mapping[str, Any]) -> TransformOptions:
    """Return the options that a preparation has stored."""
    values: dict[str, Any] = {}
    for field in fields(TransformOptions):
        value = prepared[field.name]
        values[field.name] = tuple(value) if isinstance(value, list) else value
    values["sizes"] = tuple(tuple(pair) for pair in values["sizes"])
    return TransformOptions(**values)
