"""The command `ddpexp plan`: compose and check as for a run, collect the facts, print the estimates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpexp.cli.start import compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, DdpexpError, RefusedError
from ddpexp.plan.arguments import PlanArguments
from ddpexp.plan.fits import does_not_fit, is_mostly_activations, remedies, smaller_too, verdict, with_remedy
from ddpexp.plan.gather import Curves
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.plans import Foreseen, foresee, plan_all, with_costs
from ddpexp.plan.strategies import Comparison, candidates, compare, runs_of, show_comparison
from ddpexp.system.terminal import print_message
from ddpexp.system.text import size_text


def plan(call: Call) -> int:
    """Print the plan of the run that the overrides describe, and return the exit code.

    Raises:
        RefusedError: what a run would refuse, or more memory than --memory_gb. FinishedError: so is the run in
        `run.dir`. DdpexpError: the model's code failed.
    """
    arguments = arguments_of(call)
    if arguments.strategies:
        return _compare(arguments)
    [outcome] = _plans([arguments.run], arguments)
    if isinstance(outcome, DdpexpError):
        raise outcome
    outcome = with_costs(outcome, arguments, lambda text: print_message(f"ddpexp: {text}"))
    if arguments.json:
        print(json.dumps(outcome.as_dict(), indent=2))
    else:
        from ddpexp.plan.show import show

        show(outcome)
    if arguments.memory_gb is not None and verdict(outcome, arguments.memory_gb) == "too large":
        raise does_not_fit(outcome, arguments.memory_gb, _tried(outcome, arguments, arguments.memory_gb))
    if arguments.plot_schedule is not None:
        _plot(outcome.curves, arguments)
    return EXIT_DONE


def arguments_of(call: Call) -> PlanArguments:
    """Return what was typed.

    Raises:
        RefusedError: an option that means nothing.
    """
    return call.typed(PlanArguments(call.operands))


def _compare(arguments: PlanArguments) -> int:
    choices = candidates(arguments.run)
    runs = runs_of(arguments, choices)
    comparison = compare(arguments, choices, _plans(runs, arguments))
    comparison = replace(comparison, notes=[*comparison.notes, *_smaller_fits(comparison, runs, arguments)])
    if arguments.json:
        print(json.dumps(comparison.as_dict(), indent=2))
    else:
        show_comparison(comparison)
    return EXIT_DONE


def _smaller_fits(comparison: Comparison, runs: Sequence[Sequence[str]], arguments: PlanArguments) -> list[str]:
    """Return a note that a smaller micro-batch fits, where the first strategy does not for its activations."""
    first, memory_gb = comparison.rows[0], comparison.memory_gb
    if memory_gb is None or first.outcome is None or first.verdict == "fits":
        return []
    if not is_mostly_activations(first.outcome):
        return []
    smaller = smaller_too((), first.outcome, memory_gb)
    for choice, planned in _planned(smaller, replace(arguments, run=runs[0])):
        if verdict(planned, memory_gb) == "fits":
            size = size_text(planned.most_bytes())
            return [f"activations take most: {first.overrides} {' '.join(choice)} fits ({size})"]
    return []


def _tried(outcome: Outcome, arguments: PlanArguments, memory_gb: float) -> list[tuple[Sequence[str], Outcome]]:
    """Return remedies with their plans, up to those that fit; where none does, with smaller micro-batches too."""
    tried: list[tuple[Sequence[str], Outcome]] = []
    for group in remedies(outcome, memory_gb):
        tried += _planned(group, arguments)
        if any(verdict(planned, memory_gb) == "fits" for _, planned in tried):
            return tried
    smaller = [both for remedy, planned in tried for both in smaller_too(remedy, planned, memory_gb)]
    return [*tried, *_planned(smaller, arguments)]


def _planned(choices: Sequence[Sequence[str]], arguments: PlanArguments) -> list[tuple[Sequence[str], Outcome]]:
    plans = _plans([with_remedy(arguments.run, choice) for choice in choices], arguments) if choices else []
    return [(choice, plan) for choice, plan in zip(choices, plans, strict=True) if isinstance(plan, Outcome)]


def _plans(runs: Sequence[Sequence[str]], arguments: PlanArguments) -> list[Outcome | DdpexpError]:
    """Return the plan for the overrides of each run, or why there is none."""
    return plan_all([_foreseen(overrides, arguments.cores) for overrides in runs], arguments)


def _foreseen(overrides: Sequence[str], cores: int | None) -> Foreseen | RefusedError:
    try:
        return foresee(*compose_experiment(overrides), overrides, cores)
    except RefusedError as error:
        return error


def _plot(curves: Curves, arguments: PlanArguments) -> None:
    from ddpexp.plan.schedule_plot import draw, sketch

    if not arguments.json:
        print("\n".join(sketch(curves)))
    if not arguments.plot_schedule:
        return
    try:
        draw(curves, Path(arguments.plot_schedule))
    except OSError as error:
        raise RefusedError(
            f"cannot be written: {error.strerror}", place=f"plan --plot-schedule {arguments.plot_schedule}"
        ) from None
    print_message(f"ddpexp: {arguments.plot_schedule} shows the learning rate")
