"""What manifest.json says of a run: where, on what and with which code it happens; each thing once."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ddpexp.launch import Layout, Participants
from ddpexp.run.directory import RunDir
from ddpexp.run.repository import Snapshot
from ddpexp.system.files import first_free_name, sha256

_OF_THE_RUN = ("data", "config", "earlier", "starts")  # keys that are no start's


@dataclass(frozen=True)
class Start:
    """What one start is made of."""

    layout: Layout
    argv: Sequence[str]
    participants: Participants
    code: Snapshot
    inputs: Mapping[str, Any] | None = None  # the hashes of what it trains with
    changes: Sequence[str] = ()  # what its log says of differences from the one before


def describe(
    start: Start,
    data: Mapping[str, Any] | None,
    before: Mapping[str, Any] | None = None,
    diff: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Collect what manifest.json says of the newest start, and in `earlier` in what those before it were different.

    `before` is what it said until this start, of this version or an older one; `diff` is what it says of the code's
    patch.
    """
    restart = os.environ.get("SLURM_RESTART_COUNT")
    facts = {
        "started": datetime.now().astimezone().strftime("%Y-%m-%dT%H:%M:%S.%f%z"),
        "command": list(start.argv),
        "git": start.code.git,
        "code_diff": diff,
        "python": platform.python_version(),
        "packages": packages(sys.path),
        "hosts": list(dict.fromkeys(start.participants.hosts)),
        "owners": sorted(set(start.participants.owners)),
        "platform": platform.platform(),
        "world": asdict(start.layout),
        "inputs": dict(start.inputs or {}),
        "changes": list(start.changes),
        "restart": int(restart) if restart is not None and restart.isdecimal() else None,
    }
    return {**facts, "data": dict(data) if data else None, "earlier": _earlier(before, facts) if before else []}


def _earlier(before: Mapping[str, Any], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the starts until now, the oldest first: of each what was other than in the one after it."""
    last = {key: value for key, value in before.items() if key not in _OF_THE_RUN}
    older, whole = before.get("earlier"), before.get("starts")
    if isinstance(older, list):
        return [*older, _other(last, facts)]
    # An older version kept every start as a whole, the last one too.
    starts = [one for one in whole if isinstance(one, Mapping)][:-1] if isinstance(whole, list) else []
    return [_other(one, after) for one, after in itertools.pairwise([*starts, last, facts])]


def _other(one: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    keys = dict.fromkeys(("started", *one, *after))
    return {key: one.get(key) for key in keys if key == "started" or one.get(key) != after.get(key)}


def diff_of(run: RunDir, code: Snapshot, before: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, Path | None]:
    """Return what manifest.json says of the patch of a start's code, and where that is to be written.

    None where it is there.
    """
    if not code.diff:
        return None, None
    digest = hashlib.sha256(code.diff).hexdigest()
    known = before.get("code_diff") if before else None
    if isinstance(known, dict) and known.get("sha256") == digest:
        return known, None
    path = first_free_name(run.diff) if os.path.lexists(run.diff) else run.diff
    return {"file": path.name, "sha256": digest, "is_cut": code.is_cut}, path


def packages(path: Sequence[str]) -> dict[str, str]:
    """Return the version of every package that is installed along `path`, by its name as pip normalizes it.

    They are read from the names of their folders, for to open all of them takes longer than a run's first step.
    """
    found: dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or os.curdir)
        except OSError:
            continue
        for stem, _, kind in (name.rpartition(".") for name in names):
            if kind not in ("dist-info", "egg-info"):
                continue
            name, _, version = stem.partition("-")
            if not version:  # `pip install -e` of old left it without one
                version = str(metadata.Distribution.at(Path(folder, f"{stem}.{kind}")).version or "")
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version.partition("-py")[0])
    return dict(sorted(found.items()))


def accepted(text: str, replaced: str | None = None) -> dict[str, Any]:
    """Return what manifest.json says of the config.yaml that a start has accepted.

    To tell whether somebody edits it later.

    `replaced` is what the file held before: a start that is killed before it has replaced it leaves that, which is no
    edit.
    """
    texts = [text] if replaced is None else [text, replaced]
    return {"sha256": list(dict.fromkeys(map(sha256, texts))), "text": text}
