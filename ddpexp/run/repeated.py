"""What a run differs in from the one that it repeats (`ddpexp rerun`), before it starts and once it has ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from ddpexp.config.compare import rules_of
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.run.difference_texts import spans, texts, value_text
from ddpexp.run.differences import differing, over_steps
from ddpexp.run.directory import RunDir
from ddpexp.run.history import RunStart, periods_of, starts_of
from ddpexp.run.provenance import (
    GROUPS,
    Groups,
    differences,
    is_decisive,
    provenance,
    provenance_of,
)
from ddpexp.settings.key import Key
from ddpexp.system.files import sha256_of_file, shortest, typed
from ddpexp.system.text import first_few, metric_text

_SHOWN = 8  # differences of a group
_FROM_COMMAND = ("configuration", "code", "versions")  # groups that are known before the machines and the data are


class UnequalError(DdpexpError):
    """A run that was to repeat another one has ended with other numbers."""


def compared(origin: RunDir, new: Groups, is_exact: bool, tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Compare a run that is about to start with the one that it repeats.

    `new` has its groups, and `tree` is its configuration. Returns what its manifest records of the other run, and lines
    for the log.

    Raises:
        RefusedError: `is_exact`, and it differs in what can change numbers; or the other run cannot be read.
    """
    manifest = origin.read_if_present(origin.manifest)
    result = origin.read_if_present(origin.result) or {}
    found = _differences(provenance_of(origin, manifest), new)
    rules = rules_of(tree)
    decisive = _decisive(found, rules)
    if is_exact:
        check_exact(origin, new, rules, found)
    record = {
        "run": str(origin.path),
        "manifest_sha256": sha256_of_file(origin.manifest) if manifest is not None else None,
        "step": result.get("step"),
        "metrics": result.get("metrics"),
        "weights_sha256": result.get("weights_sha256") if result.get("status") == "done" else None,
        "differs": bool(decisive) or manifest is None or bool(_changed(origin, manifest, rules)),
    }
    return record, [*_lines(origin, manifest, result, found), *_over_steps(origin, manifest, new)]


