"""Pictures for a trained model, cut and normalized as those of data=image_folder are in evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.image_folder.images import ImageFolder
from ddpexp.data.image_folder.options import StoredSize, TransformOptions
from ddpexp.data.image_folder.stores import Pixels
from ddpexp.data.inputs import Inputs, schema_of
from ddpexp.data.pictures import Pictures, pictures_of


def read(given: Any, known: Mapping[str, Any], /, **options: Any) -> Inputs:
    """Return pictures as samples. Raises: RefusedError."""
    names = {field.name for field in fields(TransformOptions)}
    chosen = TransformOptions(**{key: value for key, value in options.items() if key in names}).resolved()
    stored = chosen.stored_size(options.get("cache_size", "auto"))
    pictures = pictures_of(given, chosen.channels)
    sizes = np.array([pictures.size(number, stored) for number in range(len(pictures))], np.int64)
    labels = np.full(len(pictures), -1, np.int64)
    classes = schema_of(known).classes or ()
    store = _Given(pictures, sizes, stored, chosen.channels)
    return Inputs(ImageFolder(store, labels, chosen, len(classes)), pictures.names, pictures.is_one)


@dataclass(frozen=True)
class _Given:
    """Pictures that are decoded when they are read. Shapes: sizes (num_images, 2)."""

    pictures: Pictures
    sizes: NDArray[np.int64]
    stored: StoredSize
    channels: int

    def shapes(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.sizes[samples]

    def name(self, sample: int) -> str:
        return self.pictures.name(sample)

    def image(self, sample: int) -> Pixels:
        decoded = self.pictures.pixels(sample, self.channels, self.stored)
        return np.asarray(decoded).reshape(decoded.height, decoded.width, self.channels)
