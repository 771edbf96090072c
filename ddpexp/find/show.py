"""The answers of `ddpexp find batch_size`: a table, the overrides to type, and what changes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ddpexp.config.fitted import KEY
from ddpexp.errors import RefusedError
from ddpexp.find.micro_batch import Tried, fastest, largest
from ddpexp.sweep import grid
from ddpexp.system.text import size_text

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    tried: Sequence[Tried]
    changes: str  # what another micro-batch changes in the numbers
    notes: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values. Units: bytes."""
        most, quickest = largest(self.tried), fastest(self.tried)
        return {
            "tried": [{**asdict(one), "fits": one.fits} for one in self.tried],
            "largest": None if most is None else most.micro_batch_size,
            "fastest": None if quickest is None else quickest.micro_batch_size,
            "overrides": {name: f"{KEY}={one.micro_batch_size}" for name, one in self._answers().items()},
            "changes": self.changes,
            "notes": list(self.notes),
        }

    def _answers(self) -> dict[str, Tried]:
        found = {"largest": largest(self.tried), "fastest": fastest(self.tried)}
        return {name: one for name, one in found.items() if one is not None}

    def answers(self) -> dict[str, str]:
        """Return what to type, by what it is the best for."""
        return {
            name: f"{KEY}={one.micro_batch_size}  ({size_text(one.peak_bytes or 0)} of the fullest rank, "
            f"{one.samples_per_second or 0:,.0f} samples/s)"
            for name, one in self._answers().items()
        }


def nothing_fits(tried: Sequence[Tried]) -> RefusedError:
    """Return the error of a search that has found nothing."""
    least = tried[0].micro_batch_size
    return RefusedError(
        f"A micro-batch of {least} does not fit into the memory of a worker",
        suggestion="Use fewer workers on this machine, or a strategy that divides the model: ddpexp plan --strategies "
        "compares what a worker holds with each.",
    )


def show(found: Found) -> None:
    """Print the table and the answers."""
    grid.show(render(found))


def render(found: Found) -> RenderableType:
    """Return the table and the answers as text."""
    from rich.console import Group as Lines
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("micro-batch", "passes", "fits", "peak memory", "samples/s"):
        table.add_column(name, justify="left" if name == "fits" else "right", no_wrap=True)
    for one in found.tried:
        table.add_row(*map(Text, _cells(one)))
    lines = {**found.answers(), "changes": found.changes}
    reasons = [f"a micro-batch of {one.micro_batch_size:,} fails: {one.why}" for one in found.tried if one.why]
    return Lines(
        table,
        "",
        *(Text(f"{name:<9}{text}") for name, text in lines.items()),
        *(Text(f"note: {note}", style="dim") for note in (*reasons, *found.notes)),
    )


def _cells(one: Tried) -> list[str]:
    fits = {"fits": "yes", "too large": "no (not tried to the end)", "fails": "no (it fails)"}
    size = "" if one.peak_bytes is None else size_text(one.peak_bytes)
    if one.outcome == "too large":
        size = f"about {size}"
    speed = "" if one.samples_per_second is None else f"{one.samples_per_second:,.0f}"
    passes = f"{one.gradient_accumulation_steps:,}"
    return [f"{one.micro_batch_size:,}", passes, fits.get(one.outcome, f"no ({one.outcome})"), size, speed]
