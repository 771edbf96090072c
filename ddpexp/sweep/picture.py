"""The plot of a sweep: the curves of its jobs, and the effect of each swept value."""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, RefusedError
from ddpexp.sweep.arguments import TableArguments
from ddpexp.sweep.comparison import SEED, best_of, by_best, metrics_of, varying
from ddpexp.sweep.encoding import Encoding
from ddpexp.sweep.plot_axis import FAINT, INK, PlottedSweep, is_drawable, is_lost, shortened
from ddpexp.sweep.plot_curves import draw_curves
from ddpexp.sweep.plot_panels import draw_panel
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row
from ddpexp.system import files
from ddpexp.system.process import away_from_current_folder
from ddpexp.system.terminal import print_message

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "sweep.png"
_WIDTH, _CURVES_HEIGHT, _PANEL_HEIGHT = 10.0, 4.0, 2.7  # inches
_DPI = 150
_ACROSS, _PANELS = 3, 9
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a dollar sign in a value is not math
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
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
    rows, goal = by_best(rows, Goal(objective, mode or "min"))
    save(path, lambda figure: _compose(figure, rows, objective, mode, goal.name or objective))


def save(path: Path, compose: Callable[[Figure], None]) -> None:
    """Write what `compose` puts into a figure as PNG.

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
            compose(figure)
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=_DPI)
    files.write_data(path, image.getvalue())


def _import_matplotlib() -> None:
    with away_from_current_folder():  # whose matplotlibrc it would read, which names modules and programs
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401


def _compose(
    figure: Figure, rows: Sequence[Row], objective: str, mode: Literal["min", "max"] | None, label: str
) -> None:
    keys = varying(rows)
    panels = [key for key in keys if key != SEED][:_PANELS] or keys  # seeds are the dots of every panel
    across = min(_ACROSS, len(panels)) or 1
    lines = math.ceil(len(panels) / across)
    figure.set_size_inches(_WIDTH, _CURVES_HEIGHT + _PANEL_HEIGHT * lines)
    heights = [_CURVES_HEIGHT, _PANEL_HEIGHT * lines] if panels else [_CURVES_HEIGHT]
    top, *bottom = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat
    best = best_of(rows, Goal(objective, mode)) if mode is not None else None
    drawn = PlottedSweep(rows, objective, mode, best, Encoding.of(rows))
    draw_curves(top, drawn)
    first = None
    for number, key in enumerate(panels):
        axes = bottom[0].add_subplot(lines, across, 1 + number, sharey=first)
        first = first or axes
        draw_panel(axes, drawn, key)
        if number % across == 0:
            axes.set_ylabel(shortened(label))
        else:
            axes.tick_params(labelleft=False)
    signs = {
        "hollow: not done": any(row.status != "done" and is_drawable(row.objective) for row in rows),
        "cross: no value": any(is_lost(row) for row in rows),
        "arrow: beyond the axis": not all(map(drawn.axis.holds, drawn.objectives)),
    }
    if panels and any(signs.values()):
        text = "     ".join(sign for sign, is_there in signs.items() if is_there)
        bottom[0].supxlabel(text, fontsize=8, color=FAINT, x=0.995, ha="right")


def draw_later(
    paths: Sequence[str], metric: str | None, mode: Literal["min", "max"], folder: str, niceness: int
) -> int:
    """Entry point of a process: import what draws, and call `main` at the end of the standard input."""
    os.nice(niceness)
    _import_matplotlib()
    sys.stdin.read()
    return main(paths, metric, mode, folder)


def main(paths: Sequence[str], metric: str | None, mode: Literal["min", "max"], folder: str) -> int:
    """Draw the sweeps and runs in `paths` into a folder; no best job is marked if `metric`, the objective, is None."""
    read = TableArguments([*map(Path, paths)]).rows
    try:
        drawn = metric or _usual_metric(read(None))
        if drawn is None:
            raise RefusedError("no metric is recorded yet")
        draw(read(drawn), drawn, mode if metric is not None else None, Path(folder) / NAME)
    except (RefusedError, OSError) as error:
        print_message(f"{NAME} cannot be drawn: {error}")
        return EXIT_REFUSED
    return EXIT_DONE


def _usual_metric(rows: Sequence[Row]) -> str | None:
    """Return the metric to draw if no objective is set."""
    metrics = metrics_of(rows)
    return next((name for name in ("eval/loss", "train/loss", *metrics) if name in metrics), None)
