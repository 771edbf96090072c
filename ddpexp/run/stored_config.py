"""The configuration that a run directory holds: what its last start accepted, and manual edits since then."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddpexp.checkpoint.format import CONFIG, complete_checkpoints, newest
from ddpexp.config.compare import Change, compare
from ddpexp.config.facts import resolve
from ddpexp.errors import RefusedError, subject
from ddpexp.run.directory import RunDir
from ddpexp.system.files import check_yaml, check_yaml_text, sha256, shortest
from ddpexp.system.secrets import Masked, held_in, with_references
from ddpexp.system.yaml_text import load_yaml


@dataclass(frozen=True)
class Stored:
    """The configuration that the last start accepted."""

    tree: Mapping[str, Any]
    edits: Sequence[Change] = ()  # manual edits of config.yaml since then


def read_stored(run: RunDir, manifest: Mapping[str, Any] | None) -> Stored | None:
    """Return what the last start accepted: config.yaml, or its contents before a manual edit.

    None if the run was stopped before it had one.

    Raises:
        RefusedError: it cannot be read.
    """
    tree = read_config(run)
    if tree is None:
        return None
    tree = resolve(tree, recorded_facts(manifest))
    text = _accepted(run, manifest, sha256(run.config.read_text()))
    if text is None:
        return Stored(tree)
    try:
        check_yaml_text(text)
        before = resolve(parse_config(text), recorded_facts(manifest))
    except (ValueError, yaml.YAMLError) as error:
        raise RefusedError(f"cannot be read: {error}", place=run.manifest) from None
    if not isinstance(before, dict) or not isinstance(before.get("run"), dict):
        raise RefusedError("holds no configuration of a run", place=run.manifest)
    edits = compare(before, with_references(tree), ())
    return Stored(before, edits) if edits else Stored(tree)  # otherwise only a comment was edited


def recorded_facts(manifest: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the facts of its data that a run was started with."""
    recorded = manifest.get("facts") if manifest else None
    return recorded if isinstance(recorded, Mapping) else {}


def _accepted(run: RunDir, manifest: Mapping[str, Any] | None, now: str) -> str | None:
    """Return the configuration that the last start accepted, or None if config.yaml, with the hash `now`, is that.

    Also None if nothing records it.
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


def edit_notes(edits: Sequence[Change], tree: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
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


def read_config(run: RunDir) -> dict[str, Any] | None:
    """Return the stored configuration; None if the run was stopped before it had one."""
    if not run.config.exists():
        return None
    try:
        check_yaml(run.config)
        tree = parse_config(run.config.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())  # PyYAML's is of several lines
        raise RefusedError(f"cannot be read: {problem}", suggestion=_remedy(run), place=run.config) from None
    if not isinstance(tree, dict) or not isinstance(tree.get("run"), dict):
        raise RefusedError("is not the configuration of a run", suggestion=_remedy(run), place=run.config)
    return tree


def _remedy(run: RunDir) -> str:
    """Return what to do without a config.yaml that can be read."""
    copy = newest_config(run)
    if copy is None:
        return "No checkpoint holds a copy: put one back, or start a new run with another run.dir."
    return f"Its newest checkpoint holds a copy: {copy_command(copy, run.config)}"


def newest_config(run: RunDir) -> Path | None:
    """Return the copy of config.yaml in the newest checkpoint that has one that can be read."""
    for checkpoint in complete_checkpoints(run.checkpoints):
        path = checkpoint / CONFIG
        try:
            check_yaml(path)
            tree = parse_config(path.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(tree, dict) and isinstance(tree.get("run"), dict):
            return path
    return None


def copy_command(copy: Path, config: Path) -> str:
    """Return the command that puts the copy of a checkpoint in the place of config.yaml."""
    return shlex.join(["cp", shortest(copy), shortest(config)])


def check_config_exists(run: RunDir, name: str) -> None:
    """Check that config.yaml is not missing where there are checkpoints; `name` as for `check_config`.

    Raises:
        RefusedError: it is; with the command that copies it from a checkpoint.
    """
    if not run.config.exists() and complete_checkpoints(run.checkpoints):
        raise RefusedError("Its config.yaml is missing", suggestion=_remedy(run), **subject(name))


def check_config(run: RunDir, name: str) -> None:
    """Check that config.yaml can be read; `name` is the run's name in the message.

    Raises:
        RefusedError: it cannot; with the command that copies it from a checkpoint.
    """
    check_config_exists(run, name)
    try:
        read_config(run)
    except RefusedError as error:
        raise RefusedError(error.reason, suggestion=error.suggestion, **subject(name, error.place)) from None


def parse_config(text: str) -> Any:
    """Parse the text of a config.yaml."""
    return load_yaml(text)


def checked_text(text: str) -> Masked:
    """Return the text of a config.yaml that may be written as it is: masking would make it unreadable.

    Raises:
        RefusedError: it holds a secret, although its values were replaced by references.
    """
    if held_in(text) is not None and (values := load_yaml(text)) != with_references(values):
        raise RefusedError(f"config.yaml would hold {held_in(text)}", suggestion="Give that variable another value.")
    return Masked(text)


def job_identity(text: str) -> dict[str, Any]:
    """Return what all commands of a job must agree on: the configuration except the node rank."""
    values: dict[str, Any] = parse_config(text)
    launcher = values.get("launcher")
    if isinstance(launcher, dict):
        launcher.pop("node_rank", None)
    return values


def trained_data(manifest: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the description of the data that a run was trained on, from its manifest."""
    data = (manifest or {}).get("data")
    return data if isinstance(data, Mapping) else {}


def data_facts(manifest: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return all facts of the data that a run was trained on, from its manifest."""
    facts = trained_data(manifest).get("facts")
    return facts if isinstance(facts, Mapping) else {}
