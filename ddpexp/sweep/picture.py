"""The plot of a sweep: the curves of its jobs, and the effect of each swept value.

`python -m ddpexp.sweep.picture DIR` draws it.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, RefusedError
from ddpexp.sweep.arguments import Arguments
from ddpexp.sweep.comparison import SEED, best_of, metrics_of, varying
from ddpexp.sweep.encoding import HUGE, Encoding, Look, is_geometric, numbers, ordered
from ddpexp.sweep.files import curve
from ddpexp.sweep.grid import without_middle
from ddpexp.sweep.rows import Goal, Row
from ddpexp.sweep.table import shown
from ddpexp.system import files
from ddpexp.system.terminal import say
from ddpexp.system.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

NAME = "sweep.png"
_WIDTH, _CURVES_HEIGHT, _PANEL_HEIGHT = 10.0, 4.0, 2.7  # inches
_DPI = 150
_ACROSS, _PANELS = 3, 9
_TICKS = 8  # values that each get a tick of their own
_DECADES = 40.0  # largest by smallest value of the objective, from which on its axis is logarithmic
_FAR = 2.5  # by how much the worst twentieth may lengthen an axis
_LABEL, _LEGEND_LABEL, _TICK_LABEL, _TITLE_LABEL = 30, 20, 16, 105  # characters
_TICK_LABELS = 36  # characters of all ticks of a panel, that fit beside one another
_LEGEND_LINE, _LEGEND_GAP = 0.056, 0.03  # of the height of the curves
_INK, _FAINT = "#333333", "#8a8a8a"
_STAR: dict[str, Any] = {"marker": "*", "markersize": 14, "markeredgecolor": _INK, "markeredgewidth": 0.9}
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a dollar sign in a value is not math
    "font.size": 9,
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
    logging.getLogger("matplotlib").setLevel(
        logging.ERROR
    )  # it warns of a home that cannot be written, which does not matter
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fonts without a character, and the like
        _import_matplotlib()
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
    files.write(path, image.getvalue())


def _import_matplotlib() -> None:
    """Import it away from the current folder, whose matplotlibrc it would read, which names modules and programs."""
    here = os.open(os.curdir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.chdir(os.path.dirname(__file__))
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    finally:
        os.fchdir(here)
        os.close(here)


@dataclass(frozen=True)
class _Sweep:
    """What is drawn."""

    rows: Sequence[Row]
    objective: str
    mode: Literal["min", "max"] | None
    best: Row | None
    encoding: Encoding


def _compose(figure: Figure, rows: Sequence[Row], objective: str, mode: Literal["min", "max"] | None) -> None:
    keys = varying(rows)
    panels = [key for key in keys if key != SEED][:_PANELS] or keys  # seeds are the dots of every panel
    across = min(_ACROSS, len(panels)) or 1
    lines = math.ceil(len(panels) / across)
    figure.set_size_inches(_WIDTH, _CURVES_HEIGHT + _PANEL_HEIGHT * lines)
    heights = [_CURVES_HEIGHT, _PANEL_HEIGHT * lines] if panels else [_CURVES_HEIGHT]
    top, *bottom = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    best = best_of(rows, Goal(objective, mode)) if mode is not None else None
    drawn = _Sweep(rows, objective, mode, best, Encoding.of(rows))
    _draw_curves(top, drawn)
    first = None
    for place, key in enumerate(panels):
        axes = bottom[0].add_subplot(lines, across, 1 + place, sharey=first)
        first = first or axes
        _draw_panel(axes, drawn, key)
        if place % across == 0:
            axes.set_ylabel(_label(objective))
        else:
            axes.tick_params(labelleft=False)
    signs = {
        "hollow: not done": any(row.status != "done" and _is_drawable(row.objective) for row in rows),
        "cross: no value": any(_is_lost(row) for row in rows),
        "arrow: beyond the axis": not all(map(_limits(drawn).holds, _objectives(drawn))),
    }
    if panels and any(signs.values()):
        text = "     ".join(sign for sign, is_there in signs.items() if is_there)
        bottom[0].supxlabel(text, fontsize=8, color=_FAINT, x=0.995, ha="right")


def _draw_curves(figure: SubFigure, drawn: _Sweep) -> None:
    """Draw the objective of every job over its steps."""
    from matplotlib.collections import LineCollection

    axes = figure.add_subplot()
    curves = {row.path: [one for one in curve(row.path, drawn.objective) if _is_drawable(one[1])] for row in drawn.rows}
    rows = [row for row in drawn.rows if curves[row.path]]
    width, alpha = (1.6, 0.9) if len(rows) <= 12 else (1.2, 0.75) if len(rows) <= 60 else (0.9, 0.55)
    looks = [drawn.encoding.looks[row.path] for row in rows]
    colors, styles = [look.color for look in looks], [look.style for look in looks]
    lines = [curves[row.path] for row in rows]
    axes.add_collection(LineCollection(lines, colors=colors, linestyles=styles, linewidths=width, alpha=alpha))
    for row, look in zip(rows, looks, strict=True):
        if len(curves[row.path]) == 1:  # is no line
            axes.plot(*curves[row.path][0], ".", color=look.color, alpha=alpha)
    best = curves[drawn.best.path] if drawn.best is not None else []
    if drawn.best is not None and best:
        _draw_best(axes, best, drawn.encoding.looks[drawn.best.path])
    values = [value for row in rows for _, value in curves[row.path]]
    if not values:
        axes.text(
            0.5,
            0.5,
            f"no job has recorded {_label(drawn.objective)} yet",
            transform=axes.transAxes,
            ha="center",
            color=_FAINT,
        )
    _Limits.of(values, drawn.mode).apply(axes, drawn.objective)
    axes.margins(x=0.02)
    axes.autoscale_view(scaley=False)
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == int(value) else "")
    axes.set_ylabel(_label(drawn.objective))
    axes.set_title(_title(drawn), loc="left", pad=10, fontsize=10)
    _explain(
        figure, axes, drawn.encoding, drawn.encoding.looks[drawn.best.path] if drawn.best is not None and best else None
    )


def _draw_best(axes: Axes, points: Sequence[tuple[int, float]], look: Look) -> None:
    """Draw the best job's curve over the others.

    In its own colour and style, thicker, with an edge and a star at its end.
    """
    from matplotlib.patheffects import Normal, Stroke

    edge = [Stroke(linewidth=4.6, foreground="white", alpha=0.8), Stroke(linewidth=3.4, foreground=_INK), Normal()]
    axes.plot(
        *zip(*points, strict=True), color=look.color, linestyle=look.style, linewidth=2.2, path_effects=edge, zorder=4
    )
    axes.plot(*points[-1], color=look.color, zorder=5, **_STAR)


def _explain(figure: SubFigure, axes: Axes, encoding: Encoding, best: Look | None) -> None:
    """Draw the legend of colours and styles beside the curves."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D

    def line(**look: Any) -> Line2D:
        return Line2D([], [], **look)

    parts: list[tuple[str, Mapping[str, Any]]] = []
    if best is not None:
        both = line(color=_INK, linewidth=3.4), line(color=best.color, linewidth=2.2, **{**_STAR, "markersize": 9})
        parts.append(("", {"best": both}))
    if encoding.color_key is not None and encoding.colors:
        lines = {value: line(color=color, linewidth=2.0) for value, color in encoding.colors.items()}
        parts.append((encoding.color_key, lines))
    if encoding.style_key is not None:
        lines = {value: line(color=_INK, linewidth=1.4, linestyle=style) for value, style in encoding.styles.items()}
        parts.append((encoding.style_key, lines))
    top = 1.02
    for title, entries in parts:
        labels = [without_middle(one_line(value), _LEGEND_LABEL) or "-" for value in entries]
        place: dict[str, Any] = {
            "loc": "upper left",
            "bbox_to_anchor": (1.0, top),
            "alignment": "left",
            "handlelength": 2.8,
        }
        legend = Legend(axes, list(entries.values()), labels, title=_label(title) or None, **place)
        axes.add_artist(legend)  # axes.legend() keeps one alone
        legend.set_clip_on(False)
        top -= _LEGEND_LINE * (len(entries) + bool(title)) + _LEGEND_GAP
    if encoding.scale is not None:
        inset = axes.inset_axes((1.02, 0.0, 0.016, top - 0.02))
        bar = figure.colorbar(encoding.scale, cax=inset, label=_label(encoding.color_key or ""))
        bar.outline.set_visible(False)
        if bar.ax.get_yscale() == "log":
            _label_plainly(bar.ax.yaxis)


