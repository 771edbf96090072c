"""The command `ddpexp rerun`: train the experiment of a run again, in a directory of its own."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpexp.cli.start import launch
from ddpexp.cli.verb import Call
from ddpexp.config.compare import rules_of
from ddpexp.errors import RefusedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.run import directory, manifest, repeated
from ddpexp.run.directory import RunDir
from ddpexp.run.history import values_of
from ddpexp.run.provenance import provenance
from ddpexp.run.same_inputs import code_of
from ddpexp.run.stored_config import parse_config
from ddpexp.run.stored_run import find_run, read_to_rerun
from ddpexp.run.training import Training
from ddpexp.sweep.comparison import best_job
from ddpexp.sweep.folder import SweepDir
from ddpexp.system import files
from ddpexp.system.terminal import print_message


def rerun(call: Call) -> int:
    """Train the experiment of a run again, and return the exit code."""
    return launch(*_job(call), call.server)


def _job(call: Call) -> tuple[Launcher, Job]:
    """Return how to train it.

    Raises:
        RefusedError: no such run, one whose code is not trusted, arguments that do not fit or, with --exact, something
            that differs.
    """
    source, arguments = call.source()
    run = find_run(run_of(source, "--best" in call.options), call.name)
    is_exact = "--exact" in call.options
    experiment, recomposed = read_to_rerun(run, arguments, f"rerun {source}", call.restate, is_exact)
    named = experiment.run.dir
    if named is not None and Path(named).resolve() == run.path.resolve():
        raise RefusedError(
            "is the directory of the run itself, and a rerun has one of its own",
            key="run.dir",
            value=named,
            suggestion=f"Choose another one, or continue the run with python -m ddpexp resume {files.typed(run.path)}.",
        )
    if named is not None:
        _check_free(RunDir(Path(named)), run)
    if is_exact:
        _check_exact(run, recomposed.text)
    for note in (*recomposed.notes, *recomposed.warnings) if os.environ.get("RANK", "0") == "0" else ():
        print_message(f"ddpexp: {note}")
    training = Training(experiment, recomposed.text, recomposed.overrides, call.command, is_stored=True)
    return experiment.launcher, training.job


def _check_free(target: RunDir, run: RunDir) -> None:
    """Check that a directory holds no run but an earlier start of this rerun, which would be resumed.

    Raises:
        RefusedError: it holds another run.
    """
    if not directory.is_ours(target.path):
        return
    recorded: Any = None
    with suppress(OSError, ValueError, TypeError, KeyError):
        recorded = parse_config(target.config.read_text())["run"]["rerun_of"]
    if recorded is None or Path(str(recorded)).resolve() != run.path.resolve():
        raise RefusedError(
            f"holds another run, and a rerun of {files.typed(run.path)} has a directory of its own",
            key="run.dir",
            value=files.relative(target.path),
            suggestion=f"Choose another one, or continue that run with python -m ddpexp resume "
            f"{files.typed(target.path)}.",
        )


def _check_exact(run: RunDir, text: str) -> None:
    """Check what is known before the machines and the data are, so that nothing is submitted in vain."""
    tree = parse_config(text)
    start = {**manifest.versions(), "inputs": {"code": code_of(tree).fingerprint}}
    groups = repeated.known_to_command(provenance(values_of(tree, run.read_if_present(run.manifest)), start))
    repeated.check_exact(run, groups, rules_of(tree))


def run_of(source: str, is_best: bool) -> str:
    """Return the run that is meant: with `is_best` the best job of a sweep.

    Raises:
        RefusedError: a sweep without --best, --best without a sweep, or a sweep that has no best job.
    """
    path = Path(source)
    if not SweepDir(path).is_sweep():
        if is_best and path.exists():
            raise RefusedError("is no sweep, whose best job --best is", place=source, suggestion="Leave --best out.")
        return source
    if is_best:
        return str(best_job(path).path)
    typed = shlex.quote(source)
    raise RefusedError(
        "is a sweep, and one of its jobs is trained again",
        place=f"rerun {source}",
        suggestion=f"Type python -m ddpexp rerun {typed} --best, or name a job, such as {_first_job(path)}.",
    )


def _first_job(path: Path) -> str:
    from ddpexp.sweep.rows import rows_of

    rows: Sequence[Path] = [row.path for row in rows_of(path)]
    return files.typed(rows[0]) if rows else f"{shlex.quote(str(path))}/0000"
