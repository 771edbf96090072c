"""The command `ddpexp doctor`: compose as for a run, examine every host of the job, print what was found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

from ddpexp.cli.start import check_started_once, compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.doctor.job import Diagnosis, NoAnswerError
from ddpexp.doctor.judge import headline, judge
from ddpexp.doctor.report import as_json, as_text, exit_code
from ddpexp.errors import EXIT_DONE, RefusedError, WorkerError
from ddpexp.launch.launchers.base import Launcher
from ddpexp.run import outcome
from ddpexp.run.outcome import write_torchrun_error
from ddpexp.system.terminal import show


def doctor(call: Call) -> int:
    """Report what a run would meet, and return the exit code.

    Raises:
        RefusedError: the overrides are wrong.
    """
    launcher, diagnosis = prepare(call.operands)
    check_started_once(launcher, diagnosis.request)
    return diagnose(launcher, diagnosis, lambda: outcome.launch(launcher, diagnosis.job, call.server), call.as_json)


def prepare(overrides: Sequence[str]) -> tuple[Launcher, Diagnosis]:
    """Return the job for the overrides of a run, and its launcher.

    Raises:
        RefusedError: the overrides are wrong.
    """
    experiment, composed = compose_experiment(overrides)
    return experiment.launcher, Diagnosis(experiment, composed.text)


def diagnose(launcher: Launcher, diagnosis: Diagnosis, launch: Callable[[], int], json: bool) -> int:
    """Run the job with `launch`, print the report and return the exit code.

    Raises:
        RefusedError, WorkerError: in a command whose leading command reports it.
    """
    began, failure = time.monotonic(), None
    diagnosis.gather(launcher.ranks_started_externally)
    try:
        if diagnosis.folder_hangs:
            raise NoAnswerError(f"the file system of {diagnosis.setting.folder} does not answer")
        with redirect_stdout(sys.stderr):  # the workers' output is no part of the report
            launch()
    except (RefusedError, WorkerError) as error:
        if error.quiet or diagnosis.entered:
            raise
        failure = error
    finally:
        diagnosis.wait()
    if diagnosis.entered and failure is None:
        return EXIT_DONE
    hosts, findings = judge(diagnosis, diagnosis.facts(), failure)
    if json:
        show(as_json(findings))
    else:
        show(as_text(findings, hosts, headline(hosts), time.monotonic() - began))
    if names := list(dict.fromkeys(finding.check for finding in findings if finding.level == "bad")):
        write_torchrun_error(f"ddpexp doctor: bad: {', '.join(names)}; the report is above")
    return exit_code(findings)
