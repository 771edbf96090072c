"""Drawn pictures: the stand-in for CIFAR-10 on a machine that has neither the archive nor a network.

A picture is a shape of one of ten kinds, turned, of any size and place, in one color on another, both uneven and noisy.

A change of anything in this file that moves a pixel must raise `EMBEDDED_VERSION` in `ddpexp.data.cifar10.prepare`:
caches are named by it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.cifar10.classes import KINDS
from ddpexp.data.order import uniforms

Floats = NDArray[np.float64]

SIDE = 32

_CHUNK = 512  # pictures drawn at a time, which bounds the memory
_TRAITS = 18  # random numbers of a picture, besides its noise
_WORDS = _TRAITS + 3 * SIDE * SIDE // 8
_RADIUS = (6.0, 12.0)  # pixels
_SHIFT = 5.0  # pixels
_CONTRAST = 0.35  # least difference of the two colors in one channel, as a share of 255
_NOISE = 0.12  # as a share of 255


def draw(num: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw `num` pictures; picture i depends on (seed, i) alone, so a longer draw begins with the shorter one.

    Shapes: images (num, 3, 32, 32), labels (num,).
    """
    words = np.random.PCG64(seed)  # whose raw words numpy keeps as they are
    images, labels = np.empty((num, 3, SIDE, SIDE), np.uint8), np.empty(num, np.uint8)
    for start in range(0, num, _CHUNK):
        part = slice(start, min(start + _CHUNK, num))
        raw = words.random_raw((part.stop - part.start) * _WORDS).reshape(-1, _WORDS)
        labels[part] = raw[:, 0] % np.uint64(len(KINDS))
        traits = uniforms(raw[:, 1:_TRAITS])
        noise = raw[:, _TRAITS:].astype("<u8").view(np.uint8).reshape(-1, 3, SIDE, SIDE)
        images[part] = _pictures(labels[part], traits, noise)
    return images, labels


def _pictures(labels: NDArray[np.uint8], traits: Floats, noise: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Draw one picture for each label. Shapes: traits (num, 17) uniform on [0, 1), noise and result as images."""
    columns = [traits[:, number, None, None] for number in range(_TRAITS - 1)]
    down, across = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    radius = _RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * columns[0]
    x, y = across - _SHIFT * (2 * columns[1] - 1), down - _SHIFT * (2 * columns[2] - 1)
    angle = 2 * np.pi * columns[3]
    x, y = (np.cos(angle) * x + np.sin(angle) * y) / radius, (np.cos(angle) * y - np.sin(angle) * x) / radius
    inside = np.empty(x.shape)
    for kind in range(len(KINDS)):
        rows = np.flatnonzero(labels == kind)
        inside[rows] = np.clip(0.5 - _distance(kind, x[rows], y[rows]) * radius[rows], 0, 1)
    ground, ink = traits[:, 4:7], traits[:, 7:10]
    # The channel with the most different colors differs by enough to be seen.
    best = np.abs(ink - ground).argmax(1)
    rows = np.arange(len(labels))
    far = np.where(ground[rows, best] < 0.5, 1.0, -1.0) * _CONTRAST
    ink[rows, best] = np.where(np.abs(ink - ground)[rows, best] < _CONTRAST, ground[rows, best] + far, ink[rows, best])
    slope = (columns[10] - 0.5) * across / SIDE + (columns[11] - 0.5) * down / SIDE
    wave = 0.15 * columns[12] * np.sin((0.2 + columns[13]) * across + columns[14] * down + 6.28 * columns[15])
    shade = (slope * (1 - inside) + wave)[:, None]
    colors = ground[..., None, None] + (ink - ground)[..., None, None] * inside[:, None] + shade
    colors += _NOISE * (noise / 127.5 - 1)
    result: NDArray[np.uint8] = np.floor(np.clip(colors, 0, 1) * 255 + 0.5).astype(np.uint8)
    return result


def _distance(kind: int, x: Floats, y: Floats) -> Floats:
    """Return how far each place is outside of a shape of radius 1, in its units; below 0 inside."""
    middle, square = np.sqrt(x * x + y * y), np.maximum(np.abs(x), np.abs(y))
    name = KINDS[kind]
    if name == "disc":
        return middle - 0.9
    if name == "ring":
        return np.abs(middle - 0.75) - 0.18
    if name == "box":
        return square - 0.75
    if name == "frame":
        return np.abs(square - 0.65) - 0.17
    if name == "triangle":
        return np.maximum(np.abs(x) * 0.866 + y * 0.5, -y) - 0.5
    if name == "cross":
        return np.maximum(np.minimum(np.abs(x), np.abs(y)) - 0.22, square - 0.95)
    if name == "bars":
        return np.maximum(np.abs(np.abs(x) - 0.5) - 0.2, np.abs(y) - 0.85)
    if name == "half":
        return np.maximum(middle - 1.0, -y)
    if name == "moon":
        return np.maximum(middle - 0.95, 0.8 - np.sqrt((x - 0.55) ** 2 + y * y))
    return np.maximum(square - 0.8, -x * y / (np.abs(x) + np.abs(y) + 1e-9))
