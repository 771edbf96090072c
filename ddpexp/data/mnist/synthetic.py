"""Drawn digits: the stand-in for MNIST on a machine that has neither the files nor a network.

Every digit is a few pen strokes. A stroke is a smooth curve through control points; a style lists the control points
of one way of writing a digit. A sample takes a style, moves its control points a little, puts them through a random
affine map and a smooth warp, and inks the curve with a pen of random width.

A change of anything in this file that moves a pixel must raise `EMBEDDED_VERSION` in `ddpexp.data.mnist.prepare`:
caches are named by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.order import STRIDE, mix, uniforms

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

SIDE = 28
CHUNK = 1024  # samples drawn at a time: bounds the memory at about 60 MB, and stays near the processor's caches
PEN_POINTS = 64  # dabs of the pen per digit: under one pixel apart, so that they melt into a line

# How much a sample may differ from its style. Chosen by measurement, so that a linear model stays well under the 92 %
# it reaches on MNIST while a small convolutional network learns the digits in two epochs.
HEIGHT = (18.5, 1.5)  # pixels: mean, standard deviation
ASPECT = (0.82, 0.12)  # width over height
ROTATION = 0.15  # radians
SHEAR = (0.12, 0.18)  # most hands lean to the right
SHIFT = 0.8  # pixels
JITTER = 0.075  # of the height, for each control point
WARP = 1.0  # pixels
PEN = (0.65, 1.15)  # pixels: standard deviation of one dab, smallest and largest
GAIN = (1.2, 2.2)  # over 1 the middle of a line is evenly full, with soft edges
INTENSITY = (0.75, 1.0)
NOISE = 0.05

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Style:
    """One way of writing a digit: control points in a unit box (x right, y down), and strokes as runs of their indices.

    Strokes that share a point meet there in a corner, also after the points were moved.
    """

    digit: int
    points: tuple[tuple[float, float], ...]
    strokes: tuple[tuple[int, ...], ...]


def _run(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


_OVAL = ((0.52, 0.0), (0.22, 0.13), (0.08, 0.5), (0.22, 0.88), (0.5, 1.0), (0.8, 0.86), (0.92, 0.5), (0.8, 0.13))
_TWO = ((0.14, 0.26), (0.28, 0.06), (0.58, 0.0), (0.82, 0.2), (0.7, 0.5), (0.4, 0.77))
_BELLY = ((0.42, 0.46), (0.72, 0.52), (0.86, 0.74), (0.56, 1.0), (0.12, 0.88))
_RING = ((0.8, 0.2), (0.52, 0.0), (0.2, 0.16), (0.2, 0.4), (0.48, 0.52), (0.74, 0.38))

STYLES = (
    Style(0, _OVAL, ((*_run(0, 7), 0),)),
    Style(0, (*_OVAL, (0.38, 0.08)), (_run(0, 8),)),
    Style(0, ((0.66, 0.1), *_OVAL, (0.4, 0.04)), (_run(0, 9),)),
    Style(1, ((0.5, 0.0), (0.51, 0.5), (0.5, 1.0)), (_run(0, 2),)),
    Style(1, ((0.52, 0.0), (0.5, 0.5), (0.5, 1.0), (0.26, 0.24)), ((3, 0), _run(0, 2))),
    Style(
        1, ((0.52, 0.0), (0.5, 0.5), (0.5, 1.0), (0.28, 0.22), (0.22, 1.0), (0.8, 1.0)), ((3, 0), _run(0, 2), (4, 5))
    ),
    Style(2, (*_TWO, (0.12, 1.0), (0.5, 0.97), (0.9, 1.0)), (_run(0, 6), _run(6, 8))),
    Style(2, (*_TWO, (0.18, 0.98), (0.08, 0.84), (0.26, 0.78), (0.6, 0.98), (0.94, 0.92)), (_run(0, 10),)),
    Style(3, ((0.14, 0.14), (0.46, 0.0), (0.78, 0.2), *_BELLY), (_run(0, 3), _run(3, 7))),
    Style(3, ((0.14, 0.04), (0.48, 0.03), (0.82, 0.02), *_BELLY), (_run(0, 2), (2, 3), _run(3, 7))),
    Style(
        4,
        ((0.22, 0.0), (0.14, 0.3), (0.12, 0.56), (0.88, 0.54), (0.74, 0.04), (0.7, 1.0)),
        (_run(0, 2), (2, 3), (4, 5)),
    ),
    Style(4, ((0.64, 0.0), (0.08, 0.66), (0.92, 0.66), (0.64, 1.0)), ((0, 1), (1, 2), (0, 3))),
    Style(
        4,
        ((0.2, 0.02), (0.12, 0.36), (0.34, 0.54), (0.76, 0.4), (0.84, 0.02), (0.76, 0.5), (0.7, 1.0)),
        (_run(0, 3), _run(4, 6)),
    ),
    Style(
        5,
        ((0.86, 0.02), (0.28, 0.03), (0.2, 0.46), (0.52, 0.36), (0.84, 0.6), (0.72, 0.9), (0.4, 1.0), (0.1, 0.88)),
        ((0, 1), (1, 2), _run(2, 7)),
    ),
    Style(
        5,
        ((0.86, 0.04), (0.5, 0.02), (0.26, 0.16), (0.34, 0.4), (0.68, 0.5), (0.82, 0.76), (0.52, 1.0), (0.12, 0.9)),
        (_run(0, 7),),
    ),
    Style(
        6,
        ((0.7, 0.0), (0.34, 0.22), (0.13, 0.62), (0.28, 0.94), (0.6, 0.98), (0.82, 0.76), (0.64, 0.54), (0.16, 0.72)),
        (_run(0, 7),),
    ),
    Style(
        6,
        ((0.36, 0.0), (0.2, 0.4), (0.18, 0.78), (0.42, 1.0), (0.76, 0.88), (0.74, 0.6), (0.44, 0.56), (0.2, 0.74)),
        (_run(0, 7),),
    ),
    Style(7, ((0.12, 0.06), (0.88, 0.04), (0.56, 0.5), (0.4, 1.0)), ((0, 1), _run(1, 3))),
    Style(
        7,
        ((0.12, 0.06), (0.88, 0.04), (0.56, 0.5), (0.4, 1.0), (0.28, 0.52), (0.82, 0.5)),
        ((0, 1), _run(1, 3), (4, 5)),
    ),
    Style(7, ((0.12, 0.26), (0.14, 0.06), (0.88, 0.05), (0.6, 0.44), (0.44, 1.0)), ((0, 1), (1, 2), _run(2, 4))),
    Style(
        8,
        (
            (0.78, 0.18),
            (0.5, 0.0),
            (0.22, 0.18),
            (0.46, 0.46),
            (0.8, 0.74),
            (0.5, 1.0),
            (0.18, 0.78),
            (0.5, 0.48),
        ),
        ((*_run(0, 7), 0),),
    ),
    Style(
        8,
        (
            (0.5, 0.46),
            (0.76, 0.22),
            (0.5, 0.0),
            (0.24, 0.22),
            (0.84, 0.74),
            (0.5, 1.0),
            (0.16, 0.74),
        ),
        ((0, 1, 2, 3, 0), (0, 4, 5, 6, 0)),
    ),
    Style(9, (*_RING, (0.8, 0.5), (0.72, 1.0)), ((*_run(0, 5), 0), (0, 6, 7))),
    Style(9, (*_RING, (0.82, 0.6), (0.6, 0.98), (0.2, 0.92)), ((*_run(0, 5), 0), (0, 6, 7, 8))),
)


@dataclass(frozen=True)
class Pen:
    """The path of one style as matrices over its control points: where each dab falls, and how far the pen moves there.

    Shapes: place and move are (PEN_POINTS, control points).
    """

    digit: int
    points: Floats
    place: Floats
    move: Floats


def draw(num: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw `num` digits; sample i depends on (seed, i) alone, so a longer draw begins with the shorter one.

    The random numbers are integer arithmetic and the pixels are float64 rounded to bytes at the very end, so that the
    last bits in which machines differ do not show.

    Shapes: images (num, 28, 28), labels (num,).
    """
    pens = [_pen(style) for style in STYLES]
    images = np.empty((num, SIDE, SIDE), np.uint8)
    labels = np.empty(num, np.uint8)
    for start in range(0, num, CHUNK):
        part = slice(start, min(start + CHUNK, num))
        _draw_chunk(pens, _keys(seed, part.start, part.stop), images[part], labels[part])
    return images, labels


