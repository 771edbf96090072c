"""Text for Slurm, from pure functions: quoting in scripts, names of logs, time limits, arguments of srun."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpexp.errors import RefusedError
from ddpexp.launch.rendezvous.environment import tasks_per_node
from ddpexp.system.secrets import held_in, masked

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|unlimited|infinite", re.IGNORECASE)  # sbatch's --time
_MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT",
               "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS")  # fmt: skip
"""Source: sbatch(1), --mail-type."""
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


def check_mail_types(names: Sequence[str]) -> None:
    """Check that sbatch knows the occasions for a mail.

    Raises:
        RefusedError: it does not know one.
    """
    for name in names:
        if name.upper() not in _MAIL_TYPES:
            raise RefusedError(
                f"{name} is no occasion on which Slurm writes a mail",
                key="launcher.mail_type",
                suggestion=f"Available: {', '.join(_MAIL_TYPES)}; several are written launcher.mail_type=[END,FAIL].",
            )


def container_warnings(image: str | None, mounts: str | None, python: str | None, folder: Path) -> list[str]:
    """Return what the container of a job may lack: the interpreter, and the folder of run directories.

    Those of this machine are there where they are mounted, or where the cluster mounts them by itself.
    """
    outside = [Path(mount.partition(":")[0]) for mount in (mounts or "").split(",") if mount]

    def is_mounted(path: Path) -> bool:
        return any(path.is_relative_to(mounted) for mounted in outside)

    if image is None:
        return []
    interpreter = Path(sys.executable)
    warnings = []
    if python is None and not is_mounted(interpreter):
        warnings.append(
            f"launcher.container_image={image} is to hold {interpreter}, the interpreter of this machine: "
            "launcher.python=python names that of the image"
        )
    run = folder.absolute()
    if not is_mounted(run):
        warnings.append(
            f"launcher.container_mounts={mounts or 'null'} does not mount {run}, where the run directory is: unless "
            f"the cluster does, the job needs 'launcher.container_mounts=\"{run}:{run}\"', and its data likewise"
        )
    return warnings


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
