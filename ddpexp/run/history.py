"""The starts of a run, and which configuration computed which of its steps, from the files of its directory.

A checkpoint names the starts that led to it: a start whose steps were lost has computed none of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import yaml

from ddpexp.checkpoint.format import Checkpoint, newest
from ddpexp.config import fitted
from ddpexp.config.facts import resolve
from ddpexp.run.differences import Period, flat
from ddpexp.run.directory import RunDir
from ddpexp.run.manifest import moment_of
from ddpexp.run.stored_config import parse_config, read_stored, recorded_facts
from ddpexp.system.files import check_yaml, check_yaml_text, sha256
from ddpexp.system.json_lines import json_lines

_COPY = re.compile(r"config(-\d+)?\.yaml")


@dataclass(frozen=True)
class RunStart:
    """A start of a run."""

    facts: Mapping[str, Any]  # as manifest.json has them of the newest start
    after: int | None  # the step that its own steps follow; None: the run has none of its steps
    is_exact: bool = True  # as of `Period`

    @property
    def config_sha256(self) -> str | None:
        """The hash of the config.yaml that it trained with."""
        inputs = self.facts.get("inputs")
        digest = inputs.get("config_sha256") if isinstance(inputs, Mapping) else None
        return digest if isinstance(digest, str) else None


def starts_of(run: RunDir, manifest: Mapping[str, Any] | None) -> list[RunStart]:
    """Return the starts of a run, the oldest first.

    Raises:
        RefusedError: another version of ddpexp has written its checkpoints.
    """
    facts = _facts_of_starts(manifest)
    if not facts:
        return []
    checkpoint = newest(run.checkpoints)
    inputs = checkpoint.manifest.get("inputs") if checkpoint is not None else None
    recorded = inputs.get("starts") if isinstance(inputs, Mapping) else None
    if checkpoint is not None and not isinstance(recorded, list):
        return list(_by_records(run, facts))
    steps = {
        start["started"]: start["after"]
        for start in recorded or ()
        if isinstance(start, Mapping) and isinstance(start.get("started"), str) and isinstance(start.get("after"), int)
    }
    steps.setdefault(facts[-1].get("started"), checkpoint.step if checkpoint is not None else 0)
    return [RunStart(start, steps.get(start.get("started"))) for start in facts]


def record_start(manifest: Mapping[str, Any], newest: Checkpoint | None) -> list[dict[str, Any]]:
    """Return what the checkpoints of a start record of the starts that led to them, the start itself last.

    `newest` is the checkpoint that it resumes from.
    """
    before: Any = None
    if newest is not None:
        inputs = newest.manifest.get("inputs")
        before = inputs.get("starts") if isinstance(inputs, Mapping) else None
    return [
        *(before if isinstance(before, list) else ()),
        {"started": manifest.get("started"), "after": newest.step if newest is not None else 0},
    ]


def resolved_values(run: RunDir, manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of a run by key, as its newest start has them; empty if it was stopped before it had any.

    What was `auto` has the value that the first start chose.

    Raises:
        RefusedError: config.yaml, or manifest.json, cannot be read.
    """
    stored = read_stored(run, manifest)
    return {} if stored is None else values_of(stored.tree, manifest)


def periods_of(run: RunDir, manifest: Mapping[str, Any] | None) -> list[Period]:
    """Return which configuration computed which steps, the first ones first; the last is that of the newest start.

    A configuration of which no copy is left is left out.

    Raises:
        RefusedError: as `resolved_values` and `starts_of`.
    """
    now = resolved_values(run, manifest)
    starts = [start for start in starts_of(run, manifest) if start.after is not None]
    if len({start.config_sha256 for start in starts}) < 2:
        return [Period(0, now)] if now else []
    trees = dict(_copies(run, manifest))
    periods = []
    for start in starts:
        tree = trees.get(start.config_sha256)
        if tree is not None or (start is starts[-1] and now):
            values = now if tree is None else values_of(tree, manifest)
            periods.append(Period(start.after or 0, values, start.is_exact))
    return [one for one, following in pairwise(periods) if one.after < following.after] + periods[-1:]


def values_of(tree: Any, manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of a configuration by key; the manifest has facts of the data, and what was chosen for auto."""
    values = flat(resolve(tree, recorded_facts(manifest)))
    chosen = manifest.get("resolved") if manifest else None
    return {
        key: chosen[key] if value in ("auto", fitted.FIT) and isinstance(chosen, Mapping) and key in chosen else value
        for key, value in values.items()
    }


def _facts_of_starts(manifest: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return what the manifest records of each start, the oldest first: `earlier` has what differs from the next."""
    if manifest is None or not isinstance(manifest.get("started"), str):
        return []
    earlier = manifest.get("earlier")
    facts = [{key: value for key, value in manifest.items() if key != "earlier"}]
    for start in reversed(earlier if isinstance(earlier, list) else []):
        if isinstance(start, Mapping) and isinstance(start.get("started"), str):
            facts.insert(0, {**facts[0], **start})
    return facts


def _by_records(run: RunDir, facts: Sequence[Mapping[str, Any]]) -> Iterator[RunStart]:
    """Yield the starts of a run whose checkpoints do not record them: each follows what was recorded before it."""
    records = [
        (step, moment)
        for record in json_lines(run.metrics)
        if isinstance(step := record.get("step"), int) and isinstance(moment := record.get("time"), int | float)
    ]
    for number, start in enumerate(facts):
        began = moment_of(start.get("started"))
        before = [step for step, moment in records if began is not None and moment < began]
        yield RunStart(start, max(before, default=0), is_exact=number == 0 or not before)


def _copies(run: RunDir, manifest: Mapping[str, Any] | None) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yield the configurations that a run directory has copies of, by their hashes."""
    record = manifest.get("config") if manifest else None
    texts = [text] if isinstance(record, Mapping) and isinstance(text := record.get("text"), str) else []
    with suppress(OSError):
        for name in sorted(os.listdir(run.path)):
            if _COPY.fullmatch(name):
                with suppress(OSError, ValueError, yaml.YAMLError):
                    check_yaml(run.path / name)
                    texts.append((run.path / name).read_text())
    for text in texts:
        with suppress(ValueError, RecursionError, yaml.YAMLError):
            check_yaml_text(text)
            if isinstance(tree := parse_config(text), Mapping):
                yield sha256(text), tree