def _draw_chunk(pens: list[Pen], keys: Words, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
    """Draw one sample for each key into `images` and `labels`."""
    most = max(len(pen.points) for pen in pens)
    num = len(keys)
    choice = _words(keys, 0, 2)
    labels[:] = choice[:, 0] % np.uint64(10)
    traits = _normals(_words(keys, 2, 6))
    levels = uniforms(_words(keys, 8, 3))
    waves = uniforms(_words(keys, 11, 8))
    jitter = _normals(_words(keys, 19, 2 * most)).reshape(num, most, 2) * JITTER
    grains = _words(keys, 19 + 2 * most, SIDE * SIDE // 8).astype("<u8", copy=False)
    noise = grains.view(np.uint8).reshape(num, SIDE, SIDE)

    affine = _affine(traits)
    dabs = np.empty((num, PEN_POINTS, 2))
    length = np.empty((num, PEN_POINTS))
    for digit in range(10):
        own = [pen for pen in pens if pen.digit == digit]
        style = choice[:, 1] % np.uint64(len(own))
        for which, pen in enumerate(own):
            rows = np.flatnonzero((labels == digit) & (style == which))
            points = np.matmul(pen.points + jitter[rows, : len(pen.points)], affine[rows])
            dabs[rows] = np.matmul(pen.place, points)
            move = np.matmul(pen.move, points)
            length[rows] = np.sqrt(move[..., 0] ** 2 + move[..., 1] ** 2)
    dabs += (SIDE - 1) / 2 + SHIFT * traits[:, None, 4:6]
    dabs += _warp(dabs, waves)

    width = (PEN[0] + (PEN[1] - PEN[0]) * levels[:, 0])[:, None]
    gain = (GAIN[0] + (GAIN[1] - GAIN[0]) * levels[:, 1])[:, None]
    # A Gaussian dab is a product of one over x and one over y: the sum over all dabs is one matrix product per image.
    reach = (np.arange(SIDE) - dabs[..., None]) / width[..., None, None]
    reach *= reach
    reach *= -0.5
    np.exp(reach, out=reach)
    across, down = reach[:, :, 0], reach[:, :, 1]
    down *= (gain * length / (width * math.sqrt(2 * math.pi)))[..., None]
    ink = np.matmul(down.transpose(0, 2, 1), across)
    np.minimum(ink, 1.0, out=ink)
    ink *= (INTENSITY[0] + (INTENSITY[1] - INTENSITY[0]) * levels[:, 2])[:, None, None]
    # Noise scales the ink and leaves bare paper black, as in MNIST.
    ink *= 1.0 + NOISE * (noise / 127.5 - 1.0)
    images[:] = np.floor(np.minimum(ink, 1.0) * 255.0 + 0.5)


def _affine(traits: Floats) -> Floats:
    """Make the maps from the unit box to pixels, for row vectors (x, y) around the middle.

    Shapes: traits (num, 6) standard normals, result (num, 2, 2).
    """
    traits = np.clip(traits, -2.5, 2.5)  # a digit must stay on its image
    tall = HEIGHT[0] + HEIGHT[1] * traits[:, 0]
    wide = tall * (ASPECT[0] + ASPECT[1] * traits[:, 1])
    lean = SHEAR[0] + SHEAR[1] * traits[:, 2]
    cos, sin = np.cos(ROTATION * traits[:, 3]), np.sin(ROTATION * traits[:, 3])
    # x' = wide * x - lean * tall * y (y runs down: leaning right moves the top right), then rotated.
    result = np.empty((len(traits), 2, 2))
    result[:, 0, 0] = wide * cos
    result[:, 0, 1] = wide * sin
    result[:, 1, 0] = tall * (-lean * cos - sin)
    result[:, 1, 1] = tall * (-lean * sin + cos)
    return result


def _warp(dabs: Floats, waves: Floats) -> Floats:
    """Bend the paper: each coordinate moves by one slow sine wave in a random direction.

    Shapes: dabs (num, PEN_POINTS, 2), waves (num, 8) uniform on [0, 1), result as dabs.
    """
    result = np.empty_like(dabs)
    for axis in range(2):
        high, along, phase, strength = (waves[:, 4 * axis + column, None] for column in range(4))
        angle = (high - 0.5) * dabs[..., 0] + (along - 0.5) * dabs[..., 1]
        result[..., axis] = WARP * (0.5 + strength) * np.sin(0.6 * angle + 2 * math.pi * phase)
    return result


def _pen(style: Style) -> Pen:
    """Work out the path of a style, with the dabs shared among its strokes by their length."""
    points = np.array(style.points) - 0.5
    spans = [float(np.linalg.norm(np.diff(points[list(stroke)], axis=0), axis=1).sum()) for stroke in style.strokes]
    ends = np.floor(np.cumsum([0.0, *spans]) / sum(spans) * PEN_POINTS + 0.5).astype(int)
    place = np.zeros((PEN_POINTS, len(points)))
    move = np.zeros_like(place)
    for stroke, start, stop in zip(style.strokes, ends[:-1], ends[1:], strict=True):
        along, step = _curve(len(stroke), int(stop - start))
        for column, point in enumerate(stroke):
            place[start:stop, point] += along[:, column]
            move[start:stop, point] += step[:, column]
    return Pen(style.digit, points, place, move)


def _curve(num_points: int, num_dabs: int) -> tuple[Floats, Floats]:
    """Weights of a Catmull-Rom curve through the points, and of its step from one dab to the next.

    Shapes: both (num_dabs, num_points).
    """
    time = (np.arange(num_dabs) + 0.5) / num_dabs * (num_points - 1)
    piece = np.minimum(time.astype(int), num_points - 2)
    t = (time - piece)[:, None]
    cubic = np.array([[0, -1, 2, -1], [2, 0, -5, 3], [0, 1, 4, -3], [0, 0, -1, 1]]) / 2  # neighbours by powers of t
    weights = (t ** np.arange(4)) @ cubic.T
    slopes = (np.arange(1, 4) * t ** np.arange(3)) @ cubic[:, 1:].T * (num_points - 1) / num_dabs
    # The curve's ends lack a neighbour: it is the mirror image, 2 * end - next.
    place = np.zeros((num_dabs, num_points + 2))
    move = np.zeros_like(place)
    rows = np.arange(num_dabs)
    for neighbour in range(4):
        place[rows, piece + neighbour] = weights[:, neighbour]
        move[rows, piece + neighbour] = slopes[:, neighbour]
    mirror = np.eye(num_points + 2, num_points, -1)
    mirror[0, :2] += (2, -1)
    mirror[-1, -2:] += (-1, 2)
    return place @ mirror, move @ mirror


def _keys(seed: int, start: int, stop: int) -> Words:
    """One well-mixed word for each sample of the seed."""
    base = mix(np.array([seed & _MASK], np.uint64))
    return mix(base + np.arange(start, stop, dtype=np.uint64) * STRIDE)


def _words(keys: Words, start: int, count: int) -> Words:
    """Random words number start, start + 1, ... of each sample.

    Shapes: (samples, count).
    """
    counters = np.arange(start + 1, start + count + 1, dtype=np.uint64) * STRIDE
    return mix(keys[:, None] + counters)


def _normals(words: Words) -> Floats:
    """Turn words into nearly normal numbers, mean 0 and variance 1: the sum of four 16-bit uniforms.

    Integer sums, where a logarithm or a sine could differ in its last bit between machines.
    """
    quarters = ((words >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48))
    total: Floats = np.zeros(words.shape)
    for quarter in quarters:
        total += quarter
    total -= 131070.0  # four times the mean of 0 ... 65535
    total *= math.sqrt(3.0) / 65536.0
    return total
