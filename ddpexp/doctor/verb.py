"""The command `ddpexp doctor`: compose as for a run, examine every host of the job, print what was found."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from ddpexp.config import commands
from ddpexp.config.build import did_you_mean
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.doctor.checks import judge_host, judge_together
from ddpexp.doctor.gather import Facts
from ddpexp.doctor.job import Diagnosis, ElsewhereError, NoAnswerError
from ddpexp.doctor.report import Finding, as_json, as_text, bad, doubtful, exit_code, good, merge
from ddpexp.errors import EXIT_DONE, RefusedError, WorkerError
from ddpexp.launch.launchers.base import Launcher
from ddpexp.run.outcome import write_torchrun_error
from ddpexp.system.terminal import print_message, show

_USAGE = f"""{commands.of("doctor").usage}

Report what a run with these overrides would meet on this machine: GPUs,
driver, links and a measured all-reduce, memory, limits, file systems, clock,
network, scheduler, versions. Each line is good, doubtful or bad, with what to
do. Nothing is trained, and no data is needed.

  --json               for programs: an object per line

Several hosts are examined together where the launcher's own program starts the
command on each:

    srun python -m ddpexp doctor launcher=slurm
    torchrun --nproc-per-node 2 -m ddpexp doctor launcher=torchrun-env

