"""What the sources of a mixture know of their samples, which one model learns from: it has to mean the same.

Free of torch and numpy, for the preparation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few

_LISTED = 10
_PLAIN = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)  # a name that needs no quotes on a command line


@dataclass(frozen=True)
class Source:
    """A source of a mixture as prepared."""

    name: str
    facts: Mapping[str, Any]
    options: Mapping[str, Any]  # the keys of its section

    def key(self, key: str) -> str:
        """Return a key of the source as it is typed."""
        return f"data.sources.{self.name}.{key}"


def shared_facts(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the facts that all sources have alike, with the classes of the one that has the most.

    A fact that one of two sources does not know is not compared.

    Raises:
        RefusedError: two sources differ in what a label, a token, a column or a channel is, or how it is normalized.
    """
    for one, other in combinations(sources, 2):
        for check in _CHECKS:
            if (error := check(one, other)) is not None:
                raise error
    first = sources[0].facts
    facts = {key: value for key, value in first.items() if all(other.facts.get(key) == value for other in sources)}
    if all(map(_names, sources)):
        most = max(sources, key=lambda source: len(_names(source))).facts
        facts |= {key: most[key] for key in ("classes", "num_classes", "num_outputs") if key in most}
    return facts


def _classes(one: Source, other: Source) -> RefusedError | None:
    """Compare the numbering of classes: a source may lack the last ones."""
    lists = _names(one), _names(other)
    if all(mine == theirs for mine, theirs in zip(*lists, strict=False)):
        return None
    union = list(dict.fromkeys([*lists[0], *lists[1]]))
    remedy = "Mix sources with the same classes in the same order"
    if "classes" in one.options and "classes" in other.options:
        few = len(union) <= _LISTED and all(map(_PLAIN.fullmatch, union))
        value = f"[{','.join(union)}]" if few else "[...], with the names of all classes"
        remedy = f"Give both the same: {one.key('classes')}={value} {other.key('classes')}={value}"
    return _refused(one, other, f"{_differ(one, other, 'classes')}, so that a label would mean two things", remedy)


def _columns(one: Source, other: Source) -> RefusedError | None:
    if not _both(one, other, "columns"):
        return None
    remedy = "Rename the columns of one, or leave out what the other does not have"
    if sorted(map(str, one.facts["columns"])) == sorted(map(str, other.facts["columns"])):
        remedy = f"Give both the same order with {other.key('inputs')}"
    return _refused(one, other, _differ(one, other, "columns"), remedy)


def _target_columns(one: Source, other: Source) -> RefusedError | None:
    if not _both(one, other, "target_columns") or len(one.facts["target_columns"]) == 1:
        return None
    remedy = f"Give both the same with {other.key('targets')}"
    return _refused(one, other, _differ(one, other, "target_columns"), remedy)


def _shape(one: Source, other: Source) -> RefusedError | None:
    """Compare the shape of a sample, the channels among it."""
    if not _both(one, other, "shape"):
        return None
    keys = [key for key in ("channels", "size", "image_size", "max_length", "inputs") if key in other.options]
    remedy = f" with {' and '.join(map(other.key, keys))}" if keys else ""
    shapes = (" x ".join(map(str, source.facts["shape"])) for source in (one, other))
    problem = f"have samples of different shapes ({' and '.join(shapes)})"
    return _refused(one, other, problem, f"Give both the same{remedy}")


def _moments(one: Source, other: Source) -> RefusedError | None:
    """Compare how inputs are normalized: not at all is another way, too."""
    keys = [key for key in ("mean", "std") if one.facts.get(key) != other.facts.get(key)]
    standardized = [source for source in (one, other) if source.options.get("standardize")]
    if not keys or (not standardized and not _both(one, other, keys[0])):
        return None
    problem = "are normalized differently"
    if standardized:
        own = " ".join(f"{source.key('standardize')}=false" for source in standardized)
        problem += ", each by the numbers of its own samples"
        return _refused(one, other, problem, f"Use {own}, and normalize in the model")
    values = " and ".join(str(source.facts[keys[0]]) for source in (one, other))
    remedy = f"Set {other.key(keys[0])}={_listed(one.facts[keys[0]])}" if keys[0] in other.options else "Mix others"
    return _refused(one, other, f"{problem} ({keys[0]} {values})", remedy)


def _vocabulary(one: Source, other: Source) -> RefusedError | None:
    """Compare what a token stands for."""
    tokenizers = [_tokenizer(source) for source in (one, other)]
    comparable = None not in tokenizers and type(tokenizers[0]) is type(tokenizers[1])
    if not (comparable and tokenizers[0] != tokenizers[1]) and not _both(one, other, "vocab_size"):
        return None
    remedy = f"Give both one tokenizer, such as {one.key('tokenizer')}=bytes {other.key('tokenizer')}=bytes"
    return _refused(one, other, "number their tokens differently", remedy)


def _tokenizer(source: Source) -> Any:
    """Return what numbers the tokens of a source: the record of a tokenizer, or its name; None if there is none."""
    record = source.facts.get("tokenizer")
    if isinstance(record, Mapping):
        return {key: value for key, value in record.items() if key != "folder"}
    return source.options.get("tokenizer") if "vocab_size" in source.facts else None


_CHECKS: tuple[Callable[[Source, Source], RefusedError | None], ...] = (
    _classes, _columns, _target_columns, _shape, _moments, _vocabulary,
)  # fmt: skip


def _names(source: Source) -> list[str]:
    """Return the names of the classes of a source; none if it does not know them."""
    names = source.facts.get("classes")
    return names if isinstance(names, list) else []


def _both(one: Source, other: Source, fact: str) -> bool:
    """Return whether both know a fact, and differ in it."""
    values = one.facts.get(fact), other.facts.get(fact)
    return None not in values and values[0] != values[1]


def _refused(one: Source, other: Source, problem: str, remedy: str) -> RefusedError:
    key = f"data.sources.{one.name}"
    return RefusedError(f"and data.sources.{other.name} {problem}", key=key, suggestion=f"{remedy}.")


def _differ(one: Source, other: Source, fact: str) -> str:
    lists = (first_few(source.facts[fact], _LISTED) for source in (one, other))
    return f"have different {fact.replace('_', ' ')} ({' and '.join(f'[{one}]' for one in lists)})"


def _listed(values: Sequence[float]) -> str:
    return f"[{','.join(map(str, values))}]"
