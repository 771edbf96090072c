"""The picture of a schedule: lines for the terminal, and a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpexp.plan.gather import Curves
from ddpexp.sweep.picture import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 60, 8  # characters
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MOST_SKETCHES = 3


def sketch(curves: Curves) -> list[str]:
    """Return the curves as lines of text: the rate upwards, the steps to the right."""
    lines = []
    for name, points in list(curves.items())[:_MOST_SKETCHES]:
        lines += ["", *chart(f"{name} by step", points, (str(points[0][0]), str(points[-1][0])))]
    if len(curves) > _MOST_SKETCHES:
        lines += ["", f"and {', '.join(list(curves)[_MOST_SKETCHES:])}"]
    return lines


def chart(title: str, points: Sequence[tuple[int, float]], ends: tuple[str, str]) -> list[str]:
    """Return a curve from 0 upwards as lines of text; `ends` are the labels of its first and last point."""
    top = max(rate for _, rate in points)
    width = min(_WIDTH, len(points))
    columns = [points[number * (len(points) - 1) // max(1, width - 1)][1] for number in range(width)]
    heights = [round(rate / top * _HEIGHT * 8) if top else 0 for rate in columns]
    rows = ["".join(_EIGHTHS[min(8, max(0, height - 8 * row))] for height in heights) for row in range(_HEIGHT)]
    labels = [f"{top:.4g}", *[""] * (_HEIGHT - 2), "0"]
    margin = max(map(len, labels))
    first, last = ends
    drawn = [f"  {label:>{margin}} |{row}".rstrip() for label, row in zip(labels, reversed(rows), strict=True)]
    axis = f"  {'':>{margin}}  {first:<{max(1, width - len(last))}}{last}"
    return [title, *drawn, axis]


def draw(curves: Curves, path: Path) -> None:
    """Write the curves as PNG.

    Raises: OSError.
    """

    def compose(figure: Figure) -> None:
        figure.set_size_inches(8, 4)
        axes = figure.add_subplot()
        for name, points in curves.items():
            axes.plot([step for step, _ in points], [rate for _, rate in points], label=name)
        axes.set_xlabel("step")
        axes.set_ylabel("learning rate")
        axes.set_ylim(bottom=0)
        if len(curves) > 1:
            axes.legend()

    save(path, compose)
