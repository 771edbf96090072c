"""The range test of the learning rate, in a short real run with workers of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ddpexp.check.job import temporary_folder
from ddpexp.check.short_run import short_tree
from ddpexp.config.schema import Experiment
from ddpexp.errors import DdpexpError, RefusedError, WorkerError
from ddpexp.find.range_test import Curve, curve_of, rounded
from ddpexp.find.trial import KEPT, Trial, workers_here
from ddpexp.launch import Layout
from ddpexp.launch.workers.client import Server
from ddpexp.plan.schedule_plot import chart
from ddpexp.sweep.picture import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = "optimizer.lr"


@dataclass(frozen=True)
class RangeTest:
    """A range test of an experiment."""

    experiment: Experiment
    text: str  # its configuration, as YAML
    layout: Layout  # of the run
    low: float
    high: float
    num_steps: int

    def run(self, server: Server, report: Callable[[str], None]) -> Curve:
        """Train with growing rates.

        Raises:
            RefusedError, WorkerError: the experiment cannot be trained.
        """
        base = self._base()
        report(f"training {self.num_steps} steps with {KEY} from {self.low:g} to {self.high:g}")
        with temporary_folder() as folder:
            place = folder / "trial"
            trial = Trial(self._text(place), place, rising=(self.low / base, self.high / base))
            try:
                records, failed = trial.observe(server).records, False
            except WorkerError as error:
                if error.failure.kind != "NonFiniteError":
                    raise
                records, failed = trial.records(), True
        losses = [record["train/loss"] for record in records if "train/loss" in record]
        if not losses and not failed:
            raise DdpexpError(
                "The task records no train/loss, which a range test looks at",
                suggestion="Return a `loss` among the sums of its train_step.",
            )
        return curve_of(losses, self.low, self.high, self.num_steps, failed)

    def _base(self) -> float:
        """Return the rate that the schedule multiplies.

        Raises:
            RefusedError: there is none.
        """
        base = self.experiment.optimizer.kwargs.get("lr")
        if isinstance(base, bool) or not isinstance(base, int | float) or base <= 0:
            raise RefusedError(
                "is no rate above 0 from which the groups of parameters take theirs",
                key=KEY,
                value=base,
                suggestion=f"Type any, such as {KEY}=0.1: a range test multiplies it.",
            )
        return float(base)

    def _text(self, place: Path) -> str:
        tree: dict[str, Any] = short_tree(self.text, self.experiment, str(place), unchanged=KEPT)
        tree["callbacks"] = {}  # they may end a run by its evaluations
        tree["trainer"] |= {
            **workers_here(self.layout, self.layout.world_size // self.layout.nodes),
            "max_steps": self.num_steps,
            "log_every": 1,
            "eval_every": 0,
            "checkpoint_every": 0,
            "keep_best": None,
            "nonfinite": "stop",
            "swa_start": None,
        }
        return yaml.safe_dump(tree, sort_keys=False)


def as_dict(curve: Curve, rate: float) -> dict[str, Any]:
    """Return plain values."""
    return {
        "suggestion": rate,
        "overrides": {"suggestion": f"{KEY}={rate:g}"},
        "lowest_loss_at": curve.rates[curve.lowest],
        "diverged_after": curve.rates[-1] if curve.has_diverged else None,
        "rates": list(curve.rates),
        "losses": list(curve.losses),
        "smoothed": curve.smoothed,
    }


def lines(curve: Curve, rate: float) -> list[str]:
    """Return the answer as lines of text: the curve, the override to type, and how sure it is."""
    points = [(step, loss) for step, (_, loss) in enumerate(curve.points())]
    first, last = f"{curve.rates[0]:.1e}", f"{curve.rates[-1]:.1e}"
    drawn = chart(f"loss by {KEY} (in equal factors)", points, (first, last))
    ends = f"it diverges above {curve.rates[-1]:.2g}" if curve.has_diverged else "it does not diverge"
    lowest = curve.rates[curve.lowest]
    found = [
        *drawn,
        "",
        f"suggestion  {KEY}={rate:g}  (the steepest descent; the loss is lowest at {lowest:.2g}, and {ends})",
    ]
    if not curve.has_diverged and curve.lowest == len(curve.rates) - 1:
        found.append("note: the loss still falls at the highest rate: --high tries higher ones")
    return found


def draw(curve: Curve, rate: float, path: Path) -> None:
    """Write the losses and the suggestion as PNG.

    Raises: OSError.
    """

    def compose(figure: Figure) -> None:
        figure.set_size_inches(8, 4)
        axes = figure.add_subplot()
        axes.plot(curve.rates, curve.losses, color="#c8c8c8", label="loss")
        axes.plot(curve.rates, curve.smoothed, label="smoothed")
        axes.axvline(rate, linestyle="--", linewidth=1, color="black", label=f"{KEY}={rate:g}")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.legend()

    save(path, compose)


def suggested(curve: Curve) -> float:
    """Return the suggestion with two digits.

    Raises:
        DdpexpError: there is none.
    """
    return rounded(curve.suggestion())
