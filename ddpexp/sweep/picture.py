"""A picture of a sweep: the curves of its jobs, and what each swept value did; `python -m ddpexp.sweep.picture DIR` draws it."""

from __future__ import annotations

import io
import logging
import math
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpexp import rundir
from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, RefusedError
from ddpexp.launch.terminal import say
from ddpexp.printable import one_line
from ddpexp.sweep.asked import Asked
from ddpexp.sweep.rows import Goal, Row, curve
from ddpexp.sweep.table import SEED, best_of, metrics_of, shown, varying

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "sweep.png"
_WIDTH, _CURVES_HEIGHT, _PANEL_HEIGHT = 10.0, 4.0, 2.7  # inches
_DPI = 150
_ACROSS, _PANELS = 3, 9
_LEGEND = 10  # entries that fit beside the curves
_TICKS = 8  # values that each get a tick of their own
_SPAN = 30.0  # largest by smallest value, from which on an axis is logarithmic
_LABEL = 24  # characters
_INK, _FAINT, _BEST = "#333333", "#8a8a8a", "#d62728"
_COLORS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#bb5566")
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a dollar sign in a value is a dollar sign
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.8,
    "text.color": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
}


def draw(rows: Sequence[Row], objective: str, mode: Literal["min", "max"] | None, path: Path) -> None:
    """Write the picture as PNG; `mode` None marks no best job.

    Raises: OSError.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home that cannot be written, which does not matter
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fonts without a character, and the like
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # the same picture whatever matplotlibrc lies about
            matplotlib.rcParams.update(_STYLE)
            figure = Figure(layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.06))
            _compose(figure, rows, objective, mode)
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=_DPI)
    rundir.write(path, image.getvalue())


def _compose(figure: Figure, rows: Sequence[Row], objective: str, mode: Literal["min", "max"] | None) -> None:
    keys = varying(rows)
    panels = keys[:_PANELS]
    lines = math.ceil(len(panels) / _ACROSS)
    across = min(_ACROSS, len(panels)) or 1
    figure.set_size_inches(_WIDTH, _CURVES_HEIGHT + _PANEL_HEIGHT * lines)
    grid = figure.add_gridspec(1 + lines, across, height_ratios=[_CURVES_HEIGHT, *[_PANEL_HEIGHT] * lines])
    best = best_of(rows, Goal(objective, mode)) if mode is not None else None
    colors = _Colors.of(rows, next((key for key in keys if key != SEED), SEED if keys else None))
    _draw_curves(figure, figure.add_subplot(grid[0, :]), rows, objective, mode, best, colors)
    first = None
    for place, key in enumerate(panels):
        axes = figure.add_subplot(grid[1 + place // across, place % across], sharey=first)
        first = first or axes
        _draw_panel(axes, rows, key, objective, mode, best, colors)
        if place % across == 0:
            axes.set_ylabel(_label(objective))
        else:
            axes.tick_params(labelleft=False)


@dataclass(frozen=True)
class _Colors:
    """Each row's colour, after one swept value."""

    key: str | None
    values: Mapping[str, Any]  # a colour for each value
    bar: Any = None  # for numbers that are too many for a legend

    @classmethod
    def of(cls, rows: Sequence[Row], key: str | None) -> _Colors:
        import matplotlib
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm, Normalize

        if key is None:
            return cls(None, {})
        values = _ordered(row.overrides.get(key, "") for row in rows)
        numbers = [number for value in values if (number := _number(value)) is not None]
        ramp = matplotlib.colormaps["viridis"]
        if len(numbers) == len(values) > _LEGEND:
            low, high = min(numbers), max(numbers)
            norm = LogNorm(low, high) if _spans(numbers) else Normalize(low, high)
            bar = ScalarMappable(norm, ramp)
            return cls(key, {value: ramp(norm(float(value))) for value in values}, bar)
        if len(numbers) == len(values) > 2 or len(values) > len(_COLORS):
            return cls(key, {value: ramp(0.92 * place / (len(values) - 1)) for place, value in enumerate(values)})
        return cls(key, dict(zip(values, _COLORS, strict=False)))

    def __getitem__(self, row: Row) -> Any:
        return self.values.get(row.overrides.get(self.key, ""), _COLORS[0]) if self.key is not None else _COLORS[0]


