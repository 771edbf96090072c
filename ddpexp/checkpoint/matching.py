"""Which tensor of a file each tensor of a model is given: a pure function of names and shapes, free of torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few

Shapes = Mapping[str, tuple[int, ...] | None]
"""By the names of tensors; None: any shape fits."""

_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


@dataclass(frozen=True)
class Selection:
    """What `run.init_rename` and `run.init_skip` say."""

    rename: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()

    def is_set(self) -> bool:
        """Return whether names are changed or left out."""
        return bool(self.rename or self.skip)


@dataclass(frozen=True)
class Match:
    """Where the tensors of a model come from, and what is left over. Names are in the order of model and file."""

    taken: Mapping[str, str]  # a tensor of the model: the one of the file
    kept: Sequence[str]  # of the model: left as they were built
    left_out: Sequence[str]  # of the file
    missing: Sequence[str]  # of the model, not in the file
    extra: Sequence[str]  # of the file, not in the model, as they are called after renaming
    other_shape: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]  # with the shape in the file and in the model
    prefix: str = ""  # that was removed from every name of the file

    def fits(self) -> bool:
        """Return whether nothing is missing, left over or of another shape."""
        return not (self.missing or self.extra or self.other_shape)

    def problem(self) -> str:
        """Return what does not fit."""
        shapes = [f"{name} is {shown(there)} there and {shown(here)} here" for name, there, here in self.other_shape]
        parts = [
            *([first_few(shapes, 3, "; ")] if shapes else []),
            *([f"it lacks {first_few(self.missing, 3)}"] if self.missing else []),
            *([f"it also has {first_few(self.extra, 3)}"] if self.extra else []),
        ]
        return "; ".join(parts)

    def facts(self) -> dict[str, Any]:
        """Return what is recorded in manifest.json."""
        renamed = {there: here for here, there in self.taken.items() if here != there}
        return {
            "taken": len(self.taken),
            "left_as_built": list(self.kept),
            "left_in_the_file": list(self.left_out),
            "renamed": renamed,
        }

    def summary(self) -> str:
        """Return what was taken and left out, for the log."""
        total = len(self.taken) + len(self.kept)
        parts = [f"{len(self.taken)} of {total} tensors taken"]
        if self.prefix:
            parts.append(f"without the prefix {self.prefix} of all its names")
        kept = [name for name in self.kept if ".lora_" not in name]
        if kept:
            parts.append(f"left as built: {first_few(kept)}")
        if len(kept) < len(self.kept):
            parts.append(f"{len(self.kept) - len(kept)} of adapters are new")
        if self.left_out:
            parts.append(f"left in the file: {first_few(self.left_out)}")
        return "; ".join(parts)


def match(
    source: Shapes,
    target: Shapes,
    selection: Selection = Selection(),
    ties: Mapping[str, str] | None = None,
    optional: Callable[[str], bool] = lambda name: False,
) -> Match:
    """Return which tensor of `source` each one of `target` gets.

    `ties` maps further names of a tied tensor of the model to the first one: one of its names in the file suffices.
    `optional` tensors of the model may be missing: they are left as they were built.

    Raises:
        RefusedError: a key of run.init_rename or run.init_skip matches nothing, or they leave nothing to take.
    """
    names, prefix = _named_here(source, target, selection.rename)
    left_out = [there for here, there in names.items() if is_matched(here, selection.skip)]
    kept = [name for name in target if is_matched(name, selection.skip)]
    _check_skip(selection.skip, [*names, *target])
    given = {here: there for here, there in names.items() if there not in left_out}
    wanted = {name: shape for name, shape in target.items() if name not in kept}
    if not wanted or not given:
        raise RefusedError(
            "leaves no weights to load",
            key="run.init_skip",
            value=_skipped(selection.skip),
            suggestion="Leave out run.init_from, or skip fewer names.",
        )
    others = _other_names(ties or {})
    taken: dict[str, str] = {}
    missing: list[str] = []
    other_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for name, shape in wanted.items():
        there = next((given[one] for one in (name, *others.get(name, ())) if one in given), None)
        if there is None:
            (kept if optional(name) else missing).append(name)
        elif shape is not None and (stored := source[there]) is not None and stored != shape:
            other_shape.append((name, stored, shape))
        else:
            taken[name] = there
    extra = [name for name in given if name not in wanted]
    return Match(taken, kept, left_out, missing, extra, other_shape, prefix)


def advice(found: Match, skip: Iterable[str]) -> str:
    """Return which override takes the weights that fit, with what is skipped already; empty if none do."""
    if not found.taken:
        return ""
    unfit = [*(name for name, _, _ in found.other_shape), *found.missing, *found.extra]
    fit = [*found.taken, *found.kept]
    patterns = dict.fromkeys(skip)
    for name in unfit:
        parts = name.split(".")
        prefixes = [".".join(parts[:number]) + ".*" for number in range(1, len(parts))]
        whole = next((one for one in prefixes if not any(fnmatchcase(other, one) for other in fit)), name)
        patterns[whole] = None
    if len(patterns) > 4:
        return ""
    return f"To take the others: 'run.init_skip=[{','.join(patterns)}]'."


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Return the name after the first entry that matches it.

    A key with * is a pattern for the whole name, and each * of the new name stands for what that of the key matched. A
    key without is a prefix: the name itself, or what its dots divide.
    """
    for old, new in rename.items():
        if "*" in old:
            found = re.fullmatch("(.*?)".join(map(re.escape, old.split("*"))), name, re.DOTALL)
            if found is not None:
                pieces = iter(found.groups())
                return "".join(next(pieces) if part == "*" else part for part in re.split(r"(\*)", new))
        elif name == old or name.startswith(f"{old}."):
            return (new + name[len(old) :]).lstrip("." if not new else "")
    return name


