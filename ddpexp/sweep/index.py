"""The records of the runs below a folder, kept in the user's cache, so that a later command need not read them again.

The run directories alone count: an entry is used while the stamps of the files that it was read from are the same. An
index that is damaged, of another version or gone is made again, and where none can be written each command reads all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpexp import __version__
from ddpexp.checkpoint.weights import Best
from ddpexp.config.keys import MISSING
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.run.differences import Value
from ddpexp.sweep.files import RunFiles, WatchedRun
from ddpexp.sweep.rows import Row
from ddpexp.system import files
from ddpexp.system.secrets import masked

_FORMAT = [1, __version__, [field.name for field in dataclasses.fields(RunFiles)]]


class RunIndex:
    """The index of a folder: `watch` for each run, then `save`."""

    def __init__(self, folder: Path) -> None:
        """Read it, or begin an empty one."""
        self._folder = folder
        self._file = _file_of(folder)
        content = _read(self._file) if self._file is not None else None
        self._known: Mapping[str, Any] = content["runs"] if content is not None else {}
        self._bases: list[dict[str, Any]] = content["bases"] if content is not None else []
        self._watched: dict[str, WatchedRun] = {}
        self._sweeps = {os.path.dirname(name) for name in self._known}

    def __contains__(self, path: Path) -> bool:
        """Return whether the run, or a job of the sweep, has been listed before."""
        name = self._name(path)
        return name in self._known or name in self._sweeps

    def watch(self, path: Path) -> WatchedRun:
        """Return the files of a run, as the index has them if it does."""
        name = self._name(path)
        entry = self._known.get(name)
        run = WatchedRun(path) if entry is None else WatchedRun(path, entry["version"], self._decoded(entry))
        self._watched[name] = run
        return run

    def save(self, rows: Sequence[Row]) -> None:
        """Write the index if there is anything new in these rows; the files of a running run change again anyway."""
        entries, is_new = {}, False
        for row in rows:
            name = self._name(row.path)
            run = self._watched.get(name)
            if run is None or not run.version or row.status in ("running", "broken"):
                continue
            entry = self._known.get(name)
            if entry is None or tuple(entry["version"]) != tuple(run.version):
                entry, is_new = self._encoded(run), True
            entries[name] = entry
        if is_new and self._file is not None:
            with suppress(OSError, TypeError, ValueError):  # it cannot be written, or a value is none of JSON's
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(self._file, {"bases": self._bases, "runs": entries})

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._folder))

    def _encoded(self, run: WatchedRun) -> dict[str, Any]:
        """Return an entry: of the configuration only what differs from another one with the same keys."""
        found = run.newest
        number = next((i for i, base in enumerate(self._bases) if base.keys() == found.values.keys()), None)
        if number is None:
            number = len(self._bases)
            self._bases.append(dict(found.values))
        base = self._bases[number]
        changed = {
            key: [[value.after, value.is_exact, *([] if value.value is MISSING else [value.value])] for value in values]
            for key, values in found.changed.items()
        }
        return {
            "version": list(run.version),
            "base": number,
            "values": {key: value for key, value in found.values.items() if not _is_identical(value, base[key])},
            "changed": changed,
            "best": None if found.best is None else dataclasses.asdict(found.best),
            "files": {
                field.name: getattr(found, field.name)
                for field in dataclasses.fields(found)
                if field.name not in ("values", "changed", "best")
            },
        }

    def _decoded(self, entry: Mapping[str, Any]) -> RunFiles:
        changed = {
            key: [Value(after, rest[0] if rest else MISSING, is_exact) for after, is_exact, *rest in values]
            for key, values in entry["changed"].items()
        }
        best = None if entry["best"] is None else Best(**entry["best"])
        values = ChainMap(entry["values"], self._bases[entry["base"]])
        return RunFiles(**entry["files"], values=values, changed=changed, best=best)


def _is_identical(one: Any, other: Any) -> bool:
    """Return whether two values are written in the same way: 1 and 1.0 are not."""
    return type(one) is type(other) and repr(one) == repr(other)


def _file_of(folder: Path) -> Path | None:
    """Return the file of the index of a folder; None if the user has no cache."""
    try:
        return user_cache() / "runs" / f"{files.sha256(os.path.realpath(folder))[:32]}.json"
    except RefusedError:
        return None


def _read(path: Path) -> dict[str, Any] | None:
    """Return the contents of an index; None if it is not what was written, or holds what is a secret now."""
    try:
        with files.open_regular(path) as file:
            header, _, body = file.read().partition(b"\n")
        if json.loads(header) != [*_FORMAT, hashlib.sha256(body).hexdigest()]:
            return None
        text = body.decode()
        if masked(text) != text:
            return None
        content: dict[str, Any] = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write an index, whose first line has the hash of the rest. Raises: OSError, TypeError, ValueError."""
    body = masked(json.dumps(content))
    header = json.dumps([*_FORMAT, files.sha256(body)])
    files.write(path, f"{header}\n{body}")
