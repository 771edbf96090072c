"""Whether and how a start goes on with the run that lies in a directory already."""

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
from ddpexp.errors import FinishedError, RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.rendezvous.layout import check_threads
from ddpexp.run import sources
from ddpexp.run.directory import RunDir
from ddpexp.system.files import check_yaml, check_yaml_text, sha256, shortest
from ddpexp.system.secrets import masked_tree
from ddpexp.system.slurm import exact_id, is_id, is_over, own_id

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_IDENTITY = ("name", "sha256", "hash")  # what `prepare` says of the data that tells it from other data


@dataclass(frozen=True)
class Start:
    """What a start asks of a run that is there."""

    name: str  # of the run, as typed
    text: str  # the new configuration
    typed: Sequence[str]  # the words of this command
    resume: str = "auto"  # run.resume
    again: bool = False  # the same command goes on: what started it has started it again
    verifies: bool = False  # the final checkpoint of a finished run is read, too


@dataclass(frozen=True)
class Earlier:
    """What there is of the run."""

    manifest: Mapping[str, Any] | None  # None: it was stopped before it began
    changes: Sequence[Change] = ()
    notes: Sequence[str] = field(
        default_factory=list
    )  # for the log: of a submission that became this job, of edits, of code
    replaces: bool = False  # config.yaml is not what this start trains


@dataclass(frozen=True)
class Stored:
    """The configuration that the last start has accepted."""

    tree: Mapping[str, Any]
    edits: Sequence[Change] = ()  # made to config.yaml by hand since then


def look(run: RunDir, start: Start) -> Earlier:
    """Hold the run against what is asked now; changes nothing.

    Raises:
        FinishedError: there is nothing to do. RefusedError: it cannot or should not be gone on with.
    """
    manifest, result = run.found(run.manifest), run.found(run.result) or {}
    new = _read(start.text)
    stored = _stored(run, manifest)
    changes = _changes(run, stored, new, start.typed)
    edits = stored.edits if stored is not None else ()
    refuse(changes, start.name, {edit.key for edit in edits})
    status = result.get("status")
    lost = _lost(run, result, start.verifies) if status == "done" else None
    if status == "done" and lost is None and not _is_longer(changes, new["trainer"], result):
        raise FinishedError(_finished(start.name, result, changes))
    if start.resume == "never" and not start.again:
        raise RefusedError(
            f"{start.name} holds a run that is not finished, and run.resume=never refuses to go on with it: choose "
            "another run.dir, or use run.resume=auto."
        )
    if status == "submitted" and not start.again:
        _check_not_queued(start.name, result.get("job_id"))
    if start.resume == "require":
        require(run, start.name)
    said = result.get("notes")
    notes = [str(note) for note in said] if isinstance(said, list) else []
    notes += _said_of_edits(edits, _tree(run), new)
    notes += check_same_code(run, manifest, new, start.name)
    if lost is not None:
        notes.append(
            f"the run was finished at step {result.get('step')}, but its final checkpoint cannot be used ({lost})"
        )
    return Earlier(manifest, changes, list(dict.fromkeys(notes)), bool(changes) or (bool(edits) and _tree(run) != new))


def _lost(run: RunDir, result: Mapping[str, Any], verifies: bool) -> str | None:
    """Return why the weights of a finished run are lost, None where they are not, or where its owner has removed them.

    A look at names and sizes; `verifies` reads every byte.
    """
    found = scan(run.checkpoints)
    for one in found.damaged:
        if one.step == result.get("step"):
            return one.problem
    last = next((one for one in found.complete if one.step == result.get("step")), None)
    if last is None:
        return None
    return last.problem() if verifies else last.wrong_size()


def changes_of(run: RunDir, start: Start) -> list[Change]:
    """Return in what the stored configuration differs from what is asked now.

    Raises:
        RefusedError: the stored one cannot be read.
    """
    return _changes(run, _stored(run, run.found(run.manifest)), _read(start.text), start.typed)


def _changes(run: RunDir, stored: Stored | None, new: Mapping[str, Any], typed: Sequence[str]) -> list[Change]:
    if stored is None:
        return []
    if stored.edits:
        new = masked_tree(new)  # as it was written
    return compare(stored.tree, new, typed, run.words())