def _draw_panel(axes: Axes, drawn: _Sweep, key: str) -> None:
    """Draw the objective against one swept value: a dot a job, and the mean where several have the same value."""
    values = ordered(row.overrides.get(key, "") for row in drawn.rows)
    known = numbers(values)
    is_numeric = len(known) == len(values) > 2
    is_scaled = is_numeric and (len(known) > _TICKS or is_geometric(known) or _are_apart(known))
    at = (
        dict(zip(values, known, strict=True))
        if is_scaled
        else {value: float(place) for place, value in enumerate(values)}
    )
    limits, shaken = _limits(drawn), random.Random(0)
    jobs_with = Counter(row.overrides.get(key, "") for row in drawn.rows)
    size, alpha = (24, 0.85) if len(drawn.rows) <= 60 else (13, 0.55)
    dots: dict[tuple[str, bool], list[tuple[float, float, Any]]] = {}
    found: dict[str, list[float]] = {}
    for row in drawn.rows:
        value, y = row.overrides.get(key, ""), row.objective
        x = at[value] + (0.0 if is_numeric or jobs_with[value] == 1 else shaken.uniform(-0.12, 0.12))
        if _is_lost(row):
            axes.plot(x, 0.03, "x", color=_FAINT, markersize=5, transform=axes.get_xaxis_transform(), zorder=3)
        if y is None or not _is_drawable(y):
            continue
        found.setdefault(value, []).append(y)
        if row is drawn.best:
            axes.plot(x, y, color=drawn.encoding.looks[row.path].color, zorder=5, **_STAR)
        else:
            dots.setdefault((limits.marker(y), row.status == "done"), []).append(
                (x, limits.nearest(y), drawn.encoding.looks[row.path].color)
            )
    for (marker, is_full), some in dots.items():
        xs, ys, colors = zip(*some, strict=True)
        faces: Any = colors if is_full else "none"
        axes.scatter(
            xs, ys, size, marker=marker, facecolors=faces, edgecolors=colors, alpha=alpha, linewidths=0.9, zorder=3
        )
    if sum(map(len, found.values())) >= 1.5 * len(found):
        means = [(at[value], sum(found[value]) / len(found[value])) for value in values if value in found]
        means = [(x, y if limits.holds(y) else math.nan) for x, y in means]
        if is_numeric:
            axes.plot(*zip(*means, strict=True), color=_INK, linewidth=1.0, alpha=0.7, zorder=2)
        axes.plot(*zip(*means, strict=True), "_", color=_INK, markersize=16, markeredgewidth=1.8, zorder=4)
    if is_scaled and is_geometric(known):
        axes.set_xscale("log")
        _label_plainly(axes.xaxis)
    axes.margins(x=0.08)
    limits.apply(axes, drawn.objective)
    if not is_numeric or len(values) <= _TICKS:
        _tick_each(axes, values, at, is_scaled)
    axes.set_xlabel(_label(key))


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


