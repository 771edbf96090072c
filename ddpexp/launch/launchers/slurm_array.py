"""Run the jobs of a sweep as tasks of Slurm job arrays: write the scripts, submit them, wait for the tasks."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpexp.errors import ENDS, EXIT_DONE, EXIT_FAILED, Failure, FinishedError, RefusedError, StoppedError
from ddpexp.launch import Failed, Interrupted, Job
from ddpexp.launch.launchers.slurm_follow import Silence
from ddpexp.launch.launchers.slurm_text import checked_script
from ddpexp.system.files import first_free_name, write_data
from ddpexp.system.job_schedulers.base import FORGOTTEN, JobState
from ddpexp.system.job_schedulers.slurm import SLURM, array_size
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.process import deferred_stop_signals
from ddpexp.system.terminal import print_message
from ddpexp.system.text import counted

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 1.0, 10.0  # all users of a cluster share the controller
_TASKS = 10_000  # per array: their run directories are in its script, which Slurm limits to 4 MiB

Numbered = Sequence[tuple[int, Job]]
"""Jobs, each with its index among all that are submitted."""


@dataclass(frozen=True)
class Kind:
    """What the tasks of an array have in common: its script except for the run directories."""

    options: tuple[str, ...]  # lines for Slurm
    setup: tuple[str, ...]
    step: str  # srun and the command, without the run directory
    parallelism: int | None

    def script(self, runs: Sequence[str], path: Path) -> str:
        """Return the text of an array's script, to be written to `path`: task n uses the n-th run directory.

        Each task writes to a log in its own run directory, as a single job does. Slurm's patterns cannot express that,
        so the shell redirects; the array's own log has the output before that.
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
    """Group jobs by what their scripts have in common."""
    jobs_of: dict[Kind, list[tuple[int, Job]]] = {}
    for number, (kind, job) in enumerate(zip(kinds, jobs, strict=True)):
        jobs_of.setdefault(kind, []).append((number, job))
    return dict(jobs_of)


def cut(jobs_of: Mapping[Kind, Numbered], size: int) -> list[tuple[Kind, Numbered]]:
    """Return the arrays to submit, of at most `size` tasks each."""
    return [(kind, jobs[begin : begin + size]) for kind, jobs in jobs_of.items() for begin in range(0, len(jobs), size)]


def show(jobs_of: Mapping[Kind, Numbered], folder: Path) -> None:
    """Print the scripts; the run directories in them are not created."""
    for kind, jobs in cut(jobs_of, min(array_size(), _TASKS)):
        text = kind.script([str(job.run_dir or folder) for _, job in jobs], folder / "array.sbatch")
        checked_script(text, "array.sbatch")
        print(text, end="")


def submit(jobs_of: Mapping[Kind, Numbered], folder: Path, submitted: Callable[[int, str], None]) -> None:
    """Create the run directories and submit the arrays, one after another.

    Raises:
        RefusedError: Slurm, or a job, refuses. StoppedError: a signal arrived. What was submitted before is printed.
    """
    size = min(array_size(), _TASKS)
    arrays = cut(jobs_of, size)
    everything = [job for _, jobs in arrays for _, job in jobs]
    _prepare(everything)
    if len(arrays) > 1:
        why = "their options for sbatch differ" if len(arrays) == len(jobs_of) else f"an array holds {size} here"
        each = (
            "" if all(kind.parallelism is None for kind in jobs_of) else "; launcher.array_parallelism counts for each"
        )
        print_message(f"ddpexp: {len(everything)} jobs go into {len(arrays)} arrays, for {why}{each}", sys.stdout)
    job_ids: list[str] = []

    def record(number: int, job_id: str) -> None:
        job_ids.append(job_id)
        submitted(number, job_id)

    try:
        for kind, jobs in arrays:
            _submit(kind, jobs, folder, record)
    except ENDS:
        if job_ids:
            print_message(
                f"ddpexp: {len(job_ids)} of {len(everything)} jobs are submitted and keep running; cancel them with "
                f"{SLURM.cancel_command(_arrays(job_ids))}"
            )
        raise


def _prepare(jobs: Sequence[Job]) -> None:
    """Prepare the data, once for all jobs that need the same."""
    ready: list[object] = []
    for portable in [job.require_portable() for job in jobs]:
        if portable.needs not in ready:
            portable.prepare()
            ready.append(portable.needs)


def _submit(kind: Kind, jobs: Numbered, folder: Path, record: Callable[[int, str], None]) -> None:
    """Submit one array."""
    created = _create(jobs)
    if not created:
        return
    with deferred_stop_signals():  # nothing else knows the jobs' ids until they are recorded
        try:
            array = SLURM.submit(_write(kind, [str(run) for _, _, run in created], folder))
        except RefusedError as error:
            for _, job, _ in created:
                job.lifecycle.end(Failed(Failure.of_refusal(error)))
            raise
        for task, (number, _, _) in enumerate(created):
            record(number, f"{array}_{task}")
        for task, (_, job, _) in enumerate(created):
            job.require_portable().submitted(job_id=f"{array}_{task}")
    size = counted(len(created), "job")
    print_message(f"submitted array {array} of {size}  sweep directory {os.path.relpath(folder)}", sys.stdout)
    print_message(f"queue: squeue -j {array}    end all: scancel {array}    end one: scancel {array}_0", sys.stdout)


def _create(jobs: Numbered) -> list[tuple[int, Job, Path]]:
    """Create the run directories; if one fails there is no array, and all are recorded as interrupted."""
    created: list[tuple[int, Job, Path]] = []
    try:
        for number, job in jobs:
            with suppress(FinishedError):  # another command has finished it in the meantime
                created.append((number, job, job.require_portable().create()))
    except ENDS:
        for _, job in jobs:
            job.lifecycle.end(Interrupted())
        raise
    return created


def _write(kind: Kind, runs: Sequence[str], folder: Path) -> Path:
    """Write the script under the first free name: earlier ones document what was submitted before."""
    path = folder / "array.sbatch"
    path = first_free_name(path) if os.path.lexists(path) else path
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        write_data(path, checked_script(kind.script(runs, path), path.name))
    except OSError as error:
        raise RefusedError(f"cannot be written: {reason_with_limit(error, path)}", place=path) from None
    return path


def follow(job_ids: Sequence[str], ended: Callable[[int, str, int], None]) -> None:
    """Poll all jobs together until they have ended, and report each end; like `Submitter.follow`."""
    running = dict(enumerate(job_ids))
    begin = time.monotonic()
    silence = Silence(*_arrays(job_ids))
    try:
        while running:
            states = SLURM.states(running.values())
            silence.note(next(iter(states.values())))
            for number, job_id in [item for item in running.items() if states[item[1]].is_over]:
                del running[number]
                ended(number, states[job_id].name, _exit_code(job_id, states[job_id]))
            if running:
                time.sleep(min(_LONGEST_POLL_SECONDS, max(_POLL_SECONDS, (time.monotonic() - begin) / 60)))
    except StoppedError as error:  # it stops this command, not the jobs
        print_message(
            f"ddpexp: {len(running)} job{'s keep' if len(running) > 1 else ' keeps'} running; cancel them with "
            f"{SLURM.cancel_command(_arrays(running.values()))}"
        )
        error.quiet = True
        raise


def _arrays(job_ids: Iterable[str]) -> list[str]:
    """Return the ids of the arrays."""
    return list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))


def _exit_code(job_id: str, state: JobState) -> int:
    if state.name in ("COMPLETED", FORGOTTEN):
        return EXIT_DONE
    return SLURM.state(job_id)[1] or EXIT_FAILED
