"""The command `ddpexp plan`: compose and check as for a run, collect the facts, print the estimates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpexp.config import commands
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.data.batch_plan import plan_batches
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.plan.arguments import PlanArguments
from ddpexp.plan.calibrate import calibrate
from ddpexp.plan.gather import Curves, gather
from ddpexp.plan.layout import assume
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.speed import Costs
from ddpexp.run.prepare import prepare
from ddpexp.run.training import Training
from ddpexp.system.terminal import print_message

_USAGE = f"""{commands.of("plan").usage}

Report what a run with these overrides would be: its workers and batches, the
memory of a rank, the size of a checkpoint, the time of a step. Nothing is
trained and no machine is needed: trainer.device=cuda trainer.gpus=8
trainer.nodes=512 plans for 4,096 GPUs.

  --json               for programs
  --cores N            CPU cores of a machine; else as many as this one has
  --num_samples N      plan for so many training samples, without the data
  --compute_ms X       time of a pass: forward and backward of a micro-batch
  --alpha_us X         latency of a message between two workers
  --bandwidth_gbps X   what a worker sends and receives, in gigabits a second
  --plot-schedule [FILE.png]
                       draw the learning rate over the steps
  --calibrate          measure these three on this machine, in short runs

docs/plan.md says what each number is."""


def plan(argv: Sequence[str]) -> int:
    """Print the plan of the run that `argv` describes, and return the exit code.

    Raises:
        RefusedError: what a run would refuse. FinishedError: so is the run in `run.dir`. DdpexpError: the model's code
        failed.
    """
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return EXIT_DONE
    arguments = PlanArguments.of(argv)
    composed = compose(list(arguments.run))
    if composed is None:
        raise RefusedError(f"plan {' '.join(arguments.run)}: that option shows the configuration: use it without plan.")
    experiment = parse(composed.values)
    for warning in composed.warnings:
        print_message(f"ddpexp: warning: {warning}")
    job = Training(experiment, composed.text, composed.overrides, ["ddpexp", *arguments.run])
    assumed = assume(job, experiment.launcher, arguments.cores)
    resumes = job.foresee()
    data = prepare(experiment.data, experiment.trust) if arguments.num_samples is None else None
    wants_plot = arguments.plot is not None
    facts, steps, curves = gather(composed.text, assumed.layout, data, arguments.num_samples, wants_plot)
    if arguments.num_samples is None and data is not None and data.get("note"):
        facts = replace(facts, notes={**facts.notes, "samples": data["note"]})
    trainer = experiment.trainer
    data_size = experiment.strategy.data_rank(0, assumed.layout.world_size).size
    batch = plan_batches(trainer.global_batch_size, trainer.micro_batch_size, data_size)
    outcome = Outcome(experiment, assumed, batch, facts, steps["steps_per_epoch"], steps["num_steps"], resumes)
    outcome = _with_costs(outcome, arguments)
    if arguments.json:
        print(json.dumps(outcome.as_dict(), indent=2))
    else:
        from ddpexp.plan.show import show

        show(outcome)
    if arguments.plot is not None:
        _plot(curves, arguments)
    return EXIT_DONE


def _plot(curves: Curves, arguments: PlanArguments) -> None:
    from ddpexp.plan.schedule_plot import draw, sketch

    if not arguments.json:
        print("\n".join(sketch(curves)))
    if not arguments.plot:
        return
    try:
        draw(curves, Path(arguments.plot))
    except OSError as error:
        raise RefusedError(f"plan --plot-schedule {arguments.plot}: it cannot be written: {error.strerror}.") from None
    print_message(f"ddpexp: {arguments.plot} shows the learning rate")


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
