"""Whether and how a start resumes the existing run in its directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ddpexp.checkpoint.format import complete_checkpoints, newest, scan
from ddpexp.config.compare import LENGTH, Change, compare, lengthens, list_changes, refuse
from ddpexp.config.instantiate import targets
from ddpexp.data.batch_plan import counted
from ddpexp.errors import FinishedError, RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.rendezvous.layout import check_threads
from ddpexp.run import sources
from ddpexp.run.directory import RunDir
from ddpexp.system.files import check_yaml, check_yaml_text, sha256, shortest
from ddpexp.system.job_schedulers import recorded_job
from ddpexp.system.secrets import masked_tree

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_IDENTITY = ("name", "sha256", "hash")  # keys of the result of `prepare` that identify the data


@dataclass(frozen=True)
class Start:
    """A start as far as it concerns an existing run."""

    name: str  # of the run, as the user types it
    text: str  # the new configuration
    overrides: Sequence[str]  # of this command
    resume: str = "auto"  # run.resume
    is_restart: bool = False  # the launcher has started the same command is_restart
    verifies: bool = False  # read the final checkpoint of a finished run completely


@dataclass(frozen=True)
class PreviousRun:
    """What exists of the run."""

    manifest: Mapping[str, Any] | None  # None: it was stopped before it started
    changes: Sequence[Change] = ()
    notes: Sequence[str] = field(default_factory=list)  # for the log: of the submission, of edits, of changed code
    replaces: bool = False  # this start replaces config.yaml


@dataclass(frozen=True)
class Stored:
    """The configuration that the last start accepted."""

    tree: Mapping[str, Any]
    edits: Sequence[Change] = ()  # manual edits of config.yaml since then


def inspect(run: RunDir, start: Start) -> PreviousRun:
    """Compare the run with what the start requests; changes nothing.

    Raises:
        FinishedError: there is nothing to do. RefusedError: the run cannot or should not be resumed.
    """
    manifest, result = run.read_if_present(run.manifest), run.read_if_present(run.result) or {}
    new = _read(start.text)
    stored = _stored(run, manifest)
    changes = _changes(run, stored, new, start.overrides)
    edits = stored.edits if stored is not None else ()
    refuse(changes, start.name, {edit.key for edit in edits})
    status = result.get("status")
    lost = _lost(run, result, start.verifies) if status == "done" else None
    if status == "done" and lost is None and not _is_longer(changes, new["trainer"], result):
        raise FinishedError(_finished(start.name, result, changes))
    if start.resume == "never" and not start.is_restart:
        raise RefusedError(
            f"{start.name} holds a run that is not finished, and run.resume=never does not resume it: choose another "
            "run.dir, or use run.resume=auto."
        )
    if status == "submitted" and not start.is_restart:
        _check_not_queued(start.name, result)
    if start.resume == "require":
        check_has_checkpoint(run, start.name)
    recorded = result.get("notes")
    notes = [str(note) for note in recorded] if isinstance(recorded, list) else []
    notes += _edit_notes(edits, _tree(run), new)
    notes += check_same_code(run, manifest, new, start.name)
    if lost is not None:
        notes.append(
            f"the run was finished at step {result.get('step')}, but its final checkpoint cannot be used ({lost})"
        )
    return PreviousRun(
        manifest, changes, list(dict.fromkeys(notes)), bool(changes) or (bool(edits) and _tree(run) != new)
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
    return _changes(run, _stored(run, run.read_if_present(run.manifest)), _read(start.text), start.overrides)


def _changes(run: RunDir, stored: Stored | None, new: Mapping[str, Any], overrides: Sequence[str]) -> list[Change]:
    if stored is None:
        return []
    if stored.edits:
        new = masked_tree(new)  # as the manifest stores it
    return compare(stored.tree, new, overrides, run.read_overrides())


def _stored(run: RunDir, manifest: Mapping[str, Any] | None) -> Stored | None:
    """Return what the last start accepted: config.yaml, or its contents before a manual edit.

    None if the run was stopped before it had one.

    Raises:
        RefusedError: it cannot be read.
    """
    tree = _tree(run)
    if tree is None:
        return None
    text = _accepted(run, manifest, sha256(run.config.read_text()))
    if text is None:
        return Stored(tree)
    try:
        check_yaml_text(text)
        before = _read(text)
    except (ValueError, yaml.YAMLError) as error:
        raise RefusedError(f"{run.manifest} cannot be read: {error}.") from None
    if not isinstance(before, dict) or not isinstance(before.get("run"), dict):
        raise RefusedError(f"{run.manifest} holds no configuration of a run.")
    edits = compare(before, masked_tree(tree), ())
    return Stored(before, edits) if edits else Stored(tree)  # otherwise only a comment was edited


def _accepted(run: RunDir, manifest: Mapping[str, Any] | None, now: str) -> str | None:
    """Return the configuration that the last start accepted, or None if config.yaml, with the hash `now`, is that.

    Also None if nothing records it: in a run directory of an older version.
    """
    checkpoint = newest(run.checkpoints)
    record = manifest.get("config") if manifest else None
    if not isinstance(record, Mapping):  # the checkpoint holds the configuration of the steps so far
        try:
            text = checkpoint.config if checkpoint is not None else None
        except (OSError, ValueError):
            return None
        return text if text is not None and sha256(text) != now else None
    hashes, text = record.get("sha256"), record.get("text")
    if not isinstance(hashes, list) or not isinstance(text, str) or sha256(text) == now:
        return None
    inputs = checkpoint.manifest.get("inputs") if checkpoint is not None else None
    trained = inputs.get("config_sha256") if isinstance(inputs, Mapping) else None
    # A start that was killed before it replaced the file has left the previous one, and has trained no step.
    return None if now in hashes and trained != sha256(text) else text


def _edit_notes(edits: Sequence[Change], tree: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """Return a log line for manual edits of config.yaml that this start uses, and one for the overridden.

    A full command overrides them all.
    """
    overridden = {change.key for change in compare(tree, new, ())} if edits and tree is not None else set()
    used = [str(edit) for edit in edits if edit.key not in overridden]
    ignored = [str(edit) for edit in edits if edit.key in overridden]
    title = "config.yaml was edited since the last start"
    return [
        *([f"{title}: {', '.join(used)}"] if used else []),
        *(
            [f"{title}, but this command overrides it (the edited file is kept beside): {', '.join(ignored)}"]
            if ignored
            else []
        ),
    ]


def code_of(tree: Mapping[str, Any]) -> sources.Code:
    """Return the code that a configuration refers to; imports nothing."""
    return sources.find(_targets(tree), _code(tree), _path(tree))


def check_same_code(run: RunDir, manifest: Mapping[str, Any] | None, new: Mapping[str, Any], name: str) -> list[str]:
    """Compare the code that `new` refers to with the code of the newest checkpoint; return notes for the log.

    Changes that the last start was allowed need not be allowed again if it ended before its first checkpoint.

    Raises:
        RefusedError: the code has changed and run.allow_changes does not list it.
    """
    trained = newest_inputs(run)
    if trained is None:  # no step was computed by other code
        return []
    step, inputs = trained
    last = manifest.get("inputs") if manifest else None
    accepted = last.get("code") if isinstance(last, Mapping) else None
    before = inputs.get("code", accepted)
    if not isinstance(before, Mapping):
        return []  # the checkpoint is of an older version
    named = before.get("targets")
    both = [target for target in _targets(new) if isinstance(named, list) and target in named]
    now = sources.find(both, _code(new), _path(new)).fingerprint  # a new target is not a surprise
    changes = sources.differences(before, now)
    if not changes:
        return []
    change = f"since step {step} {', '.join(changes)}"
    if "code" in (new["run"].get("allow_changes") or ()):
        return [f"{change} (run.allow_changes=[code])"]
    if isinstance(accepted, Mapping) and not sources.differences(accepted, now):
        return [f"{change}, which the last start was allowed to use"]
    raise RefusedError(
        f"{name}: {change}, so the steps to come would be computed by other code than the steps so far. Type "
        "run.allow_changes=[code] to resume with it, or start a new run with another run.dir."
    )


def newest_inputs(run: RunDir) -> tuple[int, Mapping[str, Any]] | None:
    """Return the step of the newest checkpoint and its inputs; None if there is no checkpoint."""
    checkpoint = newest(run.checkpoints)
    if checkpoint is None:
        return None
    inputs = checkpoint.manifest.get("inputs")
    return checkpoint.step, inputs if isinstance(inputs, Mapping) else {}


def _targets(tree: Mapping[str, Any]) -> list[str]:
    """Return the targets in a configuration that are a recipe's code."""
    sections = {name: tree.get(name) for name in ("task", "model", "data", "optimizer", "scheduler")}
    data = sections["data"]
    prepare = data.get("prepare") if isinstance(data, Mapping) else None
    return [name for name in (*(target for _, target in targets(sections, "")), prepare) if isinstance(name, str)]


