"""Running a sweep: its directory, its jobs, and how it ends."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpexp.config.build import build
from ddpexp.config.sweeps import Swept
from ddpexp.errors import EXIT_DONE, RefusedError, StoppedError
from ddpexp.launch.workers.client import Server
from ddpexp.run import lock
from ddpexp.run.directory import check_name
from ddpexp.settings.run import SweepSettings
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.hydra_sweeper import FAILURE_RATE, check_grid_size, is_grid, run_sweeper
from ddpexp.sweep.job_status import FINAL
from ddpexp.sweep.record import Goal
from ddpexp.sweep.runner import SweepFailed, SweepRunner
from ddpexp.sweep.sweep_log import SweepLog
from ddpexp.sweep.view import View
from ddpexp.system import caller, files
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.terminal import print_message


def run_sweep(swept: Swept, server: Server | None) -> int:
    """Run a sweep to its end and return the exit code.

    Raises:
        RefusedError: nothing was started. SweepFailed: jobs failed. StoppedError: a signal ended it.
    """
    settings = build(SweepSettings, swept.settings, "sweep")
    for warning in swept.warnings:
        print_message(f"ddpexp: warning: {warning}")
    _check_sweeper(swept, settings)
    check_grid_size(swept)
    parents = files.missing_folders(Path(swept.directory).parent)
    folder, is_new = _folder(swept)
    own_lock = None
    sweep = None
    try:
        own_lock = lock.take(folder.path, folder.path / "none", files.relative(folder.path))
        folder.check_no_links()
        caller.report(caller.Directory(str(folder.path.absolute()), is_sweep=True))
        view = View(folder, Goal(settings.objective, settings.mode), settings.picture)
        sweep = SweepRunner(swept, SweepLog(folder, settings, view), server)
        try:
            note = run_sweeper(swept, folder, sweep.run, continues=settings.on_failure == "continue")
            if sweep.log.began:  # false if the sweep has only printed its plan
                view.finish()
        except StoppedError as error:
            if not sweep.log.began:
                raise
            if not error.quiet:
                raise StoppedError(error.signum, _how_to_resume(sweep)) from None
            print_message(f"ddpexp: {_how_to_resume(sweep)}")  # jobs that continue without this command are reported
            raise
        finally:
            view.close()
        return _exit_code(sweep, note)
    finally:
        if sweep is not None:
            sweep.close()
        if own_lock is not None:
            own_lock.release()
        if is_new and (sweep is None or not sweep.log.began):
            shutil.rmtree(folder.path, ignore_errors=True)  # a refused sweep leaves nothing behind
            files.remove_empty(parents)


def _check_sweeper(swept: Swept, settings: SweepSettings) -> None:
    """Check that a sweeper that chooses jobs by their results has an objective."""
    if is_grid(swept):
        if intervals := swept.composed.intervals:
            raise RefusedError(
                f"{intervals[0]} needs a sweeper that chooses values",
                suggestion="Add hydra/sweeper=optuna, or list the values.",
            )
        return
    if settings.objective is None:
        raise RefusedError(
            "hydra/sweeper chooses jobs by their results",
            suggestion="Name the metric with sweep.objective=eval/accuracy sweep.mode=max.",
        )
    name = swept.sweeper.get("direction")
    if name in ("minimize", "maximize") and not name.startswith(settings.mode):
        raise RefusedError(
            f"contradicts sweep.mode={settings.mode}",
            key="hydra.sweeper.direction",
            value=name,
            suggestion="Use the same direction for both.",
        )


def _folder(swept: Swept) -> tuple[SweepDir, bool]:
    """Return the sweep's directory, and whether it was created just now."""
    path = Path(swept.directory)
    check_name(path, "hydra.sweep.dir")
    try:
        if not swept.is_named:
            path.parent.mkdir(parents=True, exist_ok=True)
            return SweepDir(files.make_numbered_folder(path)), True
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(
            f"cannot be made: {reason_with_limit(error, path)}",
            key="hydra.sweep.dir",
            value=path,
            suggestion="Choose another place.",
        ) from None
    folder = SweepDir(path)
    if not folder.is_sweep() and any(entry.name not in (lock.NAME, "multirun.yaml") for entry in path.iterdir()):
        raise RefusedError(
            "holds files that are not of a sweep",
            key="hydra.sweep.dir",
            value=path,
            suggestion="Choose another directory, or remove this one.",
        )
    return folder, is_new


def _exit_code(sweep: SweepRunner, note: str) -> int:
    """Report how the sweep ended, and return the exit code; `note` is of its sweeper.

    Raises:
        SweepFailed: jobs failed.
    """
    log = sweep.log
    failed = log.ended_as("failed", "interrupted")
    if failed:
        lines = [f"{len(failed)} of {len(log.planned)} jobs failed:"]
        lines += [f"  {log.planned[number].name}: {log.ended[number].message}" for number in failed]
        diverged = [number for number in failed if log.ended[number].diverged]
        advice = (
            []
            if len(diverged) == len(failed) and not note
            else [_how_to_resume(sweep, [f"{FAILURE_RATE}=1"] if note else [])]
        )
        if diverged:
            advice.insert(0, _of_diverged(log.planned[diverged[0]].name))
        raise SweepFailed("\n".join([*lines, *([note] if note else []), *advice]))
    if (lost := log.lost_objective()) is not None:
        raise SweepFailed(lost)
    if submitted := log.ended_as("submitted"):
        print_message(f"{len(submitted)} of {len(log.planned)} jobs are submitted; how far they are: python -m ddpexp "
            f"status {files.typed(log.folder.path)}", sys.stdout)  # fmt: skip
    if left_out := sweep.left_out():
        print_message(
            f"ddpexp: warning: {len(left_out)} of the directory's jobs are not finished, and not part of this command: "
            f"{', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}"
        )
    return EXIT_DONE


def _of_diverged(name: str) -> str:
    return (
        f"A resume leaves a job that has diverged as it is, for it would diverge again: change it, for example with "
        f"trainer.nonfinite=skip, or remove its directory ({name}) to repeat it."
    )


def _how_to_resume(sweep: SweepRunner, further: Sequence[str] = ()) -> str:
    done = sweep.log.ended_as(*FINAL)
    return (
        f"{len(done)} of {len(sweep.log.planned)} jobs are done; resume the sweep with:\npython -m ddpexp "
        f"{shlex.join([*sweep.resume_arguments(), *further])}"
    )
