"""Refuse the overrides that Hydra would misread or ignore."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import get_args

from ddpexp.config.arguments import ONE_RUN
from ddpexp.config.declared import declared, takes_number
from ddpexp.config.folders import LISTED, our_options
from ddpexp.config.hydra_section import check_has_effect
from ddpexp.config.override_syntax import check_syntax, several
from ddpexp.errors import RefusedError

_NO_NAME = re.compile(
    r"[+-]?\d[\d_]*\.?\d*(e[+-]?\d+)?|true|false|nan|inf", re.IGNORECASE
)  # what Hydra does not read as a text


def check_overrides(overrides: Sequence[str], only_prints: bool = False, in_sweep: bool = False) -> None:
    """Check overrides that Hydra would accept without effect, or reject with a traceback.

    Raises:
        RefusedError: with what to type instead.
    """
    check_syntax(overrides)
    for argument in overrides:
        key, _, value = argument.lstrip("+~").partition("=")
        if key == "sweep.dir":
            of_run = "" if in_sweep else f" or, for one run, run.dir={value}"
            raise RefusedError(
                "is not a known key",
                key="sweep.dir",
                suggestion=f"Did you mean hydra.sweep.dir={value} (with -m){of_run}?",
            )
        if not only_prints:
            check_has_effect(argument)
        if key in our_options():
            _check_choice(argument, key, value)
        elif argument.startswith("~"):
            _check_no_deletion(argument, key)


def _check_choice(argument: str, group: str, value: str) -> None:
    """Refuse a value of a group that names no option, or several for one run."""
    is_none = value == "null" or argument.startswith("~")
    available = f"Available: {', '.join(our_options()[group])}."
    if group in LISTED:
        if is_none:
            what = {"logger": "To record nothing beside metrics.jsonl", "callbacks": "For a run without callbacks"}
            raise RefusedError(suggestion=f"{what[group]}, write {group}=none.", place=argument)
        if group == "callbacks":
            check_chosen_once(value)
        value = value.strip("[]")
    elif several := re.fullmatch(r"\[(.*,.*)\]", value):
        raise RefusedError(
            "chooses several options, and a run has one",
            suggestion=f"For a run with each, type -m {group}={several[1]}.",
            place=argument,
        )
    if is_none:
        raise RefusedError("Every run needs an option of this group", suggestion=available, place=argument)
    number = next((option for option in value.split(",") if _NO_NAME.fullmatch(option.strip())), None)
    if number is not None:
        raise RefusedError("is not a known option", key=group, value=number, suggestion=available)


def check_chosen_once(value: str) -> None:
    """Refuse a list of callbacks that names one twice, or none beside others.

    Raises:
        RefusedError: with the list to write.
    """
    names = [name.strip() for name in value.strip("[]").split(",")]
    others = [name for name in dict.fromkeys(names) if name != "none"]
    if value.startswith("[") and len(others) < len(names) > 1:
        meant = f"[{','.join(others)}]" if len(others) > 1 else "".join(others) or "none"
        raise RefusedError(
            "chooses none and others" if "none" in names and others else "chooses the same twice",
            key="callbacks",
            value=value,
            suggestion=f"Write callbacks={meant}.",
        )


def _check_no_deletion(argument: str, key: str) -> None:
    """Refuse an override that removes a key that every run has."""
    if key not in declared() or key.startswith("data."):  # those of data have a default without a line in the tree
        return
    _, hint = declared()[key]
    instead = f"Type {key}=null to switch it off." if type(None) in get_args(hint) else f"Type {key}=... to change it."
    raise RefusedError("Every run has this key, so it cannot be removed", suggestion=instead, place=argument)


def check_override_of_sweep(argument: str) -> None:
    """Refuse an override that a sweep cannot have.

    Raises:
        RefusedError: with what to type instead.
    """
    key, _, value = argument.lstrip("+~").partition("=")
    if key in ("sweep", "hydra.sweeper"):
        example = {"sweep": "sweep.slots=2", "hydra.sweeper": "hydra.sweeper.n_trials=20"}[key]
        raise RefusedError("names a section", suggestion=f"Set its keys, such as {example}.", place=argument)
    if key == "hydra/sweeper" and (value == "null" or _NO_NAME.fullmatch(value)):
        raise RefusedError(
            "Every sweep needs a sweeper",
            suggestion="Leave it out for the default, hydra/sweeper=basic.",
            place=argument,
        )
    if key == "run.dir":
        raise RefusedError(
            "Every job of a sweep has a run directory of its own",
            suggestion="Type hydra.sweep.dir=... for the folder that holds them.",
            place=argument,
        )
    if ONE_RUN.match(argument):
        raise RefusedError("is one run, and -m a sweep", suggestion="Leave one of them out.", place=argument)


def check_single_values(overrides: Sequence[str]) -> None:
    """Refuse several values that are written as one, such as `[0.1,0.01]`, for a key that takes a number.

    Raises:
        RefusedError: with the values as a sweep reads them.
    """
    for argument in overrides:
        key, equals, value = argument.lstrip("+").partition("=")
        if not equals or key == "trainer.gpus" or re.match(r"~|hydra|sweep", argument) or not takes_number(key):
            continue
        meant = several(value)
        if meant is not None and meant != value.strip() and not re.fullmatch(r"[^\[\](){}]*,[^\[\](){}]*", value):
            suggestion = shlex.quote(f"{key}={meant}") if "(" in meant else f"{key}={meant}"
            raise RefusedError(
                f"is one value, and {key} takes a number", suggestion=f"Did you mean {suggestion}?", place=argument
            )


def check_typed_once(overrides: Sequence[str]) -> None:
    """Refuse a key that is given twice, as when the shell expands `key={1,2}`: only the last value would count.

    Several values may follow a single one, which is how a wrapper script's default is overridden.

    Raises:
        RefusedError: with the key and its values.
    """
    values: dict[str, list[str]] = {}
    for argument in overrides:
        key, equals, value = argument.lstrip("+").partition("=")
        if equals and not re.match(r"~|sweep\.|hydra[./]", argument):
            values.setdefault(key, []).append(value)
    for key, typed in values.items():
        sweeps = [bool(re.search(r"[,(\[{]", value)) for value in typed]
        if len(set(typed)) < 2 or (sweeps[-1] and not any(sweeps[:-1])):
            continue
        if any(sweeps):
            raise RefusedError(
                "is typed twice", key=key, suggestion=f"Leave {key}={typed[0]} or {key}={typed[-1]} out."
            )
        raise RefusedError("is typed twice", key=key, suggestion=f"Write {key}={','.join(dict.fromkeys(typed))}.")
