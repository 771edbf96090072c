"""The schema of a data set: the training part decides it once, and every other part is read by it.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal

from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few

Kind = Literal["number", "category", "date", "text", "image"]

STATISTICS = ("mean", "median")
"""The rules of data.missing whose numbers are those of the samples that are trained on."""

_LISTED = 20  # columns and categories in a line


@dataclass(frozen=True)
class Field:
    """A column of the inputs or of the targets."""

    name: str | None  # None: an array, whose columns have no names
    kind: Kind
    categories: tuple[str, ...] | None = None  # in the order of their codes
    numbered: bool = False  # the data holds the codes themselves, and `categories` names them
    missing: str | float | None = None  # the rule of data.missing; None: a missing value is refused
    fill: float | None = None  # the number that the rule puts in place of a missing value

    def described(self) -> str:
        """Return name, kind and categories as text."""
        text = f"{self.name} {self.kind}" if self.name is not None else self.kind
        if self.categories is not None:
            text += f" ({first_few(self.categories, _LISTED)})"
        filled = f"{self.missing}" if self.fill is None else f"{self.missing} {self.fill:g}"
        return text if self.missing is None else f"{text}, missing: {filled}"


@dataclass(frozen=True)
class Schema:
    """Columns in order, their kinds and categories, and the numbers by which samples become batches."""

    shape: tuple[int, ...]  # of the inputs of a sample in a batch
    inputs: tuple[Field, ...]  # one without a name stands for all columns of an array
    dtype: str  # of the inputs in a batch
    targets: tuple[Field, ...] = ()
    stored: str | None = None  # the type of numbers in the cache of a table
    num_outputs: int | None = None  # classes, or numbers to predict
    channels: int | None = None  # of images
    mean: tuple[float, ...] | None = None  # float64, like all below; of the samples that are trained on
    std: tuple[float, ...] | None = None
    target_mean: tuple[float, ...] | None = None
    target_std: tuple[float, ...] | None = None
    vocab_size: int | None = None
    pad_token: int | None = None
    vocabulary: Mapping[str, Any] | None = None  # of a text: the record of its tokenizer

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Schema:
        """Return the schema that `as_json` has written. Raises: RefusedError, if it is none."""
        try:
            given = _tuples(values)
            for key in ("inputs", "targets"):
                given[key] = tuple(_field(one) for one in given.get(key, ()))
            return cls(**given)
        except (TypeError, ValueError, AttributeError) as error:
            raise RefusedError(
                f"is damaged: {error}", place="the schema of the data, in the record of a run or a cache"
            ) from None

    def as_json(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, as JSON has them."""
        found = _changed(self)
        for key in ("inputs", "targets"):
            if key in found:
                found[key] = [_changed(one) for one in found[key]]
        return found

    def decided(self) -> Schema:
        """Return the schema without the numbers that depend on which samples are held out."""
        inputs = tuple(replace(one, fill=None) for one in self.inputs)
        return replace(self, inputs=inputs, mean=None, std=None, target_mean=None, target_std=None)

    @property
    def needs_statistics(self) -> bool:
        """Return whether missing values are filled with a mean or a median."""
        return any(one.missing in STATISTICS for one in self.inputs)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Return the names of the classes, if the target is a class."""
        return self.targets[0].categories if len(self.targets) == 1 else None

    @property
    def features(self) -> list[str] | None:
        """Return a name for each number of a sample; None if the columns have no names."""
        if any(one.name is None or one.kind in ("text", "image") for one in self.inputs):
            return None
        return [name for one in self.inputs for name in self._features(one)]

    def _features(self, one: Field) -> list[str]:
        is_code = one.categories is None or self.dtype == "int64"
        return [str(one.name)] if is_code else [f"{one.name}={category}" for category in one.categories or ()]

    def places(self) -> list[int]:
        """Return the place of the first number of each column of the inputs in a sample."""
        return list(accumulate((len(self._features(one)) for one in self.inputs[:-1]), initial=0))

    def in_place_of_missing(self, fills: Sequence[float | None] | None = None) -> list[float] | None:
        """Return a number in place of a missing one for each number of a sample; None if none can be missing.

        They are the fields' own, unless there are other `fills`.
        """
        known = [one.fill for one in self.inputs] if fills is None else fills
        if all(fill is None for fill in known):
            return None
        found = [0.0] * self.shape[0]
        for place, fill in zip(self.places(), known, strict=True):
            found[place] = fill or 0.0
        return found

    def facts(self) -> dict[str, Any]:
        """Return what `${facts:...}` of a configuration may refer to."""
        facts: dict[str, Any] = {"shape": list(self.shape)}
        if len(self.shape) == 1 and self.vocab_size is None:
            facts["num_features"] = self.shape[0]
        if (features := self.features) is not None:
            facts["columns"] = features
        for key in ("vocab_size", "pad_token"):
            if (value := getattr(self, key)) is not None:
                facts[key] = value
        if self.classes is not None:
            facts |= {"classes": list(self.classes), "num_classes": len(self.classes)}
        if self.num_outputs is not None:
            facts["num_outputs"] = self.num_outputs
        names = [one.name for one in self.targets]
        facts["target_columns"] = names if names and None not in names else None
        if self.mean is not None:
            facts |= {key: _listed(getattr(self, key)) for key in ("mean", "std", "target_mean", "target_std")}
        return facts

    def described(self) -> dict[str, str]:
        """Return the kinds of the inputs and of the targets as text."""
        named = {"inputs": self.inputs, "targets": self.targets}
        return {
            what: first_few([one.described() for one in columns], _LISTED, "; ")
            for what, columns in named.items()
            if columns
        }


def guesses_about(prepared: Mapping[str, Any] | None) -> list[str]:
    """Return a line for each guess about prepared data, or the sources of a mixture, that a person could doubt."""
    prepared = prepared or {}
    sources = prepared.get("sources")
    inner = sources.items() if isinstance(sources, Mapping) else ()
    return [*prepared.get("guesses", ()), *(f"{name}: {line}" for name, one in inner for line in guesses_about(one))]


def _field(values: Mapping[str, Any]) -> Field:
    return Field(**_tuples(values))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass without those that have their default."""
    pairs = ((one, getattr(value, one.name)) for one in fields(value))
    return {
        one.name: list(inner) if isinstance(inner, tuple) else inner
        for one, inner in pairs
        if one.default is MISSING or inner != one.default
    }


def _listed(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)
