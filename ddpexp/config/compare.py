"""Whether a run can be resumed with another configuration.

What two trees differ in, and what such a difference would do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpexp.config import strategies
from ddpexp.config.declared import SECTIONS
from ddpexp.config.keys import override_key, value_at
from ddpexp.config.registry import key_of
from ddpexp.errors import RefusedError, shown
from ddpexp.settings.data import CommonData
from ddpexp.settings.key import Key, declarations
from ddpexp.settings.trainer import Trainer

UNSET = object()  # the value of a key that one of the trees does not have

_OTHER_SAMPLES = "the steps to come would see other samples than the order of this run says"
# Keys that no field declares: whole sections, and those of sections with a `_target_`.
_ON_RESUME: Mapping[str, Key] = {
    "recipe": Key(fixed_because="another recipe is another experiment"),
    "launcher": Key(on_resume="free"),
    "logger": Key(on_resume="free"),
    "run": Key(on_resume="free"),
    "predict": Key(on_resume="free"),
    "data.root": Key(on_resume="free"),
    "data": Key(fixed_because=_OTHER_SAMPLES),
    "model._target_": Key(fixed_because="the weights in the checkpoint belong to the old one"),
    "optimizer._target_": Key(fixed_because="what the checkpoint holds of the optimizer belongs to the old one"),
}
_STEPS = ("trainer.epochs", "trainer.max_steps")
LENGTH = (*_STEPS, "trainer.max_seconds")


@dataclass(frozen=True)
class Change:
    """One key that differs, named as it is typed."""

    key: str
    old: Any
    new: Any
    kind: Literal["free", "typed", "untyped", "fixed"]
    remark: str = ""  # what the change does
    overrides: tuple[str, str] | None = None  # what to type for the new value and for the old; None: key=value
    because: str = ""  # why a fixed key stays

    @property
    def is_length(self) -> bool:
        """Return whether the length of the run was typed, which counts from its beginning."""
        return self.kind == "typed" and self.key in LENGTH and self.new is not None

    def __str__(self) -> str:
        """Return the key with both values, and what there is to say of it."""
        old, new = ("chosen" if self.overrides and isinstance(v, Mapping) else _shown(v) for v in (self.old, self.new))
        return f"{self.key} {old} -> {new}{f' ({self.remark})' if self.remark else ''}"


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], typed: Sequence[str], before: Sequence[str] = ()
) -> list[Change]:
    """Return what differs between the stored tree and the new one.

    `typed` are the words of this command and `before` those that the run was started with: an option of a group counts
    as typed when it was not typed before, for a file that has changed since was not asked for.
    `run.allow_changes=[data]` in the new tree makes the keys of `data` overridable.
    """
    chosen = _keys(typed, before, old, new)
    declared = rules_of(new)
    may_change = ("data",) if "data" in (new["run"].get("allow_changes") or ()) else ()
    callbacks = _callbacks(new, typed), _callbacks(old, before)
    changes = []
    for key, was, now in _differences(old, new):
        if key == "run.dir":
            continue  # the directory itself, by whatever path
        is_typed = any(key == override or key.startswith(f"{override}.") for override in chosen)
        rule = resume_rule(key, declared)
        kind: Literal["free", "typed", "untyped", "fixed"]
        if rule.on_resume == "free" or (key == "data.source" and new["data"].get("prepare")):
            kind = "free"  # another source is held against the data's identity
        elif was is UNSET and not is_typed and _of_a_newer_version(key, new):
            continue
        elif rule.fixed_because and not _under(key, may_change):
            kind = "fixed"
        else:
            kind = "typed" if is_typed else "untyped"
        is_choice = re.fullmatch(r"callbacks(\.[^.]+)?", key) is not None
        changes.append(
            Change(key, was, now, kind, _remark(key, new), callbacks if is_choice else None, because=rule.fixed_because)
        )
    return changes


def refuse(changes: Sequence[Change], run: str, edited: Collection[str] = ()) -> None:
    """Refuse what the run called `run` cannot be resumed with.

    `edited` are the keys that were changed in its config.yaml.

    Raises:
        RefusedError: a key that stays as it is for as long as a run lasts, or one that has changed without being typed.
    """
    for change in sorted(changes, key=lambda change: change.key != "recipe.name"):
        key = change.key
        old = change.old
        new = change.new
        if key == "recipe.name":
            raise RefusedError(
                f"holds a run of the recipe {shown(old)}, and this is {shown(new)}: another recipe is another "
                "experiment",
                suggestion="Start it with the recipe it has, or a new run with another run.dir.",
                place=run,
            )
        if change.kind == "fixed":
            raise RefusedError(
                f"was started with {_assigned(key, old)}, and {_here(change, edited)}: {change.because}",
                suggestion=f"{_keep(key, old)}, {_or_allow(change)}or train a new run with it (ddpexp rerun).",
                place=run,
            )
    for change in changes:
        if change.kind == "untyped":
            key = change.key
            old = change.old
            new = change.new
            to_change, to_keep = change.overrides or (_override_for(key, new, old), _override_for(key, old, new))
            raise RefusedError(
                f"was started with {_assigned(key, old)}, and {_here(change, edited)}, which is not typed",
                suggestion=f"Type {to_change} to change it, or {to_keep} to keep it.",
                place=run,
            )


def lengthens(changes: Sequence[Change]) -> bool:
    """Return whether typed words ask for a longer run."""
    return any(
        change.kind == "typed"
        and change.key in LENGTH
        and change.old is not None
        and (change.new is None or change.new > change.old)
        for change in changes
    )


def list_changes(changes: Sequence[Change]) -> list[str]:
    """Return a line for what was typed to be different, and one for what may be."""
    typed = [str(change) for change in changes if change.kind == "typed"]
    free = [str(change) for change in changes if change.kind == "free"]
    return [
        f"{title}: {', '.join(part)}" for title, part in (("changed", typed), ("also other than before", free)) if part
    ]


def _keys(typed: Sequence[str], before: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys that the words set: `+model.x=1` sets model.x, `scheduler=cosine` all of scheduler.

    So does `scheduler._target_=...` where it was another one, whose keys are gone with it.
    """
    keys = []
    for override in typed:
        key = override_key(override).partition("@")[0].replace("/", ".")
        if key and key != "recipe" and ("." in key or override not in before):
            keys.append(key)
        if key.endswith("._target_") and value_at(old, key) != value_at(new, key):
            keys.append(key.removesuffix("._target_"))
    return keys


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(name for name in new if name not in old)]:
            here = f"{key}.{name}" if key else str(name)
            yield from _differences(old.get(name, UNSET), new.get(name, UNSET), here)
    elif isinstance(old, bool) is not isinstance(new, bool) or old != new:
        yield key, old, new