def _draw_curves(
    figure: Figure, axes: Axes, rows: Sequence[Row], objective: str, mode: str | None, best: Row | None, colors: _Colors
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import Normal, Stroke

    found = {row.path: curve(row.path, objective) for row in rows}
    drawn = [(row, points) for row in rows if (points := [point for point in found[row.path] if math.isfinite(point[1])])]
    crowd = len(drawn)
    width, alpha = (1.6, 0.9) if crowd <= 12 else (1.1, 0.7) if crowd <= 60 else (0.8, 0.45)
    lines = [points for _, points in drawn]
    shades = [colors[row] for row, _ in drawn]
    axes.add_collection(LineCollection(lines, colors=shades, linewidths=width, alpha=alpha))
    short = [(points[-1], shade) for points, shade in zip(lines, shades, strict=True) if len(points) == 1]
    if short:
        axes.scatter([x for (x, _), _ in short], [y for (_, y), _ in short], c=[shade for _, shade in short], s=14, alpha=alpha)
    points = found.get(best.path, []) if best is not None else []
    points = [point for point in points if math.isfinite(point[1])]
    if best is not None and points:
        halo = [Stroke(linewidth=5.0, foreground="white"), Normal()]
        axes.plot(*zip(*points, strict=True), color=_BEST, linewidth=2.4, path_effects=halo, zorder=4)
        axes.plot(*points[-1], "o", color=_BEST, markersize=6, markeredgecolor="white", zorder=5)
    values = [value for line in lines for _, value in line]
    _scale(axes, values, mode, objective)
    axes.margins(x=0.02)
    axes.autoscale_view(scaley=False)
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == int(value) else "")
    axes.set_ylabel(_label(objective))
    axes.set_title(_title(rows, objective, mode, best), loc="left", pad=8)
    if not values:
        axes.text(0.5, 0.5, f"no job has recorded {_label(objective)} yet", transform=axes.transAxes, ha="center", color=_FAINT)
    handles = [Line2D([], [], color=_BEST, linewidth=2.4, label="best")] if points else []
    if colors.bar is not None:
        bar = figure.colorbar(colors.bar, ax=axes, label=_label(colors.key or ""), pad=0.015, aspect=30)
        bar.outline.set_visible(False)
        if handles:
            axes.legend(handles=handles, loc="best")
    elif colors.key is not None and len(colors.values) <= _LEGEND:
        handles = [*(Line2D([], [], color=shade, linewidth=2.0, label=_label(value) or "-")
                     for value, shade in colors.values.items()), *handles]  # fmt: skip
        axes.legend(handles=handles, title=_label(colors.key), loc="upper left", bbox_to_anchor=(1.0, 1.02), alignment="left")
    elif handles:
        axes.legend(handles=handles, loc="best")


