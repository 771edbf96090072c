"""The declaration of a key, beside its type in the annotation of the field: `seed: Annotated[int, Key(at_least=0)]`.

The default of a key and its explanation stand in `conf`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpexp.errors import RefusedError, shown

UNCHANGED = object()
"""The key has the same value in a run of two steps."""


@dataclass(frozen=True, eq=False)  # it stands in annotations, which typing hashes
class Key:
    """The range of a key, its rules for a resume and for a short run, and the words of other frameworks for it."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    pattern: str | None = None  # of a text, as a whole
    use: str = ""  # what may be typed, where the type and the range do not say it well
    on_resume: Literal["free", "typed"] = "typed"  # a resume may change it in any case, or where it is typed
    fixed_because: str = ""  # why no resume may change it
    short_run: Any = UNCHANGED  # its value in the two steps of `ddpexp check`; null stays null
    also: str = ""  # keys of other frameworks, with blanks between them
    remark: str = ""  # what somebody should know who has typed one of those
    synonyms: Mapping[str, str] = field(default_factory=dict)  # values of other frameworks likewise, by the value here
    advice: Mapping[str, str] = field(default_factory=dict)  # by patterns of values for which no single value stands

    def check(self, value: Any, hint: Any, key: str) -> None:
        """Check a value of the type `hint`, which is the type of the key `key`.

        Raises:
            RefusedError: it is outside the range, or does not match the pattern.
        """
        if isinstance(value, str):
            is_accepted = self.pattern is None or re.fullmatch(self.pattern, value) is not None
        elif isinstance(value, bool) or not isinstance(value, int | float):
            is_accepted = True
        else:
            is_accepted = (
                not math.isnan(value)
                and (self.above is None or value > self.above)
                and (self.at_least is None or value >= self.at_least)
                and (self.below is None or value < self.below)
                and (self.at_most is None or value <= self.at_most)
            )
        if not is_accepted:
            text = shown(value)
            advice = next((f" {one}" for pattern, one in self.advice.items() if re.fullmatch(pattern, text)), "")
            raise RefusedError(key=key, value=text, suggestion=f"Use {self.usage(hint)}.{advice}")

    @property
    def is_range(self) -> bool:
        """Return whether not every number of its type is accepted."""
        return (self.above, self.at_least, self.below, self.at_most) != (None, None, None, None)

    def usage(self, hint: Any) -> str:
        """Return what may be typed for a key of the type `hint`, such as "epoch or a whole number from 0"."""
        return self.use or " or ".join(self._usages(hint))

    def _usages(self, hint: Any) -> Iterator[str]:
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            numbers = [inner for inner in typing.get_args(hint) if inner in (int, float)]
            for inner in typing.get_args(hint):
                if inner not in numbers[1:]:  # int | float is one range of numbers
                    yield from self._usages(float if float in numbers and inner is int else inner)
        elif typing.get_origin(hint) is Literal:
            yield from map(str, typing.get_args(hint))
        elif hint is type(None):
            yield "null"
        elif hint in (int, float):
            yield f"a {'whole ' * (hint is int)}number{self._range()}"

    def _range(self) -> str:
        high = self.below if self.below != math.inf else None
        if self.above is not None and high is not None:
            return f" between {self.above} and {high}"
        text = ""
        if self.at_least is not None:
            text += f" from {self.at_least}"
        elif self.above is not None:
            text += f" above {self.above}"
        if high is not None:
            text += f" to below {high}"
        elif self.at_most is not None:
            text += f" to {self.at_most}"
        return text


_UNDECLARED = Key()


def annotations_of(part: Any) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields or a function's arguments, with what they declare."""
    if isinstance(part, type):
        return typing.get_type_hints(part, include_extras=True)
    return inspect.get_annotations(part, eval_str=True)  # Python 3.10's get_type_hints puts an Optional around them


def declaration(hint: Any) -> tuple[Key, Any]:
    """Return what is declared of a key, whose annotation is `Annotated[type, Key(...)]`, and its type."""
    if typing.get_origin(hint) is typing.Annotated:
        return next(one for one in hint.__metadata__ if isinstance(one, Key)), hint.__origin__
    return _UNDECLARED, hint


def declarations(section: type, where: str) -> Iterator[tuple[str, Key, Any]]:
    """Yield each key of a section, as it is typed, with what is declared of it and its type; sections inside it too."""
    hints = annotations_of(section)
    for one in dataclasses.fields(section):
        name = f"{where}.{one.name}"
        key, hint = declaration(hints[one.name])
        yield name, key, hint
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from declarations(hint, name)