def _stored(run: RunDir, manifest: Mapping[str, Any] | None) -> Stored | None:
    """Return what the last start has accepted: config.yaml, or what it was before somebody edited it.

    None where the run was stopped before it had one.

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
    return Stored(before, edits) if edits else Stored(tree)  # else it was a comment


def _accepted(run: RunDir, manifest: Mapping[str, Any] | None, now: str) -> str | None:
    """Return the configuration that the last start accepted, where the file with the hash `now` is not that.

    None, too, where nothing says what it was: in a run directory of an older version.
    """
    one = newest(run.checkpoints)
    record = manifest.get("config") if manifest else None
    if not isinstance(record, Mapping):  # what the steps so far were trained with is in their checkpoint
        try:
            text = one.config if one is not None else None
        except (OSError, ValueError):
            return None
        return text if text is not None and sha256(text) != now else None
    hashes, text = record.get("sha256"), record.get("text")
    if not isinstance(hashes, list) or not isinstance(text, str) or sha256(text) == now:
        return None
    inputs = one.manifest.get("inputs") if one is not None else None
    trained = inputs.get("config_sha256") if isinstance(inputs, Mapping) else None
    # A start that was killed before it replaced the file has left the one before, and has trained no step.
    return None if now in hashes and trained != sha256(text) else text


def _said_of_edits(edits: Sequence[Change], tree: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """Return a line for edits of config.yaml that this start follows, and one for the others.

    A whole command says all itself.
    """
    others = {change.key for change in compare(tree, new, ())} if edits and tree is not None else set()
    follows = [str(edit) for edit in edits if edit.key not in others]
    ignores = [str(edit) for edit in edits if edit.key in others]
    title = "config.yaml was edited since the last start"
    return [
        *([f"{title}: {', '.join(follows)}"] if follows else []),
        *([f"{title}, and kept beside, for this command says otherwise: {', '.join(ignores)}"] if ignores else []),
    ]


def code_of(tree: Mapping[str, Any]) -> sources.Code:
    """Return the code that a configuration names; imports nothing."""
    return sources.find(_targets(tree), _code(tree), _path(tree))


def check_same_code(run: RunDir, manifest: Mapping[str, Any] | None, new: Mapping[str, Any], name: str) -> list[str]:
    """Compare the code that `new` names with what the newest checkpoint was trained with; return what the log must say.

    What the last start has accepted need not be allowed again, where it was ended before its first checkpoint.

    Raises:
        RefusedError: the code has changed and run.allow_changes does not list it.
    """
    kept = newest_inputs(run)
    if kept is None:  # no step is kept that other code has computed
        return []
    step, inputs = kept
    last = manifest.get("inputs") if manifest else None
    accepted = last.get("code") if isinstance(last, Mapping) else None
    before = inputs.get("code", accepted)
    if not isinstance(before, Mapping):
        return []  # of an older version
    named = before.get("targets")
    both = [target for target in _targets(new) if isinstance(named, list) and target in named]
    now = sources.find(both, _code(new), _path(new)).fingerprint  # what is typed to be other code is no surprise
    changes = sources.differences(before, now)
    if not changes:
        return []
    what = f"since step {step} {', '.join(changes)}"
    if "code" in (new["run"].get("allow_changes") or ()):
        return [f"{what} (run.allow_changes=[code])"]
    if isinstance(accepted, Mapping) and not sources.differences(accepted, now):
        return [f"{what}, as the last start was allowed to"]
    raise RefusedError(
        f"{name}: {what}, so the steps to come would be computed by other code than the steps so far. Type "
        "run.allow_changes=[code] to resume with it, or start a new run with another run.dir."
    )


def newest_inputs(run: RunDir) -> tuple[int, Mapping[str, Any]] | None:
    """Return the step of the newest checkpoint and what it was trained with; None where there is no checkpoint."""
    one = newest(run.checkpoints)
    if one is None:
        return None
    inputs = one.manifest.get("inputs")
    return one.step, inputs if isinstance(inputs, Mapping) else {}


def _targets(tree: Mapping[str, Any]) -> list[str]:
    """Return what a configuration names of a recipe's code."""
    sections = {name: tree.get(name) for name in ("task", "model", "data", "optimizer", "scheduler")}
    data = sections["data"]
    prepare = data.get("prepare") if isinstance(data, Mapping) else None
    return [name for name in (*(target for _, target in targets(sections, "")), prepare) if isinstance(name, str)]


def _path(tree: Mapping[str, Any]) -> list[str]:
    """Return where modules are looked for, as Trust.make_importable has it.

    Those of run.trust in the current folder, too.
    """
    return [*sys.path, os.curdir] if tree["run"].get("trust") else sys.path


def _code(tree: Mapping[str, Any]) -> Path | None:
    code = tree["run"].get("code")
    return Path(code) if isinstance(code, str) else None


def require(run: RunDir, name: str) -> None:
    """Refuse a run without a complete checkpoint.

    Raises:
        RefusedError: there is none.
    """
    if not has_checkpoint(run):
        raise RefusedError(
            f"{name} holds no complete checkpoint, and run.resume=require starts from nothing else: use "
            "run.resume=auto."
        )


def has_checkpoint(run: RunDir | None) -> bool:
    """Tell whether there is a complete checkpoint to go on from."""
    return run is not None and bool(complete_checkpoints(run.checkpoints))