def _draw_panel(
    axes: Axes, rows: Sequence[Row], key: str, objective: str, mode: str | None, best: Row | None, colors: _Colors
) -> None:
    """Draw the objective against one swept value: a dot a job, a bar or a line for the mean, a cross for what has none."""
    values = _ordered(row.overrides.get(key, "") for row in rows)
    numbers = [_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    scattered = len(known) == len(values) and (len(values) > _TICKS or _is_even(known))
    numeric = len(known) == len(values) and len(values) > 2
    logarithmic = numeric and _spans(known)
    at: dict[str, float] = (
        dict(zip(values, known, strict=True)) if numeric else {value: float(place) for place, value in enumerate(values)}
    )
    shaken = random.Random(0)
    dots, shades, lost = [], [], []
    by_value: dict[str, list[float]] = {}
    for row in rows:
        value = row.overrides.get(key, "")
        if row.objective is not None and math.isfinite(row.objective):
            x = at[value] if numeric else at[value] + shaken.uniform(-0.12, 0.12)
            dots.append((x, row.objective))
            shades.append(colors[row])
            by_value.setdefault(value, []).append(row.objective)
            if row is best:
                axes.plot(x, row.objective, "*", color=_BEST, markersize=13, markeredgecolor="white", zorder=5)
        elif row.status in ("failed", "killed", "done", "broken", "stopped"):
            lost.append(at[value])
    if logarithmic:
        axes.set_xscale("log")
    alpha = 0.85 if len(dots) <= 60 else 0.5
    if dots:
        axes.scatter(
            [x for x, _ in dots],
            [y for _, y in dots],
            c=shades,
            s=22 if len(dots) <= 60 else 12,
            alpha=alpha,
            linewidths=0,
            zorder=3,
        )
    if any(len(found) > 1 for found in by_value.values()):
        means = [(at[value], sum(found) / len(found)) for value in values if (found := by_value.get(value))]
        if numeric:
            axes.plot(*zip(*means, strict=True), color=_INK, linewidth=1.2, alpha=0.8, zorder=2)
            axes.plot(*zip(*means, strict=True), "_", color=_INK, markersize=11, markeredgewidth=1.8, zorder=4)
        else:
            axes.hlines([mean for _, mean in means], [x - 0.25 for x, _ in means], [x + 0.25 for x, _ in means], color=_INK,
                        linewidth=1.8, zorder=4)  # fmt: skip
    if lost:
        axes.plot(lost, [0.03] * len(lost), "x", color=_FAINT, markersize=5, transform=axes.get_xaxis_transform(), zorder=3)
    _scale(axes, [value for _, value in dots], mode, objective)
    _ticks(axes, values, at, numeric, scattered)
    axes.set_xlabel(_label(key))


def _ticks(axes: Axes, values: Sequence[str], at: Mapping[str, float], numeric: bool, scattered: bool) -> None:
    """Give each value a tick of its own while they are few."""
    from matplotlib.ticker import NullLocator

    if numeric and (scattered or len(values) > _TICKS):
        if axes.get_xscale() != "log":
            axes.margins(x=0.06)
        return
    step = math.ceil(len(values) / _TICKS)
    chosen = list(values)[::step]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([at[value] for value in chosen])
    texts = [_label(value) or "-" for value in chosen]
    slanted = sum(map(len, texts)) > 34
    axes.set_xticklabels(texts, rotation=25 if slanted else 0, ha="right" if slanted else "center", rotation_mode="anchor")
    if not numeric:
        axes.set_xlim(-0.6, len(values) - 0.4)
        axes.grid(False, axis="x")


def _scale(axes: Axes, values: Sequence[float], mode: str | None, objective: str) -> None:
    """Choose the vertical axis so that a few runs that have diverged do not flatten all others."""
    from matplotlib.ticker import PercentFormatter

    if not values:
        return
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    is_share = "accuracy" in objective
    if low > 0 and high / low > 100 and not is_share:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
        return
    if mode != "max":
        usual = ordered[int(0.95 * (len(ordered) - 1))]
        high = usual if high - low > 2.5 * (usual - low) > 0 else high
    if mode != "min":
        usual = ordered[math.ceil(0.05 * (len(ordered) - 1))]
        low = usual if high - low > 2.5 * (high - usual) > 0 else low
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - room, high + room)
    if is_share and ordered[0] >= 0 and ordered[-1] <= 1:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def _title(rows: Sequence[Row], objective: str, mode: str | None, best: Row | None) -> str:
    count = f"{len(rows)} job{'s' if len(rows) != 1 else ''}"
    if best is None:
        return f"{_label(objective)} of {count}"
    word = "lowest" if mode == "min" else "highest"
    keys = varying(rows)
    at = ", ".join(f"{key.rpartition('.')[2]}={best.overrides.get(key, '')}" for key in keys)
    return f"{_label(objective)} of {count}; {word} {shown(objective, best.objective)} with {_label(at or best.name, 90)}"


def _ordered(values: Any) -> list[str]:
    """Return the values once each: numbers by size, then texts as they came."""
    found = list(dict.fromkeys(values))

    def key(place: int) -> tuple[bool, float]:
        number = _number(found[place])
        return (True, float(place)) if number is None else (False, number)

    return [found[place] for place in sorted(range(len(found)), key=key)]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _spans(numbers: Sequence[float]) -> bool:
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _SPAN


def _is_even(numbers: Sequence[float]) -> bool:
    """Tell whether the numbers are a plain range, whose ticks need no help."""
    return False if len(numbers) < 2 else all(number == int(number) for number in numbers) and len(numbers) > _TICKS


def _label(text: str, limit: int = _LABEL) -> str:
    line = one_line(text)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def main(argv: Sequence[str]) -> int:
    """Draw what `ddpexp table` with the same words shows, into the sweep's directory or the folder behind --out."""
    try:
        asked = Asked.of("picture", argv)
        goal = asked.goal()
        metric = goal.metric or _usual_metric(asked.rows(None))
        folder = asked.out or asked.sweep
        if metric is None or folder is None:
            raise RefusedError("no metric is recorded yet" if metric is None else "it needs a folder: --out FOLDER.")
        draw(asked.rows(metric), metric, goal.mode if goal.metric is not None else None, folder / NAME)
    except (RefusedError, OSError) as error:
        say(f"{NAME} cannot be drawn: {error}")
        return EXIT_REFUSED
    return EXIT_DONE


def _usual_metric(rows: Sequence[Row]) -> str | None:
    """Return the metric to draw where nobody has said which one counts."""
    known = metrics_of(rows)
    return next((name for name in ("eval/loss", "train/loss", *known) if name in known), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