def check_selection(selection: Selection) -> None:
    """Check the keys by themselves.

    Raises:
        RefusedError: the new name of a pattern has another number of * than the pattern.
    """
    for old, new in selection.rename.items():
        if old.count("*") != new.count("*"):
            raise RefusedError(
                f"`{old}` has {old.count('*')} * and `{new}` has {new.count('*')}",
                key="run.init_rename",
                value=f"{{{old}: {new}}}",
                suggestion="Use the same number of * in both patterns.",
            )


def check_rename(source: Iterable[str], rename: Mapping[str, str]) -> None:
    """Check that each entry of run.init_rename matches a name of the file.

    Raises:
        RefusedError: one does not.
    """
    names = list(source)
    plain = [name.removeprefix(prefix) for prefix in _WRAPPERS for name in names if name.startswith(prefix)]
    for old in rename:
        if not any(_matches(name, old) for name in (*names, *plain)):
            raise RefusedError(
                f"matches none of the {len(names)} names of the file, such as {first_few(names, 3)}",
                key="run.init_rename",
                value=f"{{{old}: {rename[old]}}}",
            )


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the globs matches a name; * matches dots, too."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def shown(shape: Sequence[int]) -> str:
    """Return a shape as it is written in messages."""
    return f"({', '.join(map(str, shape))})" if len(shape) != 1 else f"({shape[0]},)"


def _named_here(source: Shapes, target: Shapes, rename: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the names of the file by those that they have here, and the prefix that all of them lose."""
    prefix = ""
    for wrapper in _WRAPPERS:
        typed = any(old.startswith(wrapper.rstrip(".")) for old in rename)
        wrapped = all(name.startswith(prefix + wrapper) for name in source)
        if wrapped and not typed and not any(name.startswith(wrapper) for name in target):
            prefix += wrapper
    check_rename([name.removeprefix(prefix) for name in source], rename)
    names: dict[str, str] = {}
    for there in source:
        here = renamed(there.removeprefix(prefix), rename)
        if here in names:
            raise RefusedError(f"gives {names[here]} and {there} the same name, {here}", key="run.init_rename")
        names[here] = there
    return names, prefix


def _matches(name: str, old: str) -> bool:
    return fnmatchcase(name, old.replace("[", "[[]").replace("?", "[?]")) or name.startswith(f"{old}.")


def _check_skip(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not is_matched_by(names, pattern):
            raise RefusedError(
                f"matches no name of the model or of the file, such as {first_few(names, 3)}",
                key="run.init_skip",
                value=_skipped([pattern]),
            )


def is_matched_by(names: Iterable[str], pattern: str) -> bool:
    """Return whether a glob matches any of the names."""
    return any(fnmatchcase(name, pattern) for name in names)


def _other_names(ties: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the other names of each name of a tied tensor."""
    groups: dict[str, list[str]] = {}
    for name, first in ties.items():
        groups.setdefault(first, [first]).append(name)
    return {name: [other for other in group if other != name] for group in groups.values() for name in group}


def _skipped(patterns: Sequence[str]) -> str:
    return f"[{','.join(patterns)}]"
