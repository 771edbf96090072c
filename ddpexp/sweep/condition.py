"""Conditions on runs, such as `eval/accuracy>0.9 and not (optimizer.lr<0.1 or status==failed)`: parsed, never run."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from ddpexp.config.keys import MISSING
from ddpexp.errors import RefusedError, shown

_DEPTH = 50  # of parentheses and `not`: far more than anybody types
_TOKEN = re.compile(r"\s*(?:(?P<op><=|>=|==|!=|[<>()])|(?P<text>'[^']*'|\"[^\"]*\")|(?P<word>[\w./@:%+*-]+))")
_NAME = re.compile(r"[A-Za-z_][\w./@-]*")
_ORDERS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_FOREIGN = {"=": "==", "&&": "and", "&": "and", "||": "or", "|": "or", "!": "not", "~": "not", ",": "and", "is": "=="}
_EXAMPLE = 'For example, type --where "eval/accuracy>0.9 and optimizer.lr<0.1".'

Lookup: TypeAlias = Callable[[str], Any]
"""Returns the value of a run by its name; MISSING: the run has none."""


@dataclass(frozen=True)
class Comparison:
    """A name, an operator and what the value is compared with."""

    name: str
    op: str
    wanted: str | float

    def holds(self, value_of: Lookup) -> bool:
        """Return whether a run fulfills it; one that does not have the name never does."""
        value = value_of(self.name)
        if value is MISSING:
            return False
        if self.op in _ORDERS:
            number = number_of(value)
            return number is not None and _ORDERS[self.op](number, float(self.wanted))
        values = [*value, value] if isinstance(value, list | tuple) else [value]
        return any(_is_equal(one, self.wanted) for one in values) is (self.op == "==")


@dataclass(frozen=True)
class Combination:
    """Conditions with `and` or `or` between them, or one behind `not`."""

    word: str
    parts: Sequence[Condition]

    def holds(self, value_of: Lookup) -> bool:
        """Return whether a run fulfills it."""
        held = (part.holds(value_of) for part in self.parts)
        if self.word == "not":
            return not next(held)
        return all(held) if self.word == "and" else any(held)


Condition: TypeAlias = Comparison | Combination


def parse_condition(text: str) -> Condition:
    """Parse a condition.

    Raises:
        RefusedError: it is none, with where it is wrong.
    """
    return _Parser(text).whole()


def names_in(condition: Condition) -> Iterator[str]:
    """Yield the names that a condition compares."""
    if isinstance(condition, Comparison):
        yield condition.name
    else:
        for part in condition.parts:
            yield from names_in(part)


class _Parser:
    """Reads the words of a condition from left to right; `or` binds less than `and`, and that less than `not`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = list(_words(text))
        self._depth = 0

    def whole(self) -> Condition:
        condition = self._any_of()
        if self._words:
            word = self._words[0]
            if word == ")":
                raise _refused("has a ) too many", self._text)
            if word in (*_ORDERS, "==", "!="):
                raise _refused(
                    f"has a second comparison in a row before {word!r}", self._text, "Type and between comparisons."
                )
            raise _refused(f"needs and or or before {word!r}", self._text, _instead(word))
        return condition

    def _any_of(self) -> Condition:
        return self._combined("or", lambda: self._combined("and", self._one))

    def _combined(self, word: str, part: Callable[[], Condition]) -> Condition:
        parts = [part()]
        while self._words[:1] and self._words[0].lower() == word:
            self._words.pop(0)
            parts.append(part())
        return parts[0] if len(parts) == 1 else Combination(word, tuple(parts))

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > _DEPTH:
            raise _refused("is nested too deeply", self._text)
        try:
            word = self._next("a name")
            if word.lower() == "not":
                return Combination("not", (self._one(),))
            if word != "(":
                return self._comparison(word)
            inner = self._any_of()
            if self._next("a )") != ")":
                raise _refused("has a ( that is not closed", self._text)
            return inner
        finally:
            self._depth -= 1

    def _comparison(self, name: str) -> Comparison:
        if not _NAME.fullmatch(name) or name.lower() in ("and", "or"):
            after = "The name stands first, as in eval/loss<0.5." if _as_number(name) is not None else _instead(name)
            raise _refused(f"needs a name of a metric or a key where it has {name!r}", self._text, after)
        op = self._next(f"a comparison behind {name}")
        if op not in (*_ORDERS, "==", "!="):
            advice = _instead(op) or f"Type {name}==VALUE, or one of < <= > >= !=."
            raise _refused(f"needs a comparison behind {name}, where it has {op!r}", self._text, advice)
        word = self._next(f"a value behind {name}{op}")
        if word in (*_ORDERS, "==", "!=", "(", ")") or word.lower() in ("and", "or", "not"):
            raise _refused(f"needs a value behind {name}{op}, where it has {word!r}", self._text)
        wanted: str | float = word
        if word[0] in "'\"":
            wanted = word[1:-1]
        elif (number := _as_number(word)) is not None:
            wanted = number
        if op in _ORDERS and not isinstance(wanted, float):
            raise _refused(f"compares {name} with {word!r} by {op}, which is for numbers", self._text, "Use == or !=.")
        return Comparison(name, op, wanted)

    def _next(self, expected: str) -> str:
        if not self._words:
            raise _refused(f"ends where {expected} is missing", self._text)
        return self._words.pop(0)


def _words(text: str) -> Iterator[str]:
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position:].lstrip()
            wrong = next((sign for sign in ("&&", "||", *_FOREIGN) if rest.startswith(sign)), rest[0])
            reason = (
                f"has a {wrong} that is not closed" if wrong in "'\"" else f"has {wrong!r}, which means nothing here"
            )
            raise _refused(reason, text, _instead(wrong))
        yield match["op"] or match["text"] or match["word"]
        position = match.end()


def _instead(word: str) -> str:
    """Return what to type for a sign or a word of another language."""
    return f"Type {_FOREIGN[word]} in place of {word}." if word in _FOREIGN else ""


def _refused(reason: str, text: str, suggestion: str = "") -> RefusedError:
    return RefusedError(reason, place=f"--where {text!r}", suggestion=suggestion or _EXAMPLE)


def _as_number(word: str) -> float | None:
    with suppress(ValueError):
        return float(word)
    return None


def number_of(value: Any) -> float | None:
    """Return the number that a value is; a text from an override may be one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    with suppress(ValueError, OverflowError):
        return float(value)
    return None


def _is_equal(value: Any, wanted: str | float) -> bool:
    if isinstance(wanted, float):
        number = number_of(value)
        return number is not None and (number == wanted or (math.isnan(number) and math.isnan(wanted)))
    return shown(value).lower() == wanted.lower()
