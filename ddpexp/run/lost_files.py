"""Which files of a run directory were lost since the run wrote them: emptied, cut off or removed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ddpexp.checkpoint.format import newest
from ddpexp.errors import RefusedError
from ddpexp.run.directory import RunDir


def check_nothing_lost(run: RunDir, result: Mapping[str, Any], state: str) -> str:
    """Check that a finished run still has its files; return a sentence on those that were removed from it, or "".

    A file of a logger beside metrics.jsonl may be removed. `state` begins the sentence on lost ones.

    Raises:
        RefusedError: others are gone, or shorter than when the run ended.
    """
    checkpoint = newest(run.checkpoints)
    records = checkpoint.manifest.get("records", {}) if checkpoint is not None else {}
    lost = [*lost_facts(run), *_cut_records(run, records, result)]
    if lost:
        left = [] if checkpoint is None else [f"the checkpoint of step {checkpoint.step}"]
        left += [f"the metrics of the last evaluation in {run.result.name}"] if result.get("metrics") else []
        rest = f" What is left: {' and '.join(left)}." if left else ""
        raise RefusedError(
            f"{state}, and has lost files since: {'; '.join(lost)}.{rest}".removesuffix("."),
            suggestion="Restore copies of them, or train again with another run.dir: ddpexp cannot write them again.",
        )
    removed = removed_records(run, records)
    if not removed:
        return ""
    return f" Since then {', '.join(removed)} {'was' if len(removed) == 1 else 'were'} removed."


def lost_facts(run: RunDir) -> list[str]:
    """Return which of the files that say how a run was started are gone or emptied."""
    lost = [f"{run.manifest.name} is missing"] if not os.path.lexists(run.manifest) else []
    if not os.path.lexists(run.overrides):
        return [*lost, f"{run.overrides.name} is missing"]
    if run.overrides_if_intact() is None:
        return [*lost, f"{run.overrides.name} is damaged"]
    return [*lost, *([f"{run.overrides.name} is cut off"] if not run.overrides.read_bytes().endswith(b"\n") else [])]


def removed_records(run: RunDir, records: Mapping[str, Any]) -> list[str]:
    """Return the files of loggers that are gone, of those whose lengths a checkpoint has recorded."""
    return [name for name in sorted(_recorded_files(records)) if not os.path.lexists(run.path / name)]


def _cut_records(run: RunDir, records: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return what is shorter than recorded; metrics.jsonl always has a line for the last step."""
    has_steps = bool(result.get("step")) or bool(result.get("metrics"))
    lengths = {**({run.metrics.name: 1} if has_steps else {}), **_recorded_files(records)}
    lost = []
    for name, length in lengths.items():
        try:
            size = (run.path / name).stat().st_size
        except OSError:
            lost += [f"{name} is missing"] if name == run.metrics.name else []
            continue
        if size < length:
            lost.append(f"{name} has {size:,} of its {length:,} bytes" if size else f"{name} is empty")
    return lost


def _recorded_files(records: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths of files in the run directory; a checkpoint, which anybody may have made, may name others."""
    return {
        name: length
        for name, length in records.items()
        if isinstance(length, int) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts
    }


def notes_on_lost(run: RunDir) -> Sequence[str]:
    """Return log lines for an unfinished run that has trained and lost a file that says how it was started."""
    return [f"{fact}: what it recorded of the earlier starts is lost" for fact in lost_facts(run)]
