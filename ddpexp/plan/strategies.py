"""`ddpexp plan --strategies`: which strategies fit, and how long a step takes with each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ddpexp.config import strategies
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.plan.arguments import PlanArguments
from ddpexp.plan.fits import Verdict, verdict
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.speed import Costs
from ddpexp.strategy.estimator import Variant
from ddpexp.strategy.options import Options
from ddpexp.system.oom import available_bytes
from ddpexp.system.text import size_text

_AGAIN = "trainer.activation_checkpointing"
_AGAIN_TIME = 4 / 3  # of a pass: forward is done twice, and backward takes as long as two


@dataclass(frozen=True)
class Row:
    """One strategy."""

    overrides: str  # as typed beside the others
    outcome: Outcome | None
    refused: str = ""
    verdict: Verdict | None = None  # None: the memory is not known

    def as_dict(self) -> dict[str, Any]:
        """Return plain values. Units: bytes, milliseconds."""
        if self.outcome is None:
            return {"overrides": self.overrides, "refused": self.refused}
        step = self.outcome.step()
        return {
            "overrides": self.overrides,
            "verdict": self.verdict,
            "rank_bytes": self.outcome.rank_bytes(on_host=False),
            "host_bytes": self.outcome.rank_bytes(on_host=True),
            "moments": dict(self.outcome.moments()),
            "most_bytes": self.outcome.most_bytes(),
            "step_ms": None if isinstance(step, str) else step.total_ms,
        }


@dataclass(frozen=True)
class Comparison:
    """The strategies for one model on the same workers."""

    rows: Sequence[Row]
    memory_gb: float | None
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"memory_gb": self.memory_gb, "strategies": [row.as_dict() for row in self.rows], "notes": self.notes}


def candidates(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of each strategy to compare, given those of a run: what it chooses itself comes first.

    Keys of the strategy section stay with the strategies that have them.
    """
    typed = [word for word in words if word.startswith(("strategy=", "strategy."))]
    again = next((word for word in words if word.partition("=")[0] == _AGAIN), None)
    blocks = next((word.partition("=")[2] for word in typed if word.startswith("strategy.blocks=")), None)
    if again is None and blocks not in (None, "null"):
        again = f"{_AGAIN}={blocks}"
    compared = {kind for kind, _, _ in _variants()}
    is_compared = all(word.partition("=")[2] in compared for word in typed if word.startswith("strategy="))
    choices: list[tuple[str, ...]] = [] if is_compared else [tuple(typed)]
    for kind, options, variant in _variants():
        if variant.is_optional and {*map(_key, variant.overrides)} & {*map(_key, typed)}:
            continue  # the others have that number
        own = {field.name for field in fields(options)} - {*map(_key, variant.overrides)}
        choices.append((f"strategy={kind}", *variant.overrides, *(word for word in typed if _key(word) in own)))
    if again is None:
        return choices
    return [(*choice, *more) for choice in choices for more in ((f"{_AGAIN}=null",), (again,))]


def _variants() -> Iterator[tuple[str, type[Options], Variant]]:
    """Yield what is compared of each kind of strategy, ours and those of installed packages."""
    for kind in strategies.kinds():
        options = strategies.options_of(kind)
        assert options is not None
        for variant in strategies.estimator_class(kind, options).variants:
            yield kind, options, variant


def _optional() -> list[tuple[str, ...]]:
    """Return the overrides of what is left out where a model does not say how to divide its layers."""
    return [(f"strategy={kind}", *variant.overrides) for kind, _, variant in _variants() if variant.is_optional]


def _key(word: str) -> str:
    return word.partition("=")[0].removeprefix("strategy.")


