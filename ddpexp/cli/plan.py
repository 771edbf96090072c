"""The command `ddpexp plan`: compose and check as for a run, collect the facts, print the estimates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ddpexp.cli.start import compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, DdpexpError, RefusedError
from ddpexp.plan.arguments import PlanArguments
from ddpexp.plan.fits import check_fits
from ddpexp.plan.gather import Curves
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.plans import Foreseen, foresee, plan_all, with_costs
from ddpexp.system.terminal import print_message


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
    if arguments.memory_gb is not None:
        check_fits(outcome, arguments.memory_gb)
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
    from ddpexp.plan.strategies import candidates, compare, runs_of, show_comparison

    choices = candidates(arguments.run)
    comparison = compare(arguments, choices, _plans(runs_of(arguments, choices), arguments))
    if arguments.json:
        print(json.dumps(comparison.as_dict(), indent=2))
    else:
        show_comparison(comparison)
    return EXIT_DONE


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
