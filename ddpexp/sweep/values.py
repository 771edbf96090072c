"""The values in which the runs of a table differ, as texts: resolved ones, whatever was typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpexp.errors import shown
from ddpexp.run.difference_texts import spans
from ddpexp.run.differences import Value, differing
from ddpexp.sweep.files import HOW_IT_RUNS

_NAMES = ("_target_", "kind", "name")  # keys of a section that tell which option of its group was chosen


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    overrides: Mapping[str, str]  # as they were typed, by key
    resolved: Mapping[str, Any]  # by key; empty until the run has begun
    changed: Mapping[str, Sequence[Value]]  # of the keys that have changed on a resume, the values in their order

    def text(self, key: str) -> str:
        """Return the value of a key as text; of a section which option was chosen. Empty: there is none."""
        if key in self.changed:
            return spans(self.changed[key])
        if key in self.resolved:
            return shown(self.resolved[key])
        if key in self.overrides:
            return self.overrides[key]
        chosen = next((self.resolved[path] for name in _NAMES if (path := f"{key}.{name}") in self.resolved), "")
        return str(chosen).rpartition(".")[2]


def texts(runs: Sequence[Settings], named: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return for each run the values of the keys that any of them overrides, that differ, and that are `named`.

    Of a run that has not begun only its own overrides are known.
    """
    typed = dict.fromkeys(key for run in runs for key in run.overrides)
    begun = [run for run in runs if run.resolved]
    different = [key for key in differing([run.resolved for run in begun]) if not key.startswith(HOW_IT_RUNS)]
    changed = dict.fromkeys(key for run in runs for key in run.changed)
    keys = dict.fromkeys([*typed, *different, *changed, *named])
    apart = {*different, *changed}
    same: dict[str, str] = {}  # what is equal although it may have been typed in another way, or not at all
    for key in keys:
        inside = [other for other in apart if other.startswith(f"{key}.") and other not in typed]
        if key not in apart and not inside:
            of_typing = (run for run in begun if key in run.overrides)
            first = next(of_typing, begun[0] if begun else None)
            same |= {key: first.text(key)} if first is not None else {}
    return [
        {key: same.get(key, run.text(key)) for key in keys} if run.resolved else dict(run.overrides) for run in runs
    ]