def _path(tree: Mapping[str, Any]) -> list[str]:
    """Return the module search path as in Trust.make_importable: with run.trust, it includes the current folder."""
    return [*sys.path, os.curdir] if tree["run"].get("trust") else sys.path


def _code(tree: Mapping[str, Any]) -> Path | None:
    code = tree["run"].get("code")
    return Path(code) if isinstance(code, str) else None


def check_has_checkpoint(run: RunDir, name: str) -> None:
    """Check that the run has a complete checkpoint.

    Raises:
        RefusedError: there is none.
    """
    if not has_checkpoint(run):
        raise RefusedError(
            f"{name} holds no complete checkpoint, and run.resume=require starts from nothing else: use "
            "run.resume=auto."
        )


def has_checkpoint(run: RunDir | None) -> bool:
    """Return whether there is a complete checkpoint to resume from."""
    return run is not None and bool(complete_checkpoints(run.checkpoints))


def check_same_data(
    manifest: Mapping[str, Any] | None, data: Mapping[str, Any] | None, name: str, allowed: Sequence[str] = ()
) -> list[str]:
    """Compare the data with that of the manifest; return notes for the log.

    Raises:
        RefusedError: the data has changed and run.allow_changes does not list it.
    """
    before = manifest.get("data") if manifest else None
    data = masked_tree(data)  # as the manifest stores it
    if not isinstance(before, Mapping) or data is None:
        return []
    if all(key not in before or before[key] == data.get(key) for key in _IDENTITY):
        return []
    if "data" in allowed:
        return [f"data: {_data(before)} -> {_data(data)} (run.allow_changes=[data])"]
    raise RefusedError(
        f"{name} was trained on {_data(before)}, and the data here is {_data(data)}: the steps to come would see "
        "other samples. Make the same data available (data.root=...), type run.allow_changes=[data] to resume with "
        "this, or start a new run with another run.dir."
    )


