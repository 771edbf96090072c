"""The command `ddpexp resume`, and `ddpexp member`, with which launchers start the other commands of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from ddpexp.cli.start import launch, sweep
from ddpexp.cli.verb import Call
from ddpexp.config.arguments import Arguments
from ddpexp.config.parse import load
from ddpexp.errors import RefusedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher, Starter
from ddpexp.run import outcome
from ddpexp.run.directory import RunDir
from ddpexp.run.resume_arguments import merge_overrides
from ddpexp.run.stored_run import find_run, read_run
from ddpexp.run.training import Training
from ddpexp.sweep.folder import SweepDir
from ddpexp.system import files
from ddpexp.system.yaml_text import load_yaml


def resume(call: Call) -> int:
    """Resume a run or a sweep, and return the exit code."""
    if any(SweepDir(Path(operand)).is_sweep() for operand in call.operands):
        from ddpexp.sweep.resume import resumed

        return sweep(resumed(call.operands, call.command), call.server)
    return launch(*resumed_run(call), call.server)


def resumed_run(call: Call) -> tuple[Launcher, Job]:
    """Return how to resume the run that is named.

    Raises:
        RefusedError: no such run, one whose code is not trusted, or arguments that do not fit.
    """
    source, arguments = call.source()
    run = find_run(source, call.name)
    if "run.resume=never" in arguments:
        raise RefusedError("forbids what the command does", key="run.resume", value="never", suggestion="Leave it out.")
    moved = next((argument for argument in arguments if argument.startswith("run.dir=")), None)
    if moved is not None:
        raise RefusedError(f"The run continues in {source} itself", key=moved, suggestion="Leave it out.")
    stored = read_run(run, arguments, f"resume {source}", call.restate, keeps=("launcher", "logger"))
    typed = Arguments.of(arguments).overrides
    training = Training(
        stored.experiment, stored.text, merge_overrides(run, typed), call.command, new_overrides=typed, resume_from=run
    )
    return stored.experiment.launcher, training.job


def member(call: Call) -> int:
    """Run the share of this command in a job, and return the exit code."""
    return outcome.launch(*member_of(call.operands), call.server, as_member=True)


def member_of(argv: Sequence[str]) -> tuple[Launcher, Job]:
    """Return the job that the launcher of another command has sent this one to.

    A run directory, or a JSON file of a job.

    Raises:
        RefusedError: neither is there, or its launcher does not work that way.
    """
    if len(argv) != 1:
        raise RefusedError(
            "is for launchers: it takes the run directory, or the file, that they have made", place="ddpexp member"
        )
    place = Path(argv[0])
    if place.is_dir():
        run = RunDir(place)
        if run.config.is_file() and run.config.stat().st_uid != os.getuid():
            raise RefusedError(
                "is another user's: its configuration says whose code runs, so it must be your own", place=place
            )
        try:
            files.check_yaml(run.config)
            files.check_yaml(run.overrides)
            text, overrides = run.config.read_text(), load_yaml(run.overrides.read_text())
            command = run.command() or ["ddpexp", *overrides]
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RefusedError(f"is not a run directory: {error}", place=place) from None
        experiment = load(text)
        training = Training(experiment, text, overrides, command, run)
    else:
        try:
            described = files.read_json(place)
            text, resume_from = described["config"], described["resume_from"]
            arguments = described["overrides"], described["command"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RefusedError(f"does not describe a job: {error}", place=place) from None
        experiment = load(text)
        home = RunDir(Path(resume_from)) if resume_from is not None else None
        training = Training(experiment, text, *arguments, new_overrides=described["new_overrides"], resume_from=home)
    if not isinstance(experiment.launcher, Starter):
        raise RefusedError("has a launcher that starts no further commands", place=place)
    return experiment.launcher, training.job