def check_same_data(
    manifest: Mapping[str, Any] | None, data: Mapping[str, Any] | None, name: str, allowed: Sequence[str] = ()
) -> list[str]:
    """Compare what was said of the data before with what is said now; return what the log must say.

    Raises:
        RefusedError: the data has changed and run.allow_changes does not list it.
    """
    before = manifest.get("data") if manifest else None
    data = masked_tree(data)  # as it was written
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


def settle(earlier: Earlier, layout: Layout, asked_threads: str | int) -> tuple[Layout, list[str]]:
    """Return the layout that the run goes on with, and what its log must say about this start.

    The number of threads stays where it was not typed: with another one the last bits of the result would be others.

    Raises:
        RefusedError: manifest.json, which anybody may have written, names more threads than a worker can start.
    """
    notes = list(earlier.notes)
    world = earlier.manifest.get("world") if earlier.manifest else None
    if isinstance(world, Mapping):
        size, threads, device = world.get("world_size"), world.get("threads"), world.get("device")
        if size != layout.world_size:
            notes.append(f"{size} -> {layout.world_size} workers")
        if device != layout.device:
            notes.append(f"device: {device} -> {layout.device}")
        if asked_threads == "auto" and isinstance(threads, int) and threads > 0:
            check_threads(threads)
            if threads != layout.threads:
                notes.append(
                    f"threads: {threads} each as before, for another number changes the last bits of the result; this "
                    f"start would have chosen {layout.threads} (trainer.threads={layout.threads})"
                )
            layout = replace(layout, threads=threads)
    return layout, notes + list_changes(earlier.changes)


def trusted_words(run: RunDir) -> list[str]:
    """Return the words that trusted the run's code when it was started, as its own files tell: only to be shown.

    They are to be typed in the current folder.
    """
    try:
        stored = _read(run.config.read_text())["run"]
        code, prefixes = stored["code"], stored["trust"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return []
    words = []
    if isinstance(code, str):
        typed = config_words(run.command())
        words += [
            "--config-dir",
            shortest(Path(code) / (Path(typed[-1].partition("=")[2] or typed[-1]).name if typed else "conf")),
        ]
    if isinstance(prefixes, list) and prefixes:
        words.append(f"run.trust=[{','.join(map(str, prefixes))}]")
    return words


def config_words(command: Sequence[str]) -> list[str]:
    """Return the words of a command line that say where the user's own configs are."""
    for place, word in enumerate(command):
        if word in ("--config-dir", "-cd"):
            return list(command[place : place + 2])
        if word.startswith(("--config-dir=", "-cd=")):
            return [word]
    return []


def merged(run: RunDir, typed: Sequence[str]) -> list[str]:
    """Return the words that a run was started with, and those that change it.

    What one start was allowed to is none of them.
    """
    keys = {"run.allow_changes", *map(_key, typed)}
    return [word for word in run.words() if _key(word) not in keys] + list(typed)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _tree(run: RunDir) -> dict[str, Any] | None:
    """Return the stored configuration; None when the run was stopped before it had one."""
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
    """Tell whether typed words give a finished run more steps."""
    return lengthens(changes) and not any(
        isinstance(trainer.get(key), int) and isinstance(result.get(fact), int | float) and trainer[key] <= result[fact]
        for key, fact in (("max_steps", "step"), ("epochs", "epoch"))
    )


def _finished(name: str, result: Mapping[str, Any], changes: Sequence[Change]) -> str:
    """Return the sentence, unless something was typed that no finished run can follow."""
    other = next((change for change in changes if change.kind == "typed" and change.key not in LENGTH), None)
    what = f"{name} is finished at step {result.get('step')}{_metric(result.get('metrics'))}"
    if other is not None:
        raise RefusedError(
            f"{what}: {other} would change nothing any more. Start a new run with another run.dir, or make this one "
            "longer with trainer.epochs or trainer.max_steps."
        )
    return f"{what}: nothing to do."


def _metric(metrics: Any) -> str:
    if not isinstance(metrics, Mapping) or not metrics:
        return ""
    name = next((name for name in metrics if "accuracy" in name), next(iter(metrics)))
    value = metrics[name]
    if not isinstance(value, int | float):
        return ""
    return f" ({name} {100 * value:.1f} %)" if "accuracy" in name else f" ({name} {value:.4g})"


def _check_not_queued(name: str, job_id: Any) -> None:
    """Refuse a run whose job waits in the queue or runs: it would be trained twice."""
    if isinstance(job_id, str) and is_id(job_id) and job_id not in (own_id(), exact_id()) and is_over(job_id) is False:
        raise RefusedError(
            f"{name} was submitted as job {job_id}, which is in the queue: wait for it, or scancel {job_id} first."
        )


def _data(data: Mapping[str, Any]) -> str:
    digest = data.get("sha256") or data.get("hash")
    return f"{data.get('name')}{f' ({str(digest)[:12]})' if digest else ''}"