def resolve_layout(previous: PreviousRun, layout: Layout, threads_key: str | int) -> tuple[Layout, list[str]]:
    """Return the layout that the run resumes with, and notes for the log.

    With trainer.threads=auto the number of threads stays the same, because it affects the last bits of the result.

    Raises:
        RefusedError: manifest.json, which is not trusted, has more threads than a worker can start.
    """
    notes = list(previous.notes)
    world = previous.manifest.get("world") if previous.manifest else None
    if isinstance(world, Mapping):
        size, threads, device = world.get("world_size"), world.get("threads"), world.get("device")
        if size != layout.world_size:
            notes.append(f"{counted(layout.world_size, 'worker')} instead of {size}")
        if device != layout.device:
            notes.append(f"device: {device} -> {layout.device}")
        if threads_key == "auto" and isinstance(threads, int) and threads > 0:
            check_threads(threads)
            if threads != layout.threads:
                notes.append(
                    f"threads: {threads} each as before, because another number changes the last bits of the result; "
                    f"this start would have chosen {layout.threads} (trainer.threads={layout.threads})"
                )
            layout = replace(layout, threads=threads)
    return layout, notes + list_changes(previous.changes)


def trust_arguments(run: RunDir) -> list[str]:
    """Return the arguments that trusted the run's code when it was started, as the run's files record them.

    Only for display, in the current folder: ddpexp never trusts a run directory's record of what code to run.
    """
    try:
        stored = _read(run.config.read_text())["run"]
        code, prefixes = stored["code"], stored["trust"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return []
    arguments = []
    if isinstance(code, str):
        options = config_options(run.command())
        arguments += [
            "--config-dir",
            shortest(Path(code) / (Path(options[-1].partition("=")[2] or options[-1]).name if options else "conf")),
        ]
    if isinstance(prefixes, list) and prefixes:
        arguments.append(f"run.trust=[{','.join(map(str, prefixes))}]")
    return arguments


def config_options(argv: Sequence[str]) -> list[str]:
    """Return the options of a command line that name the user's config folder."""
    for position, argument in enumerate(argv):
        if argument in ("--config-dir", "-cd"):
            return list(argv[position : position + 2])
        if argument.startswith(("--config-dir=", "-cd=")):
            return [argument]
    return []


def merge_overrides(run: RunDir, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a run, updated with those of this command.

    run.allow_changes is dropped, since it holds for one start only.
    """
    keys = {"run.allow_changes", *map(_key, overrides)}
    return [override for override in run.read_overrides() if _key(override) not in keys] + list(overrides)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _tree(run: RunDir) -> dict[str, Any] | None:
    """Return the stored configuration; None if the run was stopped before it had one."""
    if not run.config.exists():
        return None
    try:
        check_yaml(run.config)
        tree = _read(run.config.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RefusedError(f"{run.config} cannot be read: {error}.") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("run"), dict):
        raise RefusedError(f"{run.config} is not the configuration of a run.")
    return tree


def _read(text: str) -> Any:
    return yaml.load(text, Loader=_LOADER)


def _is_longer(changes: Sequence[Change], trainer: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Return whether the overrides give a finished run more steps."""
    return lengthens(changes) and not any(
        isinstance(trainer.get(key), int) and isinstance(result.get(fact), int | float) and trainer[key] <= result[fact]
        for key, fact in (("max_steps", "step"), ("epochs", "epoch"))
    )


def _finished(name: str, result: Mapping[str, Any], changes: Sequence[Change]) -> str:
    """Return the message for a finished run; raises if there are overrides that a finished run cannot apply."""
    other = next((change for change in changes if change.kind == "typed" and change.key not in LENGTH), None)
    state = f"{name} is finished at step {result.get('step')}{_metric(result.get('metrics'))}"
    if other is not None:
        raise RefusedError(
            f"{state}: {other} has no effect. Start a new run with another run.dir, or make this "
            "one longer with trainer.epochs or trainer.max_steps."
        )
    return f"{state}: nothing to do."


def _metric(metrics: Any) -> str:
    if not isinstance(metrics, Mapping) or not metrics:
        return ""
    name = next((name for name in metrics if "accuracy" in name), next(iter(metrics)))
    value = metrics[name]
    if not isinstance(value, int | float):
        return ""
    return f" ({name} {100 * value:.1f} %)" if "accuracy" in name else f" ({name} {value:.4g})"


def _check_not_queued(name: str, result: Mapping[str, Any]) -> None:
    """Check that no job for this run is queued or running: it would be trained twice."""
    job = recorded_job(result)
    if job is not None and not job.is_current() and job.is_over() is False:
        raise RefusedError(
            f"{name} was submitted as job {job.id}, which is in the queue: wait for it, or {job.cancel_command()} "
            "first."
        )


def _data(data: Mapping[str, Any]) -> str:
    digest = data.get("sha256") or data.get("hash")
    return f"{data.get('name')}{f' ({str(digest)[:12]})' if digest else ''}"