def _are_apart(places: Sequence[float]) -> bool:
    """Return whether sorted numbers are far enough apart for a tick each on a linear axis."""
    return min(after - before for before, after in itertools.pairwise(places)) * 2 * _TICKS > places[-1] - places[0]


def _label_plainly(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if low > 0 and high / low < 50:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True)
class _Limits:
    """A vertical axis on which a few jobs that have diverged do not flatten all others."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], mode: str | None) -> _Limits:
        """Take in all values, but for a few far ones on the side of the bad."""
        if not values:
            return cls(0.0, 1.0)
        ordered = sorted(values)
        low, high = ordered[0], ordered[-1]
        if low > 0 and high / low > _DECADES:
            return cls(low, high, is_log=True)
        far = len(ordered) // 20
        if far and mode != "max":
            usual = ordered[-1 - far]
            high = usual if high - low > _FAR * (usual - low) > 0 else high
        if far and mode != "min":
            usual = ordered[far]
            low = usual if high - low > _FAR * (high - usual) > 0 else low
        return cls(low, high)

    def holds(self, value: float) -> bool:
        """Return whether a value is on the axis."""
        return self.low <= value <= self.high

    def nearest(self, value: float) -> float:
        """Return where a value is shown."""
        return min(max(value, self.low), self.high)

    def marker(self, value: float) -> str:
        """Return a dot, or an arrow that points to a value beyond the axis."""
        return "o" if self.holds(value) else "^" if value > self.high else "v"

    def apply(self, axes: Axes, objective: str) -> None:
        """Give the axis its scale."""
        from matplotlib.ticker import PercentFormatter

        if self.is_log:
            axes.set_yscale("log")
            axes.set_ylim(self.low / 1.3, self.high * 1.3)
            _label_plainly(axes.yaxis)
        else:
            room = 0.07 * (self.high - self.low) or 0.05 * abs(self.high) or 1.0
            axes.set_ylim(self.low - room, self.high + room)
        if "accuracy" in objective and self.low >= 0 and self.high <= 1:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _limits(drawn: _Sweep) -> _Limits:
    """Return the vertical axis that all panels share."""
    return _Limits.of(_objectives(drawn), drawn.mode)


def _objectives(drawn: _Sweep) -> list[float]:
    return [row.objective for row in drawn.rows if row.objective is not None and _is_drawable(row.objective)]


def _is_drawable(value: float | None) -> bool:
    return value is not None and abs(value) < HUGE  # nan is not either


def _is_lost(row: Row) -> bool:
    """Return whether a job has ended without a value."""
    return not _is_drawable(row.objective) and row.status not in ("waiting", "submitted", "running")


def _title(drawn: _Sweep) -> str:
    title = f"{_label(drawn.objective)} of {len(drawn.rows):,} job{'s' if len(drawn.rows) != 1 else ''}"
    best = drawn.best
    if best is None:
        return title
    word = "lowest" if drawn.mode == "min" else "highest"
    at = ", ".join(f"{key.rpartition('.')[2]}={best.overrides.get(key, '')}" for key in varying(drawn.rows))
    return _label(f"{title}, {word} {shown(drawn.objective, best.objective)} with {at or best.name}", _TITLE_LABEL)


def _label(text: str, limit: int = _LABEL) -> str:
    line = one_line(text)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def draw_later(argv: Sequence[str]) -> int:
    """Import what draws while the last jobs of a sweep run, and call `main` at the end of the standard input."""
    os.nice(10)
    _import_matplotlib()
    sys.stdin.read()
    return main(argv)


def main(argv: Sequence[str]) -> int:
    """Draw what `ddpexp table` with the same words shows, into the sweep's directory or the folder behind --out."""
    try:
        asked = Arguments.of("picture", argv)
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
    """Return the metric to draw if no objective is set."""
    known = metrics_of(rows)
    return next((name for name in ("eval/loss", "train/loss", *known) if name in known), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
