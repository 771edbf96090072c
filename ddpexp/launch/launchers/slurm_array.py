"""The jobs of a sweep as tasks of Slurm's job arrays: the script, its submission, and the wait for their ends."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ddpexp.errors import ENDS, EXIT_DONE, EXIT_FAILED, Failure, FinishedError, RefusedError, StoppedError
from ddpexp.launch import Job
from ddpexp.system.limits import said_with_limit
from ddpexp.system.slurm import ENDED, array_size, sbatch, signals_wait, state, states
from ddpexp.system.terminal import say

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 1.0, 10.0  # all users of a cluster ask the same controller
_TASKS = 10_000  # of one array: their run directories stand in its script, and Slurm takes 4 MiB

Numbered = Sequence[tuple[int, Job]]
"""Jobs, each with its place among all that are submitted."""


@dataclass(frozen=True)
class Kind:
    """What the tasks of an array have in common: all of its script but the run directories."""

    options: tuple[str, ...]  # lines for Slurm
    setup: tuple[str, ...]
    step: str  # srun and the command, without the run directory
    parallelism: int | None

    def script(self, runs: Sequence[str], path: Path) -> str:
        """Return the text of an array's script, which will lie at `path`: task n takes the n-th run directory.

        Each writes into a log in its own run directory, as a single job does. Slurm's patterns cannot name one, so the
        shell does; the array's own log holds what is said before that.
        """
        at_once = "" if self.parallelism is None else f"%{self.parallelism}"
        return (
            "#!/bin/bash\n"
            f"# Written by ddpexp: {len(runs)} jobs, a task each. To submit them again: sbatch "
            f"{shlex.quote(str(path))}\n"
            + "".join(f"{line}\n" for line in self.options)
            + f"#SBATCH --array=0-{len(runs) - 1}{at_once}\n\n"
            + "ddpexp_runs=(\n"
            + "".join(f"  {shlex.quote(run)}\n" for run in runs)
            + ")\n"
            + "ddpexp_run=${ddpexp_runs[SLURM_ARRAY_TASK_ID]:?has no such task}\n"
            + 'exec >>"$ddpexp_run/slurm-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.log" 2>&1\n'
            + "".join(f"{line}\n" for line in self.setup)
            + f'exec {self.step} "$ddpexp_run"\n'
        )


def by_kind(kinds: Sequence[Kind], jobs: Sequence[Job]) -> dict[Kind, Numbered]:
    """Sort jobs by what their scripts have in common."""
    found: dict[Kind, list[tuple[int, Job]]] = {}
    for number, (kind, job) in enumerate(zip(kinds, jobs, strict=True)):
        found.setdefault(kind, []).append((number, job))
    return dict(found)


def cut(jobs_of: Mapping[Kind, Numbered], most: int) -> list[tuple[Kind, Numbered]]:
    """Return the arrays to submit, of `most` tasks at most."""
    return [(kind, jobs[begin : begin + most]) for kind, jobs in jobs_of.items() for begin in range(0, len(jobs), most)]


def show(jobs_of: Mapping[Kind, Numbered], folder: Path) -> None:
    """Print the scripts, with names in place of the run directories, which are not made."""
    for kind, jobs in cut(jobs_of, min(array_size(), _TASKS)):
        print(kind.script([str(folder / f"RUN_DIR_{number}") for number, _ in jobs], folder / "array.sbatch"), end="")


def submit(jobs_of: Mapping[Kind, Numbered], folder: Path, submitted: Callable[[int, str], None]) -> None:
    """Make the run directories and submit the arrays, one after another.

    Raises:
        RefusedError: Slurm, or a job, refuses; how many were submitted before is said. StoppedError: a signal came.
    """
    most = min(array_size(), _TASKS)
    arrays = cut(jobs_of, most)
    everything = [job for _, jobs in arrays for _, job in jobs]
    _prepare(everything)
    if len(arrays) > 1:
        why = "their options for sbatch differ" if len(arrays) == len(jobs_of) else f"an array holds {most} here"
        each = (
            "" if all(kind.parallelism is None for kind in jobs_of) else "; launcher.array_parallelism counts for each"
        )
        say(f"ddpexp: {len(everything)} jobs go into {len(arrays)} arrays, for {why}{each}", sys.stdout)
    known: list[str] = []

    def told(number: int, job_id: str) -> None:
        known.append(job_id)
        submitted(number, job_id)

    try:
        for kind, jobs in arrays:
            _submit(kind, jobs, folder, told)
    except ENDS:
        if known:
            say(
                f"ddpexp: {len(known)} of {len(everything)} jobs are submitted and go on; end them with scancel "
                f"{_arrays(known)}"
            )
        raise


def _prepare(jobs: Sequence[Job]) -> None:
    """Have the data made ready, once for all jobs that need the same."""
    ready: list[object] = []
    for job in jobs:
        if job.needs is None or job.needs not in ready:
            job.prepare()
            ready.append(job.needs)


def _submit(kind: Kind, jobs: Numbered, folder: Path, told: Callable[[int, str], None]) -> None:
    """Submit one array."""
    made = _make(jobs)
    if not made:
        return
    with signals_wait():
        try:
            array = sbatch(_write(kind, [str(run) for _, _, run in made], folder))
        except RefusedError as error:
            text, code = str(error), error.exit_code
            for _, job, _ in made:
                job.fail(Failure(rank=0, host=os.uname().nodename, kind="RefusedError", message=text, exit_code=code))
            raise
        for task, (number, _, _) in enumerate(made):
            told(number, f"{array}_{task}")
        for task, (_, job, run) in enumerate(made):
            if status(run) == "submitted":  # not begun yet
                job.note("submitted", job_id=f"{array}_{task}")
    of = f"{len(made)} job{'s' if len(made) > 1 else ''}"
    say(f"submitted array {array} of {of}  sweep directory {os.path.relpath(folder)}", sys.stdout)
    say(f"queue: squeue -j {array}    end all: scancel {array}    end one: scancel {array}_0", sys.stdout)


def _make(jobs: Numbered) -> list[tuple[int, Job, Path]]:
    """Make the run directories; without all of them there is no array, and those that were made are interrupted."""
    made: list[tuple[int, Job, Path]] = []
    try:
        for number, job in jobs:
            with suppress(FinishedError):  # by somebody else, meanwhile
                made.append((number, job, job.create().resolve()))
                job.note("submitted")  # before: it may begin at once
    except ENDS:
        for _, job in jobs:
            job.interrupt()
            job.close()
        raise
    return made


def _write(kind: Kind, runs: Sequence[str], folder: Path) -> Path:
    """Write the script under the first free name: those before it say what was submitted then."""
    path = folder / "array.sbatch"
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        for number in count(1):
            with suppress(FileExistsError), path.open("xb") as file:
                file.write(os.fsencode(kind.script(runs, path)))
                break
            path = folder / f"array-{number}.sbatch"
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {said_with_limit(error, path)}.") from None
    return path


def follow(job_ids: Sequence[str], ended: Callable[[int, str, int], None]) -> None:
    """Ask for all jobs at once until they have ended, and tell each end; like `Submitter.follow`."""
    left = dict(enumerate(job_ids))
    begin = time.monotonic()
    try:
        while left:
            found = states(left.values())
            for place, job_id in [(place, job_id) for place, job_id in left.items() if found[job_id] in ENDED]:
                del left[place]
                ended(place, found[job_id], _exit_code(job_id, found[job_id]))
            if left:
                time.sleep(min(_LONGEST_POLL_SECONDS, max(_POLL_SECONDS, (time.monotonic() - begin) / 60)))
    except StoppedError as error:  # of this command, which has nothing to do any more; not of the jobs
        say(
            f"ddpexp: {len(left)} job{'s go' if len(left) > 1 else ' goes'} on; end them with scancel "
            f"{_arrays(left.values())}"
        )
        error.quiet = True
        raise


def _arrays(job_ids: Iterable[str]) -> str:
    """Return the numbers of the arrays, as scancel takes them."""
    return " ".join(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))


def _exit_code(job_id: str, found: str) -> int:
    if found in ("COMPLETED", "FORGOTTEN"):
        return EXIT_DONE
    return state(job_id)[1] or EXIT_FAILED


def status(run: Path) -> str | None:
    """Return how far the job in a run directory says it is, or None before it says anything."""
    try:
        found: str = json.loads((run / "result.json").read_text())["status"]
        return found
    except (OSError, ValueError):
        return None
