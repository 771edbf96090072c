"""The panels of a sweep's plot: the objective against each swept value."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpexp.sweep.encoding import is_geometric, numbers, ordered
from ddpexp.sweep.grid import without_middle
from ddpexp.sweep.plot_axis import (
    FAINT,
    INK,
    STAR,
    PlottedSweep,
    is_drawable,
    is_lost,
    set_plain_labels,
    shortened,
)
from ddpexp.system.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TICKS = 8  # values that each get a tick of their own
_TICK_LABEL = 16  # characters
_TICK_LABELS = 36  # characters of all ticks of a panel, that fit beside one another


def draw_panel(axes: Axes, drawn: PlottedSweep, key: str) -> None:
    """Draw the objective against one swept value: a dot a job, and the mean where several have the same value."""
    values = ordered(row.values.get(key, "") for row in drawn.rows)
    as_numbers = numbers(values)
    is_numeric = len(as_numbers) == len(values) > 2
    is_scaled = is_numeric and (len(as_numbers) > _TICKS or is_geometric(as_numbers) or _are_apart(as_numbers))
    at = (
        dict(zip(values, as_numbers, strict=True))
        if is_scaled
        else {value: float(number) for number, value in enumerate(values)}
    )
    axis, jitter = drawn.axis, random.Random(0)
    num_jobs = Counter(row.values.get(key, "") for row in drawn.rows)
    size, alpha = (24, 0.85) if len(drawn.rows) <= 60 else (13, 0.55)
    dots: dict[tuple[str, bool], list[tuple[float, float, Any]]] = {}
    objectives_at: dict[str, list[float]] = {}
    for row in drawn.rows:
        value, y = row.values.get(key, ""), row.objective
        x = at[value] + (0.0 if is_numeric or num_jobs[value] == 1 else jitter.uniform(-0.12, 0.12))
        if is_lost(row):
            axes.plot(x, 0.03, "x", color=FAINT, markersize=5, transform=axes.get_xaxis_transform(), zorder=3)
        if y is None or not is_drawable(y):
            continue
        objectives_at.setdefault(value, []).append(y)
        if row is drawn.best:
            axes.plot(x, y, color=drawn.encoding.looks[row.path].color, zorder=5, **STAR)
        else:
            dots.setdefault((axis.marker(y), row.status == "done"), []).append(
                (x, axis.nearest(y), drawn.encoding.looks[row.path].color)
            )
    for (marker, is_full), some in dots.items():
        xs, ys, colors = zip(*some, strict=True)
        faces: Any = colors if is_full else "none"
        axes.scatter(
            xs, ys, size, marker=marker, facecolors=faces, edgecolors=colors, alpha=alpha, linewidths=0.9, zorder=3
        )
    if sum(map(len, objectives_at.values())) >= 1.5 * len(objectives_at):
        positions = [at[value] for value in values if value in objectives_at]
        means = [statistics.fmean(objectives_at[value]) for value in values if value in objectives_at]
        heights = [mean if axis.holds(mean) else math.nan for mean in means]
        if is_numeric:
            axes.plot(positions, heights, color=INK, linewidth=1.0, alpha=0.7, zorder=2)
        axes.plot(positions, heights, "_", color=INK, markersize=16, markeredgewidth=1.8, zorder=4)
    if is_scaled and is_geometric(as_numbers):
        axes.set_xscale("log")
        set_plain_labels(axes.xaxis)
    axes.margins(x=0.08)
    axis.apply(axes, drawn.objective)
    if not is_numeric or len(values) <= _TICKS:
        _tick_each(axes, values, at, is_scaled)
    axes.set_xlabel(shortened(key))


def _tick_each(axes: Axes, values: Sequence[str], at: Mapping[str, float], is_scaled: bool) -> None:
    """Give each value a tick if there are only a few."""
    from matplotlib.ticker import NullLocator

    chosen = list(values)[:: math.ceil(len(values) / _TICKS)]
    texts = [without_middle(one_line(value), _TICK_LABEL) or "-" for value in chosen]
    is_slanted = sum(map(len, texts)) > _TICK_LABELS
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([at[value] for value in chosen], texts)
    if is_slanted:
        axes.tick_params(axis="x", labelrotation=25)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    if not is_scaled:
        axes.set_xlim(-0.6, len(values) - 0.4)
        axes.grid(False, axis="x")


def _are_apart(numbers: Sequence[float]) -> bool:
    """Return whether sorted numbers are far enough apart for a tick each on a linear axis."""
    return min(after - before for before, after in itertools.pairwise(numbers)) * 2 * _TICKS > numbers[-1] - numbers[0]