def _of_a_newer_version(key: str, new: Mapping[str, Any]) -> bool:
    """Return whether a key that the stored tree lacks came with another version of ddpexp.

    Its default changes nothing.
    """
    section, _, rest = key.partition(".")
    if SECTIONS[section].target != "_target_":
        return True
    node: Any = new[section]
    if section == "callbacks":
        name, _, option = rest.partition(".")
        if not option:  # a callback that was not there, or the whole section
            return not rest and not node
        section, node = f"{section}.{name}", node[name]
    target = node.get("_target_")
    return key_of(section, target) is not None or str(target).startswith(("ddpexp.", "torch."))


def rules_of(new: Mapping[str, Any]) -> Mapping[str, Key]:
    """Return what is declared of the keys of a tree, by the key."""
    options_class = strategies.options_of(str(new["strategy"].get("kind")))
    sections = [("trainer", Trainer), ("data", CommonData), *([("strategy", options_class)] if options_class else [])]
    return {name: key for where, section in sections for name, key, _ in declarations(section, where)}


def resume_rule(key: str, declared: Mapping[str, Key]) -> Key:
    """Return what is declared of a key, or of the section around it; a free key may stand in a fixed section."""
    names = list(itertools.accumulate(key.split("."), "{}.{}".format))
    rules = [rule for name in names for known in (declared, _ON_RESUME) if (rule := known.get(name)) is not None]
    chosen = [rule for rule in rules if rule.on_resume == "free" or rule.fixed_because]
    return chosen[-1] if chosen else Key()


def _under(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _remark(key: str, new: Mapping[str, Any]) -> str:
    scheduler = new.get("scheduler")
    fixed = (
        isinstance(scheduler, Mapping)
        and scheduler.get("_target_") in ("constant", "constant_with_warmup", "plateau", "torch")
        and (not scheduler.get("warmup") or scheduler.get("warmup_steps") is not None)
    )
    return "the learning rate's schedule follows the new length from here on" if key in _STEPS and not fixed else ""


def _shown(value: Any) -> str:
    return "not set" if value is UNSET else shown(value)


def _callbacks(tree: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Return what to type for the callbacks of a tree: the overrides that chose them, or else their names."""
    names = [str(name) for name, node in (tree.get("callbacks") or {}).items() if node is not None]
    typed = [override for override in overrides if re.match(r"[+~]*callbacks[.=]", override)] if names else []
    if any(override.startswith("callbacks=") for override in typed):
        return " ".join(typed)
    options = [name for name in names if not any(override.startswith(f"+callbacks.{name}._") for override in typed)]
    choice = f"[{','.join(options)}]" if len(options) > 1 else "".join(options)
    if not choice and not typed:
        return "callbacks=none"
    return " ".join([*([f"callbacks={choice}"] if choice else []), *typed])


def _assigned(key: str, value: Any) -> str:
    if key.startswith("callbacks.") and isinstance(value, Mapping):
        return key
    return f"no {key}" if value is UNSET else f"{key}={shown(value)}"


def _here(change: Change, edited: Collection[str]) -> str:
    """Say what a key is now, and where that comes from."""
    now = _assigned(change.key, change.new)
    return f"its config.yaml was edited to {now}" if change.key in edited else f"this is {now}"


def _or_allow(change: Change) -> str:
    """Say what is typed for data that may be other data."""
    if not _under(change.key, ("data",)):
        return ""
    return (
        f"type {_override_for(change.key, change.new, change.old)} run.allow_changes=[data] to continue with "
        f"other samples, "
    )


def _override_for(key: str, value: Any, other: Any) -> str:
    """Return what to type for a key to have this value; `other` is what it has without that."""
    if value is UNSET:
        return f"~{key}"
    return f"{'+' if other is UNSET else ''}{key}={shown(value)}"


def _keep(key: str, old: Any) -> str:
    return f"Leave out {key}" if old is UNSET else f"Keep {key}={shown(old)}"
