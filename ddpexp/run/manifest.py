"""manifest.json: where, on what and with which code a run happened; each fact once."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ddpexp.launch import Layout, Participants
from ddpexp.run.directory import FORMAT, RunDir
from ddpexp.run.repository import Snapshot
from ddpexp.system import gpus, nvml
from ddpexp.system.files import first_free_name, sha256
from ddpexp.system.job_schedulers import restart_count

_MOMENT = "%Y-%m-%dT%H:%M:%S.%f%z"
_OF_THE_RUN = (
    "format",
    "data",
    "facts",
    "resolved",
    "config",
    "init_from",
    "rerun_of",
    "earlier",
)  # keys of the whole run, not of a start


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    layout: Layout
    argv: Sequence[str]
    participants: Participants
    code: Snapshot
    inputs: Mapping[str, Any] | None = None  # hashes that identify configuration and code
    changes: Sequence[str] = ()  # the log's notes on differences from the previous start
    facts: Mapping[str, Any] | None = None  # of the data, which the configuration refers to
    resolved: Mapping[str, Any] | None = None  # the values of keys that are auto, as the first start chose them


def describe(
    start: Start,
    data: Mapping[str, Any] | None,
    before: Mapping[str, Any] | None = None,
    diff: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of manifest.json: the newest start, and in `earlier` how each previous start differed.

    `before` is its current content; `diff` describes the patch of the code.
    """
    facts = {
        "started": datetime.now().astimezone().strftime(_MOMENT),
        "command": list(start.argv),
        "git": start.code.git,
        "code_diff": diff,
        **versions(),
        "hosts": list(dict.fromkeys(start.participants.hosts)),
        "owners": sorted(set(start.participants.owners)),
        "platform": platform.platform(),
        **(_gpus() if start.layout.device == "cuda" else {}),
        "world": asdict(start.layout),
        "inputs": dict(start.inputs or {}),
        "changes": list(start.changes),
        "restart": restart_count(),
    }
    of_the_run = (
        {key: before[key] for key in ("init_from", "facts", "resolved", "rerun_of") if key in before} if before else {}
    )
    if start.facts:
        of_the_run["facts"] = {**of_the_run.get("facts", {}), **start.facts}
    if start.resolved:
        of_the_run["resolved"] = dict(start.resolved)
    earlier = _earlier(before, facts) if before else []
    return {"format": FORMAT, **facts, "data": dict(data) if data else None, **of_the_run, "earlier": earlier}


def _gpus() -> dict[str, Any]:
    """Return the models of the GPUs that this host's workers may use, and the driver's version, where it tells them."""
    answer = nvml.driver()
    used = {device.gpu for device in gpus.visible(answer.gpus, os.environ).devices}
    names = list(dict.fromkeys(gpu.name for gpu in answer.gpus if gpu.uuid in used and gpu.name))
    return {"gpus": {"models": names, "driver": answer.version}} if names else {}


def _earlier(before: Mapping[str, Any], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the previous starts, oldest first, each with the values that differ from the next start."""
    last = {key: value for key, value in before.items() if key not in _OF_THE_RUN}
    older = before.get("earlier")
    return [*(older if isinstance(older, list) else ()), _differing(last, facts)]


def _differing(start: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    keys = dict.fromkeys(("started", *start, *after))
    return {key: start.get(key) for key in keys if key == "started" or start.get(key) != after.get(key)}


def moment_of(started: Any) -> float | None:
    """Return when a start began, from its `started`; None if that is no time. Units: seconds since 1970."""
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.strptime(started, _MOMENT).timestamp()
    return None


def diff_of(run: RunDir, code: Snapshot, before: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, Path | None]:
    """Return the description of a start's code patch for manifest.json, and the path to write the patch to.

    The path is None if the patch has already been written.
    """
    if not code.diff:
        return None, None
    digest = hashlib.sha256(code.diff).hexdigest()
    recorded = before.get("code_diff") if before else None
    if isinstance(recorded, dict) and recorded.get("sha256") == digest:
        return recorded, None
    path = first_free_name(run.diff) if os.path.lexists(run.diff) else run.diff
    return {"file": path.name, "sha256": digest, "is_cut": code.is_cut}, path


def versions() -> dict[str, Any]:
    """Return the versions of Python and of all packages of this command."""
    return {"python": platform.python_version(), "packages": packages(sys.path)}


def packages(path: Sequence[str]) -> dict[str, str]:
    """Return the versions of all packages installed along `path`, by their normalized names.

    They are read from folder names, because opening all metadata takes longer than the first step of a run.
    """
    versions: dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or os.curdir)
        except OSError:
            continue
        for stem, _, kind in (name.rpartition(".") for name in names):
            if kind not in ("dist-info", "egg-info"):
                continue
            name, _, version = stem.partition("-")
            if not version:  # old versions of `pip install -e` left it out
                described = metadata.Distribution.at(Path(folder, f"{stem}.{kind}")).metadata
                version = described["Version"] if "Version" in described else ""  # noqa: SIM401, it has no `get`
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version.partition("-py")[0])
    return dict(sorted(versions.items()))


def accepted(text: str, replaced: str | None = None) -> dict[str, Any]:
    """Return the record of the accepted config.yaml for manifest.json, to detect later edits.

    `replaced` is the previous content of the file: a start that is killed before it has replaced the file leaves it,
    which is not an edit.
    """
    texts = [text] if replaced is None else [text, replaced]
    return {"sha256": list(dict.fromkeys(map(sha256, texts))), "text": text}