def runs_of(arguments: PlanArguments, choices: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the overrides of a run with each choice of a strategy.

    Raises:
        RefusedError: --calibrate, which measures one run.
    """
    if arguments.calibrate:
        raise RefusedError(
            "plan --strategies --calibrate: it measures one run, and these are several",
            suggestion="Give --compute_ms, --alpha_us and --bandwidth_gbps, which plan --calibrate without "
            "--strategies finds.",
        )
    common = [word for word in arguments.run if not word.startswith(("strategy=", "strategy.", f"{_AGAIN}="))]
    return [[*common, *choice] for choice in choices]


def compare(
    arguments: PlanArguments, choices: Sequence[Sequence[str]], found: Sequence[Outcome | DdpexpError]
) -> Comparison:
    """Compare what was found for each choice; one that divides layers is left out if it cannot, unless it was typed.

    Raises:
        RefusedError: none of them is possible.
    """
    possible = [outcome for outcome in found if isinstance(outcome, Outcome)]
    if not possible:
        raise next(error for error in found if isinstance(error, DdpexpError))
    memory_gb, notes = _memory(arguments.memory_gb, possible[0])
    rows, typed = [], {word for word in arguments.run if word.startswith("strategy")}
    for choice, outcome in zip(choices, found, strict=True):
        untyped = [optional for optional in _optional() if {*optional} <= {*choice} and not {*optional} <= typed]
        if untyped and not isinstance(outcome, Outcome):
            note = f"{' '.join(untyped[0])} is left out: {outcome}"
            notes += [note] if note not in notes else []
            continue
        shown = " ".join(word for word in choice if word != f"{_AGAIN}=null")
        if isinstance(outcome, Outcome):
            outcome = replace(outcome, costs=_costs(arguments, outcome))
            fits = None if memory_gb is None else verdict(outcome, memory_gb)
            rows.append(Row(shown, outcome, verdict=fits))
        else:
            rows.append(Row(shown, None, str(outcome)))
    if not any(word.startswith(f"{_AGAIN}=") for choice in choices for word in choice):
        notes.append(f"{_AGAIN}=[CLASS], the class of a layer, takes less memory for activations: type it to compare")
    if possible[0].facts.activations_bytes is None:
        notes.append(f"activations are {possible[0].facts.notes['activations']}")
    return Comparison(rows, memory_gb, [*possible[0].notes(), *notes])


def _memory(typed: float | None, outcome: Outcome) -> tuple[float | None, list[str]]:
    """Return the memory of a worker in gigabytes, and what is assumed about it."""
    if typed is not None:
        return typed, []
    if outcome.assumed.layout.device == "cuda":
        return None, ["give --memory_gb, the memory of a GPU, to see what fits"]
    free = available_bytes()
    share = free / outcome.assumed.workers
    return share / 1e9, [
        f"each worker is assumed to have {size_text(share)}, its part of what is free on this machine: --memory_gb "
        "sets another number"
    ]


def _costs(arguments: PlanArguments, outcome: Outcome) -> Costs | None:
    if arguments.compute_ms is None:
        return None
    pass_ms = arguments.compute_ms * (_AGAIN_TIME if outcome.experiment.trainer.activation_checkpointing else 1)
    return Costs(pass_ms, alpha_us=arguments.alpha_us, bandwidth_gbps=arguments.bandwidth_gbps)


def _shown(row: Row) -> str:
    """Return the verdict, which says less where what a micro-batch takes is not known."""
    is_partial = row.verdict is not None and row.outcome is not None and row.outcome.facts.activations_bytes is None
    return f"{row.verdict} without activations" if is_partial else row.verdict or ""


def show_comparison(comparison: Comparison) -> None:
    """Print it as a table."""
    from rich.console import Group as Lines
    from rich.table import Table
    from rich.text import Text

    from ddpexp.sweep import grid

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    limit = "" if comparison.memory_gb is None else f" of {size_text(comparison.memory_gb * 1e9)}"
    for name in ("strategy", f"most of a rank{limit}", "step", ""):
        table.add_column(name, justify="left" if name in ("strategy", "") else "right")
    for row in comparison.rows:
        if row.outcome is None:
            table.add_row(row.overrides, "", "", f"refused: {row.refused}", style="dim")
            continue
        step = row.outcome.step()
        when = next((name for name, size in row.outcome.moments().items() if size == row.outcome.most_bytes()), "")
        where = {"start": "the whole model at the start", "evaluation": "the whole model in evaluations"}.get(
            when, when
        )
        table.add_row(
            row.overrides,
            size_text(row.outcome.most_bytes()),
            "" if isinstance(step, str) else f"{step.total_ms:.3g} ms",
            "; ".join(text for text in (_shown(row), where) if text),
        )
    first = next(row.outcome for row in comparison.rows if row.outcome is not None)
    notes = list(comparison.notes)
    if isinstance(first.step(), str):
        notes.append(f"the time of a step is {first.step()}")
    grid.show(Lines(table, *(Text(f"note: {text}", style="dim") for text in notes)))