The exit code is 1 if a line is bad. docs/doctor.md explains the lines."""

SWITCHES = ("--json",)
_OF_RUNS = ("--config-dir", "-cd")  # each takes a value


@dataclass(frozen=True)
class DoctorArguments:
    """The parsed arguments."""

    run: tuple[str, ...]  # overrides, as for a training
    json: bool = False

    @classmethod
    def of(cls, argv: Sequence[str]) -> DoctorArguments:
        """Parse a command line.

        Raises:
            RefusedError: an unknown option.
        """
        run: list[str] = []
        remaining = iter(argv)
        for argument in remaining:
            key = argument.partition("=")[0]
            if argument in SWITCHES:
                continue
            if argument in _OF_RUNS:
                run += [argument, next(remaining, "")]
            elif argument.startswith("-") and key not in _OF_RUNS:
                meant = did_you_mean(argument, (*SWITCHES, *_OF_RUNS))
                raise RefusedError(f"doctor {argument}: no such option.{meant}")
            elif "=" not in argument:
                raise RefusedError(f"doctor {argument}: it takes key=value, as a training does, and --json.")
            else:
                run.append(argument)
        return cls(tuple(run), "--json" in argv)


def prepare(argv: Sequence[str]) -> tuple[Launcher, Diagnosis] | None:
    """Return the job of a command line and its launcher, or None when it only asked for help, which is printed.

    Raises:
        RefusedError: the arguments are wrong.
    """
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return None
    arguments = DoctorArguments.of(argv)
    composed = compose(list(arguments.run))
    assert composed is not None  # there is no option that asks about the configuration
    experiment = parse(composed.values)
    job = Diagnosis(experiment, composed.text)
    for warning in composed.warnings:
        print_message(f"ddpexp: warning: {warning}")
    return experiment.launcher, job


def diagnose(launcher: Launcher, job: Diagnosis, launch: Callable[[], int], json: bool) -> int:
    """Run the job with `launch`, print the report and return the exit code.

    Raises:
        RefusedError, WorkerError: in a command whose leading command reports it.
    """
    began, failure = time.monotonic(), None
    job.gather(launcher.ranks_started_externally)
    try:
        if job.folder_hangs:
            raise NoAnswerError(f"the file system of {job.setting.folder} does not answer")
        with redirect_stdout(sys.stderr):  # the workers' output is no part of the report
            launch()
    except (RefusedError, WorkerError) as error:
        if (error.quiet or not job.leads) and not isinstance(error, ElsewhereError):
            raise
        failure = error
    finally:
        job.wait()
    if not job.leads and failure is None:
        return EXIT_DONE
    hosts, findings = judge(job, job.facts(), failure)
    if json:
        show(as_json(findings))
    else:
        show(as_text(findings, hosts, _headline(job, hosts), time.monotonic() - began))
    if names := list(dict.fromkeys(finding.check for finding in findings if finding.level == "bad")):
        write_torchrun_error(f"ddpexp doctor: bad: {', '.join(names)}; the report is above")
    return exit_code(findings)


def judge(
    job: Diagnosis, here: Mapping[str, Facts], failure: RefusedError | WorkerError | None
) -> tuple[list[str], list[Finding]]:
    """Judge what the commands and the workers found. Returns the hosts and the findings."""
    nodes: dict[int, list[dict[str, Any]]] = {}
    for rank in job.answers("rank"):
        nodes.setdefault(rank["node_rank"], []).append(rank)
    names = _names(nodes) if nodes else {0: platform.node()}
    logs = {answer["node_rank"]: answer["log"] for answer in job.answers("nccl")}
    by_host: dict[str, Mapping[str, Facts]] = {}
    missing = []
    found: dict[str, list[Finding]] = {}
    for node, name in names.items():
        ranks = sorted(nodes.get(node, []), key=lambda rank: "facts" not in rank)
        facts = here if node == next(iter(names)) else ranks[0].get("facts")
        if facts is None:
            missing.append(doubtful("hosts", f"the facts of {name} did not arrive", f"run ddpexp doctor on {name}"))
            continue
        setting = job.setting
        if job.layout is not None:
            setting = setting.with_layout(job.layout, len(ranks) or setting.workers)
        by_host[name], found[name] = facts, judge_host(facts, setting, ranks, logs.get(node))
    times = {name: nodes[node][0]["time"] for node, name in names.items() if node in nodes}
    measured = [(names.get(answer["node_rank"]), answer) for answer in job.answers("all_reduce")]
    together = [_of_workers(job, failure), *judge_together(by_host, found, times, measured)]
    together += missing
    return list(by_host), merge({name: [*together, *found[name]] for name in by_host})


def _names(nodes: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, str]:
    """Return a name for each node: of several with the same one, with the first rank."""
    hosts = [ranks[0]["host"] for ranks in nodes.values()]
    return {
        node: host if hosts.count(host) == 1 else f"{host} (rank {ranks[0]['rank']})"
        for (node, ranks), host in zip(nodes.items(), hosts, strict=True)
    }


def _of_workers(job: Diagnosis, failure: RefusedError | WorkerError | None) -> Finding:
    """Report the workers that a run would have, or why it would have none."""
    setting, layout = job.setting, job.layout
    if isinstance(failure, ElsewhereError):
        advice = f"type srun python -m ddpexp doctor launcher={setting.launcher}, with the options of the job"
        if setting.launcher != "slurm":
            advice = "start the ranks with torchrun and launcher=torchrun-env, or with srun and launcher=slurm"
        return doubtful("workers", f"not measured: {failure}", advice)
    if isinstance(failure, NoAnswerError):
        return bad("workers", f"nothing was started: {failure}", "a run would hang: see file_system")
    if isinstance(failure, WorkerError):
        cause = failure.failure
        text = f"rank {cause.rank} on {cause.host} failed ({cause.phase or 'start'}): {cause.kind}: {cause.message}"
        return bad("workers", text, "a run would fail in the same way", traceback=cause.traceback)
    if failure is not None:
        return bad("workers", f"a run would be refused: {failure}", "", message=str(failure))
    assert layout is not None
    text = f"{layout.world_size} {layout.device} worker{'s' if layout.world_size > 1 else ''}"
    text += f" over {layout.backend}" if layout.world_size > 1 else ", nothing to reduce"
    return good("workers", f"{text}, launcher={setting.launcher}", **vars(layout))


def _headline(job: Diagnosis, hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"ddpexp doctor on {shown}"
