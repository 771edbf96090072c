"""The usual names of the parts of a data set, in any case: train, Training, VAL, dev, Testing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

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


def named_like_parts(names: Iterable[str]) -> list[str]:
    """Return the names that say which part something is: alone (`Training_set`, `test2`), or beside one another.

    `seg_train` and `seg_test` differ in the part alone, and `train station` and `test tube` do not.
    """
    found, parts_of = [], defaultdict[tuple[str, ...], list[tuple[str, PartName]]](list)
    for name in names:
        words = [word for word in _WORD.findall(name.casefold()) if word not in _FILLERS]
        parts = [_BY_NAME[word] for word in words if word in _BY_NAME]
        if len(parts) == 1 == len(words):
            found.append(name)
        elif parts:
            parts_of[tuple(word for word in words if word not in _BY_NAME)].append((name, parts[0]))
    for pairs in parts_of.values():
        if len({part for _, part in pairs}) > 1:
            found += [name for name, _ in pairs]
    return found
