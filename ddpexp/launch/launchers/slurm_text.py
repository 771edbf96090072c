"""Text for Slurm, from pure functions: quoting in scripts, names of logs, time limits, arguments of srun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ddpexp.errors import RefusedError
from ddpexp.launch.rendezvous.environment import tasks_per_node
from ddpexp.system.secrets import held_in, masked

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|unlimited|infinite", re.IGNORECASE)  # sbatch's --time
_NAMES = {"output": "run.dir", "chdir": "the path of the current folder"}


def forwarding_sigint(srun: list[str]) -> list[str]:
    """Make srun forward SIGINT to its tasks instead of printing their state. On SIGTERM it would kill them at once."""
    return [srun[0], "--disable-status", *srun[1:]]


def gpus_of_all_tasks(environ: Mapping[str, str], nodes: int) -> list[str]:
    """Request all GPUs of an allocation that was made with --gpus-per-task.

    Otherwise ddpexp's single task per node would get the GPUs of one of the allocation's tasks.
    """
    kind, _, each = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")
    if "SLURM_JOB_ID" not in environ or not each.isdecimal():
        return []
    count = int(each) * sum(tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))[:nodes])
    return [f"--gpus={kind}{':' if kind else ''}{count}"] if count else []


def limit_seconds(text: str | int | None) -> int | None:
    """Return a time limit in seconds; None where there is none, or where the text is invalid and Slurm reports it.

    Source: sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and so
    on.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", "" if text is None else str(text))
    if match is None:
        return None
    days, *numbers = (None if number is None else int(number) for number in match.groups())
    given = [number for number in numbers if number is not None]
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    seconds = (days or 0) * 86400 + sum(number * unit for number, unit in zip(given, units, strict=False))
    return seconds or None  # 0 means no limit


def check_time(text: str | int | None) -> None:
    """Check that sbatch can read a time limit.

    Raises:
        RefusedError: it cannot.
    """
    if isinstance(text, str) and not _TIME.fullmatch(text):
        raise RefusedError(
            "is not a time that Slurm accepts",
            key="launcher.time",
            value=text,
            suggestion=f"Write minutes, hours:minutes:seconds, or days-hours.{_time_suggestion(text)}",
        )


def _time_suggestion(text: str) -> str:
    match = re.fullmatch(r"(\d+) ?(m|min|minutes?|h|hours?|d|days?)", text.lower())
    if match is None:
        return ""
    return f" Did you mean launcher.time={match[1]}{ {'m': '', 'h': ':00:00', 'd': '-0'}[match[2][0]] }?"


def quoted(value: str, name: str) -> str:
    """Quote for an #SBATCH line, which Slurm splits into words like a shell, but without any expansion."""
    if "\n" in value or "\0" in value:
        name = _NAMES.get(name, f"launcher.{name.replace('-', '_')}")
        raise RefusedError(f"has a line break, which a job script cannot hold: {value!r}", key=name)
    if re.fullmatch(r"[\w@%+=:,./-]+", value, re.ASCII):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def checked_script(text: str, name: str) -> bytes:
    """Return the text of a script as it is written: its secrets cannot be masked, since it has to run.

    Raises:
        RefusedError: it holds one; `name` is the name of its file.
    """
    for line in text.splitlines():
        if (what := held_in(line)) is not None:
            raise RefusedError(
                f"would hold {what}, in the line: {masked(line)}. Everyone who may read the run directory could read "
                "it "
                "there",
                suggestion="In launcher.setup write the variable, such as export X=$MY_SECRET, which the job's shell "
                "expands; a path needs another name.",
                place=name,
            )
    return os.fsencode(text)


def log_name(run: Path, job_id: str) -> str:
    """Return the name of the job's log. In a path with a backslash Slurm expands nothing, so it has no job id."""
    return "slurm.log" if "\\" in str(run) else f"slurm-{job_id}.log"


def output_pattern(folder: Path, name: str = "slurm-%j.log") -> str:
    """Return the path of the log of a job, or of an array, as a pattern for Slurm."""
    if "\\" in str(folder):
        return str(folder / log_name(folder, "")).replace("\\", "\\\\")
    return str(folder).replace("%", "%%") + f"/{name}"
