"""What the curves and the panels of a sweep's plot share: the jobs, the axis of the objective, and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ddpexp.sweep.encoding import HUGE, Encoding
from ddpexp.sweep.job_status import NOT_ENDED
from ddpexp.sweep.rows import Row
from ddpexp.system.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DECADES = 40.0  # largest by smallest value of the objective, from which on its axis is logarithmic
_FAR = 2.5  # by how much the worst twentieth may lengthen an axis
_LABEL = 30  # characters
INK = "#333333"
FAINT = "#8a8a8a"
STAR: dict[str, Any] = {"marker": "*", "markersize": 14, "markeredgecolor": INK, "markeredgewidth": 0.9}


@dataclass(frozen=True)
class PlottedSweep:
    """What is drawn."""

    rows: Sequence[Row]
    objective: str
    mode: Literal["min", "max"] | None
    best: Row | None
    encoding: Encoding

    @property
    def objectives(self) -> list[float]:
        """Return the values that can be drawn."""
        return [row.objective for row in self.rows if row.objective is not None and is_drawable(row.objective)]

    @property
    def axis(self) -> ObjectiveAxis:
        """Return the vertical axis that all panels share."""
        return ObjectiveAxis.of(self.objectives, self.mode)


def set_plain_labels(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if low > 0 and high / low < 50:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True)
class ObjectiveAxis:
    """A vertical axis on which a few jobs that have diverged do not flatten all others."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], mode: str | None) -> ObjectiveAxis:
        """Include all values, except for a few outliers among the bad ones."""
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
        if self.holds(value):
            return "o"
        return "^" if value > self.high else "v"

    def apply(self, axes: Axes, objective: str) -> None:
        """Give the axis its scale."""
        from matplotlib.ticker import PercentFormatter

        if self.is_log:
            axes.set_yscale("log")
            axes.set_ylim(self.low / 1.3, self.high * 1.3)
            set_plain_labels(axes.yaxis)
        else:
            room = 0.07 * (self.high - self.low) or 0.05 * abs(self.high) or 1.0
            axes.set_ylim(self.low - room, self.high + room)
        if "accuracy" in objective and self.low >= 0 and self.high <= 1:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def is_drawable(value: float | None) -> bool:
    """Return whether a value fits on an axis."""
    return value is not None and abs(value) < HUGE  # nan is not either


def is_lost(row: Row) -> bool:
    """Return whether a job has ended without a value."""
    return not is_drawable(row.objective) and row.status not in NOT_ENDED


def shortened(text: str, limit: int = _LABEL) -> str:
    """Return a text as a label of at most `limit` characters."""
    line = one_line(text)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
