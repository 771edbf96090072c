"""Colours and line styles of the jobs in a sweep's plot, and their legend."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpexp.sweep.comparison import SEED, num_distinguished_pairs, varying
from ddpexp.sweep.rows import Row

LEGEND = 10  # entries that fit beside the curves
COLORS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#bb5566", "#997700", "#888888", "#222255")
"""Qualitative colours that are safe for colour-blind readers (Paul Tol's)."""
STYLES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.6, 1.2, 1.6)))
HUGE = 1e30  # larger values count as infinite
_RAMP_END = 0.9  # of viridis: the rest is too light for a line on white
_SPAN = 30.0  # largest by smallest value, from which on an axis is logarithmic
_FACTOR = 4.0  # the same, up to which it never is


@dataclass(frozen=True)
class Look:
    """How one job is drawn."""

    color: Any = COLORS[0]
    style: Any = STYLES[0]


@dataclass(frozen=True)
class Encoding:
    """What colours and line styles encode: the values of a key each, or the jobs themselves."""

    looks: Mapping[Path, Look]
    color_key: str | None = None
    colors: Mapping[str, Any] = field(default_factory=dict)  # entries of the legend; empty if there are too many
    scale: Any = None  # of numbers, if there are too many for a legend
    style_key: str | None = None
    styles: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Encoding:
        """Choose the encoding.

        The colour is the key that tells most jobs apart, the style another one with few values, at last the seed. Where
        jobs that differ in more than their seed would look alike, and are few, each has a colour of its own.
        """
        keys = [key for key in varying(rows) if key != SEED]
        values = {key: ordered(row.values.get(key, "") for row in rows) for key in (*keys, SEED)}
        shown = [key for key in keys if len(values[key]) <= LEGEND or len(numbers(values[key])) == len(values[key])]
        color_key = max(
            shown or keys,
            key=lambda key: num_distinguished_pairs(rows, key),
            default=SEED if len(values[SEED]) > 1 else None,
        )
        if color_key is None:
            return cls({row.path: Look() for row in rows})
        few = [key for key in (*keys, SEED) if key != color_key and 1 < len(values[key]) <= len(STYLES)]
        style_key = few[0] if few else None
        if len(rows) <= LEGEND and _look_alike(rows, keys, [key for key in (color_key, style_key) if key is not None]):
            return cls._of_each(rows, keys)
        palette, scale = _palette(values[color_key])
        styles = dict(zip(values[style_key], STYLES, strict=False)) if style_key is not None else {}
        looks = {
            row.path: Look(
                palette[row.values.get(color_key, "")],
                styles[row.values.get(style_key, "")] if style_key is not None else STYLES[0],
            )
            for row in rows
        }
        listed = palette if len(palette) <= LEGEND else {}
        return cls(looks, color_key, listed, scale, style_key, styles)

    @classmethod
    def _of_each(cls, rows: Sequence[Row], keys: Sequence[str]) -> Encoding:
        """Give each combination of values a colour."""
        called = {row.path: ", ".join(row.values.get(key, "") or "-" for key in keys) for row in rows}
        colors = dict(zip(dict.fromkeys(called.values()), COLORS, strict=False))
        title = ", ".join(key.rpartition(".")[2] for key in keys)
        return cls({path: Look(colors[name]) for path, name in called.items()}, title, colors)


def _look_alike(rows: Sequence[Row], keys: Sequence[str], shown: Sequence[str]) -> bool:
    """Return whether any jobs that differ in `keys` have the same values of the keys shown."""

    def combinations(of: Sequence[str]) -> int:
        return len({tuple(row.values.get(key, "") for key in of) for row in rows})

    return combinations([*shown, *keys]) > combinations(shown)


def _palette(values: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """Return a colour for each value, and the scale of numbers that are too many for a legend."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm, Normalize

    as_numbers = numbers(values)
    is_numeric = len(as_numbers) == len(values)
    if len(values) <= len(COLORS) and not (is_numeric and len(values) > 2):
        return dict(zip(values, COLORS, strict=False)), None
    whole = matplotlib.colormaps["viridis"]
    if is_numeric and len(values) > LEGEND:
        ramp = ListedColormap([whole(_RAMP_END * step / 255) for step in range(256)])
        norm = (LogNorm if is_geometric(as_numbers) else Normalize)(min(as_numbers), max(as_numbers))
        return {value: ramp(norm(float(value))) for value in values}, ScalarMappable(norm, ramp)
    return {value: whole(_RAMP_END * number / (len(values) - 1)) for number, value in enumerate(values)}, None


def ordered(values: Iterable[str]) -> list[str]:
    """Return the distinct values: numbers by size, then strings in order of appearance."""
    return sorted(dict.fromkeys(values), key=lambda value: (_number(value) is None, _number(value) or 0.0))


def numbers(values: Iterable[str]) -> list[float]:
    """Return those of the values that are numbers."""
    return [number for value in values if (number := _number(value)) is not None]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == 0 or 1 / HUGE < abs(value) < HUGE else None


def is_geometric(values: Sequence[float]) -> bool:
    """Return whether numbers are spread by factors rather than by differences: over decades, or doubled each time."""
    distinct = sorted(set(values))
    if len(distinct) < 3 or distinct[0] <= 0 or distinct[-1] / distinct[0] < _FACTOR:
        return False
    if distinct[-1] / distinct[0] >= _SPAN:
        return True
    logarithms = list(map(math.log, distinct))
    return _unevenness(logarithms) < _unevenness(distinct)


def _unevenness(sorted_values: Sequence[float]) -> float:
    gaps = [after - before for before, after in itertools.pairwise(sorted_values)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)
