"""Whether and how a start resumes the existing run in its directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpexp.checkpoint.format import complete_checkpoints, scan
from ddpexp.config.compare import LENGTH, Change, compare, lengthens, list_changes, refuse
from ddpexp.config.facts import resolve
from ddpexp.errors import FinishedError, RefusedError, subject
from ddpexp.launch import Layout
from ddpexp.launch.rendezvous.layout import check_threads
from ddpexp.run.directory import RunDir
from ddpexp.run.lost_files import check_nothing_lost, notes_on_lost
from ddpexp.run.same_inputs import check_same_code
from ddpexp.run.stored_config import (
    Stored,
    check_config_exists,
    edit_notes,
    parse_config,
    read_config,
    read_stored,
    recorded_facts,
)
from ddpexp.system.job_schedulers import recorded_job
from ddpexp.system.secrets import with_references
from ddpexp.system.text import counted, metric_text, one_line


@dataclass(frozen=True)
class Start:
    """A start as far as it concerns an existing run."""

    name: str  # of the run, as the user types it
    text: str  # the new configuration
    overrides: Sequence[str]  # of this command
    resume: str = "auto"  # run.resume
    is_restart: bool = False  # the launcher has started the same command again
    verifies: bool = False  # read the final checkpoint of a finished run completely


@dataclass(frozen=True)
class PreviousRun:
    """What exists of the run."""

    manifest: Mapping[str, Any] | None  # None: it was stopped before it started
    changes: Sequence[Change] = ()
    notes: Sequence[str] = field(default_factory=list)  # for the log: of the submission, of edits, of changed code
    replaces: bool = False  # this start replaces config.yaml


def inspect(run: RunDir, start: Start) -> PreviousRun:
    """Compare the run with what the start requests; changes nothing.

    Raises:
        FinishedError: there is nothing to do. RefusedError: the run cannot or should not be resumed.
    """
    manifest, result = run.read_if_present(run.manifest), run.read_if_present(run.result) or {}
    new = _new_config(start, manifest)
    check_config_exists(run, start.name)
    stored = read_stored(run, manifest)
    changes = _changes(run, stored, new, start.overrides)
    edits = stored.edits if stored is not None else ()
    refuse(changes, start.name, {edit.key for edit in edits})
    status = result.get("status")
    lost = _lost(run, result, start.verifies) if status == "done" else None
    continues = _is_longer(changes, new["trainer"], result) or _has_other_callbacks(changes, result)
    if status == "done" and lost is None and not continues:
        is_same_command = start.name.startswith("run.dir=") and not changes
        finished = _finished(start.name, result, changes, () if is_same_command else start.overrides)
        raise FinishedError(finished + check_nothing_lost(run, result, _ended(start.name, result)))
    if start.resume == "never" and not start.is_restart:
        raise RefusedError(
            "holds a run that is not finished, but run.resume=never does not resume it",
            **subject(start.name),
            suggestion="Choose another run.dir, or use run.resume=auto.",
        )
    if status == "submitted" and not start.is_restart:
        _check_not_queued(start.name, result)
    if start.resume == "require":
        check_has_checkpoint(run, start.name)
    recorded = result.get("notes")
    notes = [str(note) for note in recorded] if isinstance(recorded, list) else []
    notes += edit_notes(edits, read_config(run), new)
    notes += notes_on_lost(run) if has_checkpoint(run) else []
    notes += check_same_code(run, manifest, new, start.name)
    if lost is not None:
        notes.append(
            f"the run was finished at step {result.get('step')}, but its final checkpoint cannot be used ({lost})"
        )
    elif status == "done" and not has_checkpoint(run):
        notes.append(
            f"the run was finished at step {result.get('step')} and has no checkpoint any more: it starts from step 0"
        )
    return PreviousRun(
        manifest, changes, list(dict.fromkeys(notes)), bool(changes) or (bool(edits) and read_config(run) != new)
    )


def _lost(run: RunDir, result: Mapping[str, Any], verifies: bool) -> str | None:
    """Return why the final checkpoint of a finished run is unusable; None if it is fine or was removed deliberately.

    Checks names and sizes; `verifies` reads every byte.
    """
    checkpoints = scan(run.checkpoints)
    for damaged in checkpoints.damaged:
        if damaged.step == result.get("step"):
            return damaged.problem
    last = next((checkpoint for checkpoint in checkpoints.complete if checkpoint.step == result.get("step")), None)
    if last is None:
        return None
    return last.problem() if verifies else last.wrong_size()


def changes_of(run: RunDir, start: Start) -> list[Change]:
    """Return the differences between the stored configuration and the one of this start.

    Raises:
        RefusedError: the stored configuration cannot be read.
    """
    manifest = run.read_if_present(run.manifest)
    return _changes(run, read_stored(run, manifest), _new_config(start, manifest), start.overrides)


def _new_config(start: Start, manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the configuration of this start, with the facts of the data that the run was started with."""
    new: dict[str, Any] = resolve(parse_config(start.text), recorded_facts(manifest))
    return new


def _changes(run: RunDir, stored: Stored | None, new: Mapping[str, Any], overrides: Sequence[str]) -> list[Change]:
    if stored is None:
        return []
    return compare(with_references(stored.tree), new, overrides, run.read_overrides())


def check_has_checkpoint(run: RunDir, name: str) -> None:
    """Check that the run has a complete checkpoint.

    Raises:
        RefusedError: there is none.
    """
    if not has_checkpoint(run):
        raise RefusedError(
            "holds no complete checkpoint, but run.resume=require needs one",
            **subject(name),
            suggestion="Use run.resume=auto.",
        )