def check_exact(
    origin: RunDir, new: Groups, rules: Mapping[str, Key], found: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Check that a run can be repeated exactly, and that `new`, as far as its groups are known, repeats it.

    Raises:
        RefusedError: it is not finished, its own starts differ, or `new` differs in what can change numbers.
    """
    manifest = origin.read_if_present(origin.manifest)
    result = origin.read_if_present(origin.result) or {}
    name = f"rerun {typed(origin.path)} --exact"
    if manifest is None or result.get("status") != "done" or not isinstance(result.get("weights_sha256"), str):
        raise RefusedError(
            "compares the weights at the end, and this run is not finished",
            suggestion=f"Finish it with python -m ddpexp resume {typed(origin.path)}, or leave --exact out.",
            place=name,
        )
    if changed := _changed(origin, manifest, rules):
        raise RefusedError(
            f"repeats a run of one configuration, code and machine, and over its steps this one had {changed[0]}",
            suggestion="Leave --exact out.",
            place=name,
        )
    if found is None:
        found = _differences(provenance_of(origin, manifest), new)
    decisive = _decisive(found, rules)
    if decisive:
        found_texts = [f"{group}: {first_few(texts(group, keys), _SHOWN)}" for group, keys in decisive.items()]
        advice = [text for group, keys in decisive.items() if (text := _advice(group, keys, origin, manifest))]
        raise RefusedError(
            f"refuses what can change the numbers, and this differs from the run in {'; '.join(found_texts)}",
            suggestion=" ".join([*advice, "Or leave --exact out."]),
            place=name,
        )


def known_to_command(groups: Groups) -> dict[str, Mapping[str, Any]]:
    """Return the groups that a command knows before it has machines and data."""
    return {group: groups[group] for group in _FROM_COMMAND}


def verdict(run: RunDir, is_exact: bool) -> str | None:
    """Return a sentence on whether a finished run has ended as the one that it repeats.

    None if it repeats none, or was started with something else that can change numbers.

    Raises:
        UnequalError: it `is_exact`, and has ended with other weights or metrics.
    """
    record, result = _mapping(run.read(run.manifest).get("rerun_of")), run.read(run.result)
    before, now = record.get("weights_sha256"), result.get("weights_sha256")
    if record.get("differs") or not isinstance(before, str) or not isinstance(now, str):
        return None
    metrics = [name for name, _ in _other_metrics(record.get("metrics"), result.get("metrics"))]
    if before == now and not metrics:
        return f"the weights and the metrics are those of {record.get('run')}, to the bit (sha256 {now[:12]})"
    if before == now:
        text = f"the weights are those of {record.get('run')}, to the bit, but not the metrics {first_few(metrics)}"
    else:
        steps = "" if record.get("step") == result.get("step") else (
            f", which ended at step {record.get('step')} and not {result.get('step')}"
        )  # fmt: skip
        text = f"the weights are not those of {record.get('run')}{steps}: sha256 {now[:12]} instead of {before[:12]}"
    if is_exact:
        both = shlex.join([str(record.get("run")), shortest(run.path)])
        raise UnequalError(
            text,
            suggestion=f"To compare both: python -m ddpexp diff {both}. On GPUs the same bits need "
            "trainer.deterministic=true.",
        )
    return text


def _other_metrics(before: Any, now: Any) -> Iterator[tuple[str, Any]]:
    old = before if isinstance(before, Mapping) else {}
    yield from differing([old, now if isinstance(now, Mapping) else {}]).items()


def _differences(old: Groups, new: Groups) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return what differs in the groups that both know; of data, what the new run knows before its workers start."""
    known = [group for group in GROUPS if old[group] and new.get(group)]
    before = {
        group: {key: old[group][key] for key in old[group] if group != "data" or key in new[group]} for group in known
    }
    return differences([before, {group: new[group] for group in known}])


def _decisive(
    found: Mapping[str, Mapping[str, tuple[Any, ...]]], rules: Mapping[str, Key]
) -> dict[str, dict[str, tuple[Any, ...]]]:
    chosen = {
        group: {key: values for key, values in keys.items() if is_decisive(group, key, values[0], rules)}
        for group, keys in found.items()
    }
    return {group: keys for group, keys in chosen.items() if keys}


def _changed(origin: RunDir, manifest: Mapping[str, Any], rules: Mapping[str, Key]) -> list[str]:
    """Return what has changed over the steps of a run, and can have changed its numbers."""
    keys = over_steps(periods_of(origin, manifest))
    changed = [
        f"{key} {spans(values)}" for key, values in keys.items() if is_decisive("configuration", key, None, rules)
    ]
    starts = [start for start in starts_of(origin, manifest) if start.after is not None]
    for before, after in pairwise(starts):
        for group, differing_keys in _decisive(differences([_own(before), _own(after)]), rules).items():
            changed += [f"{text} after step {after.after}" for text in texts(group, differing_keys)]
    return changed


def _own(start: RunStart) -> dict[str, Mapping[str, Any]]:
    groups = provenance({}, start.facts)
    return {group: groups[group] for group in ("code", "versions", "machine")}


def _over_steps(origin: RunDir, manifest: Mapping[str, Any] | None, new: Groups) -> list[str]:
    keys = over_steps(periods_of(origin, manifest))
    changed = [f"{key} {spans(values)}" for key, values in keys.items() if key in new["configuration"]]
    if not changed:
        return []
    return [f"over its steps it had {'; '.join(changed)}: this run has its own values from the beginning"]


def _lines(
    origin: RunDir,
    manifest: Mapping[str, Any] | None,
    result: Mapping[str, Any],
    found: Mapping[str, Mapping[str, tuple[Any, ...]]],
) -> list[str]:
    """Return the lines on what differs from the run that is repeated."""
    if not origin.config.exists():
        return [f"rerun of {origin.path}: that folder is gone, and nothing is compared"]
    status, recorded = result.get("status"), _mapping(result.get("metrics"))
    numbers = [f"{name} {metric_text(name, value)}" for name, value in recorded.items() if isinstance(value, float)]
    ended = f", {status} at step {result.get('step')}" if isinstance(status, str) else ", which has not ended"
    shown_metrics = f" ({', '.join(numbers)})" if numbers else ""
    title = f"rerun of {typed(origin.path)}{ended}{shown_metrics}"
    unknown = "" if manifest is not None else "; it has no manifest.json, so of it only the configuration is known"
    if not found:
        return [f"{title}: nothing differs in configuration, code, versions, data and machine{unknown}"]
    return [
        f"{title}{unknown}",
        *(f"{group}: {first_few(texts(group, keys), _SHOWN)}" for group, keys in found.items()),
    ]


def _advice(group: str, keys: Mapping[str, tuple[Any, ...]], origin: RunDir, manifest: Mapping[str, Any]) -> str:
    """Return what to do about the differences of a group."""
    if group == "configuration":
        return f"Leave out what sets {first_few(list(keys))}."
    if group == "code":
        git, patch = _mapping(manifest.get("git")), manifest.get("code_diff")
        commit = f"commit {git['commit']}" if git.get("commit") else "the code of then"
        file = patch.get("file") if isinstance(patch, Mapping) else None
        changes = f" with the changes in {typed(origin.path / file)}" if isinstance(file, str) else ""
        return f"Put back {commit}{changes}."
    if group == "versions":
        packages = [f"{name}=={old}" for name, (old, _) in keys.items() if name != "python"]
        python = [f"Use Python {keys['python'][0]}."] if "python" in keys else []
        return " ".join([*python, *([f"Install {' '.join(packages)}."] if packages else [])])
    if group == "data":
        return "Make the same data available."
    world = {key: old for key, (old, _) in keys.items()}
    if isinstance(size := world.pop("world_size", None), int):
        nodes = _mapping(manifest.get("world")).get("nodes")
        world["gpus"] = size // nodes if isinstance(nodes, int) and nodes > 0 else size
    return f"Type {' '.join(f'trainer.{key}={value_text(old)}' for key, old in world.items())}."


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
