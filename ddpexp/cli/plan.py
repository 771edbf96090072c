"""The command `ddpexp plan`: compose and check as for a run, collect the facts, print the estimates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpexp.cli.start import compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.config.facts import refers
from ddpexp.config.sampling import training_plan
from ddpexp.config.schema import Experiment
from ddpexp.errors import EXIT_DONE, DdpexpError, RefusedError
from ddpexp.plan.arguments import PlanArguments
from ddpexp.plan.calibrate import calibrate
from ddpexp.plan.fits import check_fits
from ddpexp.plan.gather import Curves, Gathered, gather
from ddpexp.plan.layout import Assumed, assume
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.speed import Costs
from ddpexp.run.directory import RunDir
from ddpexp.run.prepare import prepare, with_facts
from ddpexp.run.training import Training
from ddpexp.system.terminal import print_message


def plan(call: Call) -> int:
    """Print the plan of the run that the overrides describe, and return the exit code.

    Raises:
        RefusedError: what a run would refuse, or more memory than --memory_gb. FinishedError: so is the run in
        `run.dir`. DdpexpError: the model's code failed.
    """
    arguments = arguments_of(call)
    if arguments.strategies:
        from ddpexp.plan.strategies import compare, show_comparison

        comparison = compare(arguments, _plans)
        if arguments.json:
            print(json.dumps(comparison.as_dict(), indent=2))
        else:
            show_comparison(comparison)
        return EXIT_DONE
    [outcome] = _plans([arguments.run], arguments)
    if isinstance(outcome, DdpexpError):
        raise outcome
    outcome = _with_costs(outcome, arguments)
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


def _plans(runs: Sequence[Sequence[str]], arguments: PlanArguments) -> list[Outcome | DdpexpError]:
    """Return the plan for the overrides of each run without the time of a step, or why there is none."""
    foreseen = [_foreseen(overrides, arguments) for overrides in runs]
    possible = [run for run in foreseen if isinstance(run, _Foreseen)]
    if not possible:
        return [run for run in foreseen if isinstance(run, DdpexpError)]
    experiment, num_samples = possible[0].experiment, arguments.num_samples
    with_data = num_samples is None or any(refers(run.text) for run in possible)
    prepared = prepare(experiment.data, experiment.trust) if with_data else None
    configurations = [(with_facts(run.text, run.experiment.data, prepared), run.assumed.layout) for run in possible]
    data = prepared if num_samples is None else None
    gathered = iter(gather(configurations, data, num_samples, arguments.plot_schedule is not None))
    plans: list[Outcome | DdpexpError] = []
    for run in foreseen:
        if isinstance(run, DdpexpError):
            plans.append(run)
            continue
        answer = next(gathered)
        plans.append(answer if isinstance(answer, DdpexpError) else _outcome(run, answer, (data or {}).get("note")))
    return plans


@dataclass(frozen=True)
class _Foreseen:
    """A run that its configuration allows."""

    experiment: Experiment
    text: str  # of the configuration
    assumed: Assumed
    resumes: RunDir | None


def _outcome(run: _Foreseen, gathered: Gathered, note: str | None) -> Outcome:
    """Return the plan of a run; `note` says what its samples are."""
    facts, steps = gathered.facts, gathered.steps
    if note:
        facts = replace(facts, notes={**facts.notes, "samples": note})
    data_size = run.experiment.strategy.data_rank(0, run.assumed.layout.world_size).size
    batch = training_plan(run.experiment, data_size)
    lengths = steps["steps_per_epoch"], steps["num_steps"]
    return Outcome(run.experiment, run.assumed, batch, facts, *lengths, run.resumes, curves=gathered.curves)


def _foreseen(overrides: Sequence[str], arguments: PlanArguments) -> _Foreseen | RefusedError:
    try:
        experiment, composed = compose_experiment(overrides)
        job = Training(experiment, composed.text, composed.overrides, ["ddpexp", *overrides])
        assumed = assume(job, experiment.launcher, arguments.cores)
        return _Foreseen(experiment, composed.text, assumed, job.foresee())
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


def _with_costs(outcome: Outcome, arguments: PlanArguments) -> Outcome:
    """Add the costs: as given on the command line, otherwise as measured."""
    calibration = None
    if arguments.calibrate:
        num_bytes = sum(outcome.traffic().num_bytes)
        calibration = calibrate(
            outcome.experiment,
            arguments.run,
            outcome.batch,
            outcome.assumed.layout,
            outcome.place,
            num_bytes,
            lambda text: print_message(f"ddpexp: {text}"),
        )
    costs = calibration.costs if calibration else None
    if arguments.compute_ms is not None:
        costs = Costs(arguments.compute_ms) if costs is None else replace(costs, pass_ms=arguments.compute_ms)
    if costs is not None:
        typed = {"alpha_us": arguments.alpha_us, "bandwidth_gbps": arguments.bandwidth_gbps}
        costs = replace(costs, **{name: value for name, value in typed.items() if value is not None})
    return replace(outcome, costs=costs, calibration=calibration)
