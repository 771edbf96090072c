"""What a run was trained with, in groups of plain values, and what runs differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpexp.checkpoint.format import newest
from ddpexp.config.compare import resume_rule
from ddpexp.config.keys import MISSING
from ddpexp.run.differences import differing, flat
from ddpexp.run.directory import RunDir
from ddpexp.run.history import resolved_values
from ddpexp.settings.key import Key

GROUPS = ("configuration", "code", "versions", "data", "machine")
Groups = Mapping[str, Mapping[str, Any]]
"""The values of a run by key, in each of the groups."""

_OF_A_START = ("dir", "resume", "allow_changes", "trust", "code", "rerun_of", "rerun_exact", "tags")  # keys of `run`
SAMPLES = " samples"
"""How the keys end that have the size of a set of the data."""
GPUS = "GPUs"
COMMIT, PATCH = "commit", "uncommitted changes"
_PLACES = ("folder", "note", "source")  # keys of a description of data that do not say what the data is
_HASH = 12  # characters of a hash that are shown
_WORLD = ("world_size", "nodes", "device", "backend", "threads")


@dataclass(frozen=True)
class Source:
    """A file of code; comments and docstrings do not count where the same Python has parsed it."""

    sha256: str
    syntax: Any = None
    python: Any = None

    def __eq__(self, other: object) -> bool:
        """Return whether both files mean the same."""
        if not isinstance(other, Source):
            return False
        parsed = self.syntax is not None and (self.syntax, self.python) == (other.syntax, other.python)
        return parsed or self.sha256 == other.sha256

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """Return the beginning of the hash."""
        return self.sha256[:_HASH]


def provenance_of(run: RunDir, manifest: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return what a run was trained with, as its newest start has recorded it.

    Raises:
        RefusedError: config.yaml, manifest.json or a checkpoint cannot be read.
    """
    checkpoint = newest(run.checkpoints)
    inputs = _mapping(checkpoint.manifest.get("inputs")) if checkpoint is not None else {}
    sets = {f"{name}{SAMPLES}": _mapping(facts).get("samples") for name, facts in _mapping(inputs.get("data")).items()}
    groups = provenance(resolved_values(run, manifest), manifest or {})
    groups["data"] |= {name: samples for name, samples in sets.items() if samples is not None}
    return groups


def provenance(values: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the groups of a start: its resolved values by key, and the untrusted records of its manifest."""
    own = {f"run.{name}" for name in _OF_A_START}
    return {
        "configuration": {key: value for key, value in values.items() if key not in own},
        "code": _code(start),
        "versions": {"python": start.get("python"), **_mapping(start.get("packages"))} if "python" in start else {},
        "data": _data(start),
        "machine": _machine(start),
    }


def differences(runs: Sequence[Groups]) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return the groups in which runs differ, each with the keys that do and a value of each run."""
    found = {group: differing([run.get(group, {}) for run in runs]) for group in GROUPS}
    return {group: keys for group, keys in found.items() if keys}


def without_inner(keys: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Return the keys that differ, without those that follow from another option of their section."""
    others = {key.rpartition(".")[0] for key in keys if key.rpartition(".")[2] in ("_target_", "kind")}
    return {
        key: values
        for key, values in keys.items()
        if not (MISSING in values and any(key.startswith(f"{section}.") for section in others))
        or key.rpartition(".")[2] in ("_target_", "kind")
    }


def is_decisive(group: str, key: str, old: Any, rules: Mapping[str, Key]) -> bool:
    """Return whether a key that differs can change the numbers of a run.

    `old` is its value in the run that is repeated, and `rules` are those of `ddpexp.config.compare.rules_of`.

    A commit cannot: the files of the recipe are compared by their content. Nor can a package that was not there.
    """
    if group == "configuration":
        return key.startswith("run.init_") or resume_rule(key, rules).on_resume != "free"
    if group == "code":
        return key not in (COMMIT, PATCH)
    if group == "versions" or key == GPUS:
        return old is not MISSING
    return group == "data" or key in _WORLD


def _code(start: Mapping[str, Any]) -> dict[str, Any]:
    git, patch = _mapping(start.get("git")), _mapping(start.get("code_diff"))
    fingerprint = _mapping(_mapping(start.get("inputs")).get("code"))
    code: dict[str, Any] = {}
    if isinstance(commit := git.get("commit"), str):
        code[COMMIT] = commit[:_HASH]
    if isinstance(digest := patch.get("sha256"), str):
        code[PATCH] = digest[:_HASH]
    for name, module in _mapping(fingerprint.get("modules")).items():
        facts = _mapping(module)
        if isinstance(digest := facts.get("sha256"), str):
            source = Source(digest, facts.get("syntax"), fingerprint.get("python"))
            code[str(facts.get("file", name))] = source
        else:
            code[name] = facts.get("version")
    return code


def _data(start: Mapping[str, Any]) -> dict[str, Any]:
    described = {key: value for key, value in _mapping(start.get("data")).items() if key not in _PLACES}
    data = {key: _short(value) for key, value in flat(described).items() if not key.startswith("facts.")}
    facts = flat(_mapping(described.get("facts")))
    weights = _mapping(start.get("init_from"))
    return {**data, **facts, **({"initial weights": weights.get("weights")} if weights else {})}


def _machine(start: Mapping[str, Any]) -> dict[str, Any]:
    world = _mapping(start.get("world"))
    machine = {key: world[key] for key in _WORLD if key in world}
    gpus = _mapping(start.get("gpus"))
    machine |= {key: gpus[name] for key, name in ((GPUS, "models"), ("driver", "driver")) if name in gpus}
    hosts = start.get("hosts")
    if isinstance(hosts, list):
        machine["hosts"] = hosts
    return {**machine, **({"platform": start["platform"]} if "platform" in start else {})}


def _short(value: Any) -> Any:
    is_hash = isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
    return value[:_HASH] if is_hash else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
