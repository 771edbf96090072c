"""Pictures for a trained model, of the size and with the statistics of data=mnist, cifar10 and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddpexp.data.images.dataset import Images
from ddpexp.data.inputs import INPUT, Inputs, array_of, listed
from ddpexp.data.pictures import pictures_of
from ddpexp.errors import RefusedError


def read(given: Any, known: Mapping[str, Any], /, **_options: Any) -> Inputs:
    """Return pictures as samples, with -1 as their labels. Raises: RefusedError, if one is of another size."""
    channels, height, width = known["facts"]["shape"]
    if channels not in (1, 3):
        pixels, names, is_one = _bytes(given, (channels, height, width)), None, listed(given)[1]
    else:
        pictures = pictures_of(given, channels, (height, width))
        for number in range(len(pictures)):
            if (size := pictures.size(number)) != (height, width):
                raise RefusedError(
                    f"has {size[1]} x {size[0]} pixels, and the model was trained on {width} x {height}",
                    place=pictures.name(number),
                    suggestion="Cut out what it shows as in the training images, and resize it to their size.",
                )
        decoded = [np.asarray(pictures.pixels(number, channels)) for number in range(len(pictures))]
        pixels = np.stack(decoded).reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
        names, is_one = pictures.names, pictures.is_one
    labels = torch.full((len(pixels),), -1)
    tensor = torch.from_numpy(np.ascontiguousarray(pixels))
    return Inputs(Images(tensor, labels, tuple(known["mean"]), tuple(known["std"])), names, is_one)


def _bytes(given: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return arrays of pixels with other channels than those of pictures. Shapes: (n, *shape). Raises: RefusedError."""
    arrays = [array_of(value) for value in listed(given)[0]]
    if any(array is None or array.dtype != np.uint8 or array.shape != shape for array in arrays):
        raise RefusedError(
            "is no picture like those that the model was trained on",
            place=INPUT,
            suggestion=f"Give arrays of bytes (uint8) of shape {shape}, from Python: run.predict(array).",
        )
    return np.stack([array for array in arrays if array is not None])
