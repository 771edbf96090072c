"""Check that the code and the data of a resumed run are those of its steps so far."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpexp.checkpoint.format import newest
from ddpexp.config.instantiate import targets
from ddpexp.config.plugins import full_name
from ddpexp.errors import RefusedError, shown, subject
from ddpexp.run import sources
from ddpexp.run.directory import RunDir
from ddpexp.run.stored_config import recorded_facts
from ddpexp.system.secrets import masked_tree, resolved_references

_IDENTITY = ("name", "sha256", "hash")  # keys of the result of `prepare` that identify the data


def code_of(tree: Mapping[str, Any]) -> sources.Code:
    """Return the code that a configuration refers to; imports nothing."""
    return sources.find(_targets(tree), code_folder(tree), _path(tree))


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
        return []
    named = before.get("targets")
    both = [target for target in _targets(new) if isinstance(named, list) and target in named]
    now = sources.find(both, code_folder(new), _path(new)).fingerprint  # a new target is not a surprise
    changes = sources.differences(before, now)
    if not changes:
        return []
    change = f"since step {step} {', '.join(changes)}"
    if "code" in (new["run"].get("allow_changes") or ()):
        return [f"{change} (run.allow_changes=[code])"]
    if isinstance(accepted, Mapping) and not sources.differences(accepted, now):
        return [f"{change}, which the last start was allowed to use"]
    detailed = f"since step {step} {', '.join(sources.differences(before, now, with_parts=True))}"
    raise RefusedError(
        f"{name}: {detailed}, so the steps to come would be computed by other code than the steps so far",
        suggestion="Type run.allow_changes=[code] to resume with the new code, or start a new run with another "
        "run.dir.",
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
    named = (full_name(key.removesuffix("._target_"), target) for key, target in targets(sections, ""))
    return [name for name in (*named, prepare) if isinstance(name, str)]


def _path(tree: Mapping[str, Any]) -> list[str]:
    """Return the module search path as in Trust.make_importable: with run.trust, it includes the current folder."""
    return [*sys.path, os.curdir] if tree["run"].get("trust") else sys.path


def code_folder(tree: Mapping[str, Any]) -> Path | None:
    """Return the folder of the user's code in the configuration of this command, as it is written."""
    code = tree["run"].get("code")
    return Path(resolved_references(code)) if isinstance(code, str) else None


def check_same_data(
    manifest: Mapping[str, Any] | None, data: Mapping[str, Any] | None, name: str, allowed: Sequence[str] = ()
) -> list[str]:
    """Compare the data with that of the manifest; return notes for the log.

    Raises:
        RefusedError: the data has changed and run.allow_changes does not list it.
    """
    _check_same_facts(recorded_facts(manifest), data, name)
    before = manifest.get("data") if manifest else None
    data = masked_tree(data)  # as the manifest stores it
    if not isinstance(before, Mapping) or data is None:
        return []
    if all(key not in before or before[key] == data.get(key) for key in _IDENTITY):
        return []
    if "data" in allowed:
        return [f"data: {_data(before)} -> {_data(data)} (run.allow_changes=[data])"]
    raise RefusedError(
        f"was trained on {_data(before)}, and the data here is {_data(data)}: the steps to come would see other "
        "samples",
        **subject(name),
        suggestion=f"Make the same data available ({_place(data)}=...), type run.allow_changes=[data] to resume with "
        "the new data, or start a new run with another run.dir.",
    )


def _check_same_facts(before: Mapping[str, Any], data: Mapping[str, Any] | None, name: str) -> None:
    """Compare the facts of the data that the configuration of the run was resolved with.

    Raises:
        RefusedError: one has changed; run.allow_changes does not help, because the model was built with it.
    """
    now = (data or {}).get("facts") or {}
    for key, value in before.items():
        if key not in now or json.loads(json.dumps(now[key])) != value:
            here = f"{key}={shown(now[key])}" if key in now else f"no {key}"
            raise RefusedError(
                f"was started with {key}={shown(value)}, a fact of its data (${{facts:{key}}}), and the data here has "
                f"{here}: a model that was built with it would not fit",
                **subject(name),
                suggestion=f"Make the same data available ({_place(data or {})}=...), or start a new run with "
                "another run.dir.",
            )


def _place(data: Mapping[str, Any]) -> str:
    """Return the key that says where the data is."""
    return "data.path" if data.get("name") in ("text", "tar_shards", "arrays", "hf") else "data.root"


def _data(data: Mapping[str, Any]) -> str:
    digest = data.get("sha256") or data.get("hash")
    return f"{data.get('name')}{f' ({str(digest)[:12]})' if digest else ''}"
