"""The plans of runs: what the configurations say, then the facts of all of them, then what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddpexp.config.facts import refers
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.sampling import training_plan
from ddpexp.config.schema import Experiment
from ddpexp.errors import DdpexpError
from ddpexp.plan.arguments import PlanArguments
from ddpexp.plan.calibrate import calibrate
from ddpexp.plan.gather import Gathered, gather
from ddpexp.plan.layout import Assumed, assume
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.speed import Costs
from ddpexp.run.directory import RunDir
from ddpexp.run.prepare import prepare, with_facts
from ddpexp.run.training import Training


@dataclass(frozen=True)
class Foreseen:
    """A run that its configuration allows."""

    experiment: Experiment
    text: str  # of the configuration
    assumed: Assumed
    resumes: RunDir | None


def foresee(experiment: Experiment, composed: ResolvedConfig, overrides: Sequence[str], cores: int | None) -> Foreseen:
    """Return what the overrides say of a run, on machines with so many cores.

    Raises:
        RefusedError: what a run would refuse. FinishedError: so is the run in `run.dir`.
    """
    training = Training(experiment, composed.text, composed.overrides, ["ddpexp", *overrides])
    return Foreseen(experiment, composed.text, assume(training.job, experiment.launcher, cores), training.foresee())


def plan_all(runs: Sequence[Foreseen | DdpexpError], arguments: PlanArguments) -> list[Outcome | DdpexpError]:
    """Return the plan of each run without the time of a step, or why there is none."""
    possible = [run for run in runs if isinstance(run, Foreseen)]
    if not possible:
        return [run for run in runs if isinstance(run, DdpexpError)]
    experiment, num_samples = possible[0].experiment, arguments.num_samples
    with_data = num_samples is None or any(refers(run.text) for run in possible)
    prepared = prepare(experiment.data, experiment.trust) if with_data else None
    configurations = [(with_facts(run.text, run.experiment.data, prepared), run.assumed.layout) for run in possible]
    data = prepared if num_samples is None else None
    gathered = iter(gather(configurations, data, num_samples, arguments.plot_schedule is not None))
    plans: list[Outcome | DdpexpError] = []
    for run in runs:
        if isinstance(run, DdpexpError):
            plans.append(run)
            continue
        answer = next(gathered)
        plans.append(answer if isinstance(answer, DdpexpError) else _outcome(run, answer, (data or {}).get("note")))
    return plans


def _outcome(run: Foreseen, gathered: Gathered, note: str | None) -> Outcome:
    """Return the plan of a run; `note` says what its samples are."""
    facts, steps = gathered.facts, gathered.steps
    if note:
        facts = replace(facts, notes={**facts.notes, "samples": note})
    data_size = run.experiment.strategy.data_rank(0, run.assumed.layout.world_size).size
    batch = training_plan(run.experiment, data_size)
    lengths = steps["steps_per_epoch"], steps["num_steps"]
    return Outcome(run.experiment, run.assumed, batch, facts, *lengths, run.resumes, curves=gathered.curves)


def with_costs(outcome: Outcome, arguments: PlanArguments, report: Callable[[str], None]) -> Outcome:
    """Add the costs: as typed, otherwise as measured; `report` prints the progress of that."""
    calibration = None
    if arguments.calibrate:
        num_bytes = sum(outcome.traffic().num_bytes)
        layout = outcome.assumed.layout
        calibration = calibrate(
            outcome.experiment, arguments.run, outcome.batch, layout, outcome.place, num_bytes, report
        )
    costs = calibration.costs if calibration else None
    if arguments.compute_ms is not None:
        costs = Costs(arguments.compute_ms) if costs is None else replace(costs, pass_ms=arguments.compute_ms)
    if costs is not None:
        typed = {"alpha_us": arguments.alpha_us, "bandwidth_gbps": arguments.bandwidth_gbps}
        costs = replace(costs, **{name: value for name, value in typed.items() if value is not None})
    return replace(outcome, costs=costs, calibration=calibration)
