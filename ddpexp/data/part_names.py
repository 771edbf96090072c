"""The usual names of the parts of a data set, in any case: train, Training, VAL, dev, Testing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from ddpexp.system.text import counted

PartName = Literal["train", "eval", "test"]

_PARTS: dict[PartName, tuple[str, ...]] = {
    "train": ("train", "training", "trainset"),
    "eval": ("val", "valid", "validation", "valset", "dev", "devset", "eval", "evaluation"),
    "test": ("test", "testing", "testset"),
}
_BY_NAME = {name: part for part, names in _PARTS.items() for name in names}
_FILLERS = {"set", "data", "dataset", "image", "images", "img", "imgs", "split", "part", "folder", "files", "samples"}
_WORD = re.compile(r"[^\W\d_]+")


def part_of(name: str) -> PartName | None:
    """Return the part that a name is the usual one of."""
    return _BY_NAME.get(name.casefold())


def named_like_parts(names: Iterable[str]) -> dict[str, PartName]:
    """Return the names that say which part something is: alone (`Training_set`, `test2`), or beside one another.

    `seg_train` and `seg_test` differ in the part alone, and `train station` and `test tube` do not.
    """
    found: dict[str, PartName] = {}
    by_rest = defaultdict[tuple[str, ...], dict[str, PartName]](dict)  # of names that have other words, too
    for name in names:
        words = [word for word in _WORD.findall(name.casefold()) if word not in _FILLERS]
        parts = [_BY_NAME[word] for word in words if word in _BY_NAME]
        rest = tuple(word for word in words if word not in _BY_NAME)
        if len(parts) == 1 and not rest:
            found[name] = parts[0]
        elif parts:
            by_rest[rest][name] = parts[0]
    for beside in by_rest.values():
        if len(set(beside.values())) > 1:
            found |= beside
    return found


def overlap(train: Iterable[str], evaluation: Iterable[str]) -> str:
    """Return what the first lines say of files that are both trained and evaluated on; empty: there are none."""
    both = set(train) & set(evaluation)
    return f"; {counted(len(both), 'file')} of data.eval_path, such as {min(both)}, trained on too" if both else ""