def has_checkpoint(run: RunDir | None) -> bool:
    """Return whether there is a complete checkpoint to resume from."""
    return run is not None and bool(complete_checkpoints(run.checkpoints))


def resolve_layout(previous: PreviousRun, layout: Layout, threads_key: str | int) -> tuple[Layout, list[str]]:
    """Return the layout that the run resumes with, and notes for the log.

    With trainer.threads=auto the number of threads stays the same, because it affects the last bits of the result.

    Raises:
        RefusedError: manifest.json, which is not trusted, has more threads than a worker can start.
    """
    notes = list(previous.notes)
    world = previous.manifest.get("world") if previous.manifest else None
    if isinstance(world, Mapping):
        size = world.get("world_size")
        device = world.get("device")
        if size != layout.world_size:
            notes.append(f"{counted(layout.world_size, 'worker')} instead of {size}")
        if device != layout.device:
            notes.append(f"device: {device} -> {layout.device}")
        chosen = layout.threads
        layout = with_threads_of(layout, previous.manifest, threads_key)
        if layout.threads != chosen:
            notes.append(
                f"threads: {layout.threads} each as before, because another number changes the last bits of the "
                f"result; this start would have chosen {chosen} (trainer.threads={chosen})"
            )
    return layout, notes + list_changes(previous.changes)


def with_threads_of(layout: Layout, manifest: Mapping[str, Any] | None, threads_key: str | int) -> Layout:
    """Return a layout with the threads of another run, if trainer.threads is auto: see `resolve_layout`."""
    world = manifest.get("world") if manifest else None
    threads = world.get("threads") if isinstance(world, Mapping) else None
    if threads_key != "auto" or not isinstance(threads, int) or threads <= 0:
        return layout
    check_threads(threads)
    return replace(layout, threads=threads)


def _is_longer(changes: Sequence[Change], trainer: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Return whether the overrides give a finished run more steps."""
    return lengthens(changes) and not any(
        isinstance(trainer.get(key), int | float)
        and isinstance(result.get(fact), int | float)
        and trainer[key] <= result[fact]
        for key, fact in (("max_steps", "step"), ("epochs", "epoch"), ("max_seconds", "elapsed_seconds"))
    )


def _has_other_callbacks(changes: Sequence[Change], result: Mapping[str, Any]) -> bool:
    """Return whether the overrides change the callbacks of a run that has ended early, which one of them may have."""
    callbacks = any(change.kind == "typed" and change.key.partition(".")[0] == "callbacks" for change in changes)
    return callbacks and isinstance(result.get("stopped"), str)


def _finished(name: str, result: Mapping[str, Any], changes: Sequence[Change], typed: Sequence[str] = ()) -> str:
    """Return the message for a finished run; raises if there are overrides that a finished run cannot apply.

    `typed` are the overrides of this command.
    """
    other = next((change for change in changes if change.kind == "typed" and change.key not in LENGTH), None)
    stopped = result.get("stopped")
    early = isinstance(stopped, str)
    state = _ended(name, result)
    if other is not None:
        raise RefusedError(
            f"{state}: {other} has no effect",
            suggestion="Train a new run with it (ddpexp rerun), or make this run longer with trainer.epochs or "
            f"trainer.max_steps{' or trainer.max_seconds' if early else ''}.",
        )
    if isinstance(stopped, str) and (callback := re.match(r"callbacks\.[\w-]+", stopped)) is not None:
        return f"{state}. To continue, change {callback[0]}, or leave it out with callbacks=none."
    return f"{state}{'; there is' if early else ':'} nothing to do.{_of_totals(result, typed)}"


def _of_totals(result: Mapping[str, Any], typed: Sequence[str]) -> str:
    """Return how to train further, where the length was typed that the run has, or a shorter one."""
    for key, fact, unit in (("trainer.epochs", "epoch", "epochs"), ("trainer.max_steps", "step", "steps")):
        values = [override.partition("=")[2] for override in typed if override.partition("=")[0] == key]
        done = result.get(fact)
        if values and values[-1].isdecimal() and isinstance(done, int | float) and int(values[-1]) <= done:
            more = int(values[-1])
            return (
                f" {key}={more} counts from the beginning of the run: {more} more {unit} are {key}={int(done) + more}."
            )
    return ""


def _ended(name: str, result: Mapping[str, Any]) -> str:
    """Return the beginning of the message for a finished run."""
    stopped = result.get("stopped")
    early = f", where it ended early: {one_line(stopped)}" if isinstance(stopped, str) else ""
    return f"{name} is finished at step {result.get('step')}{_metric(result.get('metrics'))}{early}"


def _metric(metrics: Any) -> str:
    if not isinstance(metrics, Mapping) or not metrics:
        return ""
    name = next((name for name in metrics if "accuracy" in name), next(iter(metrics)))
    value = metrics[name]
    if not isinstance(value, int | float):
        return ""
    return f" ({name} {metric_text(name, value)})"


def _check_not_queued(name: str, result: Mapping[str, Any]) -> None:
    """Check that no job for this run is queued or running: it would be trained twice."""
    job = recorded_job(result)
    if job is not None and not job.is_current() and job.is_over() is False:
        raise RefusedError(
            f"was submitted as job {job.id}, which is in the queue",
            **subject(name),
            suggestion=f"Wait for it, or {job.cancel_command()} first.",
        )
