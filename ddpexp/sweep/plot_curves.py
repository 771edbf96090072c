"""The curves of a sweep's jobs in its plot, and their legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpexp.run.directory import RunDir
from ddpexp.sweep.comparison import varying
from ddpexp.sweep.encoding import Encoding, Look
from ddpexp.sweep.files import curve
from ddpexp.sweep.grid import without_middle
from ddpexp.sweep.plot_axis import (
    FAINT,
    INK,
    STAR,
    ObjectiveAxis,
    PlottedSweep,
    is_drawable,
    set_plain_labels,
    shortened,
)
from ddpexp.sweep.table import shown
from ddpexp.system.text import counted, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure


_LEGEND_LABEL, _TITLE_LABEL = 20, 105  # characters
_LEGEND_LINE = 0.056  # of the height of the curves
_LEGEND_GAP = 0.03


def draw_curves(figure: SubFigure, drawn: PlottedSweep) -> None:
    """Draw the objective of every job over its steps."""
    from matplotlib.collections import LineCollection

    axes = figure.add_subplot()
    curves = {
        row.path: [point for point in curve(RunDir(row.path).metrics, drawn.objective) if is_drawable(point[1])]
        for row in drawn.rows
    }
    rows = [row for row in drawn.rows if curves[row.path]]
    if len(rows) <= 12:
        width, alpha = 1.6, 0.9
    elif len(rows) <= 60:
        width, alpha = 1.2, 0.75
    else:
        width, alpha = 0.9, 0.55
    looks = [drawn.encoding.looks[row.path] for row in rows]
    colors, styles = [look.color for look in looks], [look.style for look in looks]
    lines = [curves[row.path] for row in rows]
    axes.add_collection(LineCollection(lines, colors=colors, linestyles=styles, linewidths=width, alpha=alpha))
    for row, look in zip(rows, looks, strict=True):
        if len(curves[row.path]) == 1:  # one point is no line
            axes.plot(*curves[row.path][0], ".", color=look.color, alpha=alpha)
    best_look = None
    if drawn.best is not None and (points := curves[drawn.best.path]):
        best_look = drawn.encoding.looks[drawn.best.path]
        star = next((point for point in points if point[1] == drawn.best.objective), points[-1])
        _draw_best(axes, points, star, best_look)
    values = [value for row in rows for _, value in curves[row.path]]
    if not values:
        text = f"no job has recorded {shortened(drawn.objective)} yet"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=FAINT)
    ObjectiveAxis.of(values, drawn.mode).apply(axes, drawn.objective)
    axes.margins(x=0.02)
    axes.autoscale_view(scaley=False)
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == int(value) else "")
    axes.set_ylabel(shortened(drawn.objective))
    axes.set_title(_title(drawn), loc="left", pad=10, fontsize=10)
    _draw_legend(figure, axes, drawn.encoding, best_look)


def _draw_best(axes: Axes, points: Sequence[tuple[int, float]], star: tuple[int, float], look: Look) -> None:
    """Draw the best job's curve over the others.

    In its own colour and style, thicker, with an edge and a star at the value that it is compared by.
    """
    from matplotlib.patheffects import Normal, Stroke

    edge = [Stroke(linewidth=4.6, foreground="white", alpha=0.8), Stroke(linewidth=3.4, foreground=INK), Normal()]
    axes.plot(
        *zip(*points, strict=True), color=look.color, linestyle=look.style, linewidth=2.2, path_effects=edge, zorder=4
    )
    axes.plot(*star, color=look.color, zorder=5, **STAR)


def _draw_legend(figure: SubFigure, axes: Axes, encoding: Encoding, best: Look | None) -> None:
    """Draw the legend of colours and styles beside the curves."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D

    def line(**look: Any) -> Line2D:
        return Line2D([], [], **look)

    parts: list[tuple[str, Mapping[str, Any]]] = []
    if best is not None:
        both = line(color=INK, linewidth=3.4), line(color=best.color, linewidth=2.2, **{**STAR, "markersize": 9})
        parts.append(("", {"best": both}))
    if encoding.color_key is not None and encoding.colors:
        lines = {value: line(color=color, linewidth=2.0) for value, color in encoding.colors.items()}
        parts.append((encoding.color_key, lines))
    if encoding.style_key is not None:
        lines = {value: line(color=INK, linewidth=1.4, linestyle=style) for value, style in encoding.styles.items()}
        parts.append((encoding.style_key, lines))
    top = 1.02
    for title, entries in parts:
        labels = [without_middle(one_line(value), _LEGEND_LABEL) or "-" for value in entries]
        options: dict[str, Any] = {
            "loc": "upper left",
            "bbox_to_anchor": (1.0, top),
            "alignment": "left",
            "handlelength": 2.8,
        }
        legend = Legend(axes, list(entries.values()), labels, title=shortened(title) or None, **options)
        axes.add_artist(legend)  # axes.legend() keeps one alone
        legend.set_clip_on(False)
        top -= _LEGEND_LINE * (len(entries) + bool(title)) + _LEGEND_GAP
    if encoding.scale is not None:
        inset = axes.inset_axes((1.02, 0.0, 0.016, top - 0.02))
        bar = figure.colorbar(encoding.scale, cax=inset, label=shortened(encoding.color_key or ""))
        bar.outline.set_visible(False)
        if bar.ax.get_yscale() == "log":
            set_plain_labels(bar.ax.yaxis)


def _title(drawn: PlottedSweep) -> str:
    title = f"{shortened(drawn.objective)} of {counted(len(drawn.rows), 'job')}"
    best = drawn.best
    if best is None:
        return title
    extreme = "lowest" if drawn.mode == "min" else "highest"
    at = ", ".join(f"{key.rpartition('.')[2]}={best.values.get(key, '')}" for key in varying(drawn.rows))
    return shortened(
        f"{title}, {extreme} {shown(drawn.objective, best.objective)} with {at or best.name}", _TITLE_LABEL
    )
