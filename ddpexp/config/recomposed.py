"""Compose the experiment of a run again, with changes, and with the values of the run where nothing changes them.

Hydra composes the overrides of the run twice, without and with those of the command. What the two differ in is what the
command changes, also through references between keys; everything else is as in the run, whatever the files of options
say by now. The overrides of a run directory may be anybody's, and only decide what they have decided before: its stored
values count, and are checked as those of a run that is resumed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpexp.config import facts
from ddpexp.config.arguments import Arguments
from ddpexp.config.compare import UNSET, Change, compare
from ddpexp.config.compose import compose_run
from ddpexp.config.folders import LISTED, config_dir_of
from ddpexp.config.keys import MISSING, override_key, value_at
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.restated import Grants
from ddpexp.config.stored import override_tree, restated
from ddpexp.errors import RefusedError, shown
from ddpexp.system.text import first_few
from ddpexp.system.yaml_text import load_yaml

_PLAIN = re.compile(r"[+~]{0,2}[A-Za-z_][\w.-]*(=(?!.*\$\{).*)?", re.DOTALL)  # without references
_OPTION = re.compile(r"[\w.,\[\] -]*")  # names of options, in the folders of their groups
_OF_ONE_RUN = ("run.", "hydra", "sweep.")
_OF_A_START = ("dir", "resume", "allow_changes", "trust", "code", "tags")  # keys of `run`


@dataclass(frozen=True)
class Recomposed:
    """An experiment of a run with changes."""

    values: Mapping[str, Any]  # resolved
    text: str  # as of `ResolvedConfig`
    overrides: Sequence[str]  # of the run, as far as they hold, and of the command
    notes: Sequence[str]  # for the user
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class StoredExperiment:
    """The experiment of a run directory, as its newest start accepted it."""

    path: Path  # config.yaml
    tree: Mapping[str, Any]  # with references to the environment
    overrides: Sequence[str]
    facts: Mapping[str, Any]  # of its data
    is_exact: bool = False  # the run that repeats it is to be equal

    @property
    def origin(self) -> dict[str, Any]:
        """The keys of `run` that name the run that is repeated."""
        return {"rerun_of": str(self.path.parent.absolute()), "rerun_exact": self.is_exact}


def recompose(stored: StoredExperiment, argv: Sequence[str]) -> Recomposed:
    """Compose the experiment of a run with the overrides and the --config-dir in `argv`.

    Raises:
        UnrestatedError: the run has settings that count only when `argv` restates them.
        RefusedError: an override does not fit, or what Hydra refuses.
    """
    arguments = Arguments.of(argv)
    typed = arguments.overrides
    kept = [override for override in stored.overrides if _is_kept(override)]
    remaining = _remaining(kept, typed)
    recorded = [override for override in stored.overrides if not override_key(override).startswith(_OF_ONE_RUN)]
    merged = [*_remaining(recorded, typed), *typed]
    try:
        base = compose_run(_with(arguments, kept))
    except RefusedError as error:
        why = str(RefusedError(error.reason, key=error.key, value=error.value, place=error.place)).rstrip(".")
        return _overridden(stored, argv, merged, f"its options cannot be composed any more ({why})")
    new = compose_run(_with(arguments, [*remaining, *typed]))
    chosen = {override_key(override) for override in typed if "." not in override_key(override)}
    before, after = load_yaml(base.text), load_yaml(new.text)
    tree = _merged(dict(stored.tree), before, after, stored.facts, {*chosen} - {*LISTED})
    tree["run"] |= {name: after["run"][name] for name in _OF_A_START} | stored.origin
    config_dir = config_dir_of(arguments.config_dir)
    grants = Grants.of(typed, tree, config_dir, without=chosen).also([(group,) for group in chosen - {*LISTED}])
    grants = grants.also([(group, name) for group in LISTED for name in after[group] if name not in before[group]])
    values, text = restated(tree, grants, stored.path)
    return Recomposed(values, text, merged, _drift(stored, base, tree), new.warnings)


def _with(arguments: Arguments, overrides: Sequence[str]) -> Arguments:
    return Arguments(overrides=tuple(overrides), config_dir=arguments.config_dir)


def _is_kept(override: str) -> bool:
    """Return whether an override of a run is composed again: it only chooses options and sets values.

    The values of others are taken from the stored configuration.
    """
    key, _, value = override.partition("=")
    name = override_key(override)
    if not _PLAIN.fullmatch(override) or name.startswith(_OF_ONE_RUN):
        return False
    return "." in name or key.startswith("~") or _OPTION.fullmatch(value) is not None


def _remaining(overrides: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the overrides of a run that those of the command do not replace.

    Another option of a group replaces the keys of the former one.
    """
    values = {override_key(override): override.partition("=")[2] for override in typed}

    def is_replaced(key: str) -> bool:
        group, _, rest = key.partition(".")
        if key in values:
            return True
        if group not in values:
            return False
        return group not in LISTED or rest.partition(".")[0] not in re.split(r"[\[\],\s]+", values[group])

    return [override for override in overrides if not is_replaced(override_key(override))]


def _merged(stored: Any, before: Any, after: Any, known: Mapping[str, Any], replaced: set[str], key: str = "") -> Any:
    """Return the stored tree with what has changed from `before` to `after`."""
    if key in replaced:
        return after
    if isinstance(stored, Mapping) and isinstance(before, Mapping) and isinstance(after, Mapping):
        if before.get("_target_") != after.get("_target_"):
            return after
        names = [*stored, *(name for name in after if name not in stored)]
        merged = {
            name: _merged(
                stored.get(name, MISSING),
                before.get(name, MISSING),
                after.get(name, MISSING),
                known,
                replaced,
                f"{key}.{name}" if key else str(name),
            )
            for name in names
        }
        return {name: value for name, value in merged.items() if value is not MISSING}
    if before != after:
        return after
    if facts.refers(after) and facts.resolve(after, known) == stored:
        return after  # other data may have another one
    return stored


def _drift(stored: StoredExperiment, base: ResolvedConfig, tree: Mapping[str, Any]) -> list[str]:
    """Return a note on what the files of options say by now, where the value of the run stays."""
    composed, now = facts.resolve(load_yaml(base.text), stored.facts), facts.resolve(tree, stored.facts)
    untold = [override_key(override) for override in stored.overrides if not _is_kept(override)]
    changes = [
        change
        for change in compare(stored.tree, composed, ())
        if not change.key.startswith("run.")
        and not any(change.key == key or change.key.startswith(f"{key}.") for key in untold)
        and value_at(now, change.key, MISSING) == value_at(stored.tree, change.key, MISSING)
    ]
    if not changes:
        return []
    return [
        f"files of options have changed since the run, whose values count: {first_few(list(map(_kept, changes)))}. "
        "What is typed has the new value."
    ]


def _kept(change: Change) -> str:
    old, new = ("not set" if value is UNSET else shown(value) for value in (change.old, change.new))
    return f"{change.key} is {old}, and {new} in the files"


def _overridden(stored: StoredExperiment, argv: Sequence[str], overrides: Sequence[str], why: str) -> Recomposed:
    """Return the stored configuration with overrides of single keys, and of options in one file."""
    tree: dict[str, Any] = copy.deepcopy(dict(stored.tree))
    tree["run"] |= {"dir": None, "resume": "auto"} | stored.origin
    values, text = override_tree(tree, stored.path, list(argv), keeps=("launcher", "logger"))
    return Recomposed(values, text, overrides, [f"{why}, so overrides apply to its config.yaml"])
