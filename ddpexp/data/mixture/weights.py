"""The weights of the sources of a mixture, and their schedule. Free of torch and numpy, for the configuration."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpexp.errors import RefusedError

_LONGEST = 1 << 20  # of a cycle: its table takes about 10 MB
_SHORTEST = 10_000  # weights with four digits are exact
_VISITS = 200  # of the rarest source in a cycle, so that its share is right within 0.25 %, where the length allows it


@dataclass(frozen=True)
class Stage:
    """The weights from one step on, in the order of the sources."""

    step: int
    weights: tuple[float, ...]


def check_mixture(sources: Mapping[str, Any], source_weights: Any = None) -> None:
    """Check the keys of `data=mixture` with each other.

    Raises:
        RefusedError: there are no sources, or the weights do not fit them.
    """
    if not sources:
        raise RefusedError(
            "A mixture needs sources, each a data option under a name of its own, such as "
            "+data@data.sources.digits=mnist, or in a recipe: docs/data.md",
            key="data.sources",
            value="{}",
        )
    stages(source_weights, list(sources))


def stages(weights: Mapping[Any, Any] | None, names: Sequence[str]) -> list[Stage]:
    """Return the schedule that `data.source_weights` describes; none if the sizes of the sources decide.

    Raises:
        RefusedError: the weights do not fit the sources, or are no weights.
    """
    if weights is None:
        return []
    if not isinstance(weights, Mapping) or not weights:
        raise RefusedError(
            "is not a mapping",
            key="data.source_weights",
            value=weights,
            suggestion=f"Give each source a weight, such as data.source_weights={{{names[0]}: 0.7, {names[-1]}: 0.3}}.",
        )
    if not all(isinstance(value, Mapping) for value in weights.values()):
        return [Stage(0, _checked(weights, names, "data.source_weights"))]
    weights = {int(key) if str(key).isdecimal() else key: value for key, value in weights.items()}  # JSON's are texts
    for step in weights:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RefusedError(
                f"has the key {step!r}, where the number of a step belongs, such as 1000", key="data.source_weights"
            )
    if 0 not in weights:
        raise RefusedError(
            f"begins at step {min(weights)}, and no step before has any",
            key="data.source_weights",
            suggestion="Add weights from step 0.",
        )
    return [Stage(step, _checked(weights[step], names, f"data.source_weights.{step}")) for step in sorted(weights)]


def _checked(weights: Mapping[Any, Any], names: Sequence[str], key: str) -> tuple[float, ...]:
    listed = ", ".join(names)
    for name in weights:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            raise RefusedError(
                "does not name a source of data.sources",
                key=f"{key}.{name}",
                suggestion=f"Did you mean {near[0]}?" if near else f"The sources are {listed}.",
            )
    for name in names:
        if name not in weights:
            raise RefusedError(
                f"has no weight for the source {name}", key=key, suggestion=f"Give a weight to each of {listed}."
            )
        value = weights[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise RefusedError(key=f"{key}.{name}", value=value, suggestion="Use 0 or more.")
    values = tuple(float(weights[name]) for name in names)
    total = sum(values)
    if not total:
        raise RefusedError("All weights are 0, so there is nothing to train on", key=key)
    for name, value in zip(names, values, strict=True):
        if 0 < value / total * _LONGEST < 1:
            raise RefusedError(
                f"is less than a millionth of the total weight ({total:g})",
                key=f"{key}.{name}",
                value=value,
                suggestion="Use a larger weight, or 0.",
            )
    return values


def quotas(weights: Sequence[float]) -> list[int]:
    """Return how many samples of each source a cycle has: those with a weight at least one.

    The length of a cycle is a multiple of 10,000 unless a source is very rare.
    """
    total = sum(weights)
    rarest = min(weight for weight in weights if weight) / total
    length = min(_LONGEST, _SHORTEST * math.ceil(_VISITS / (rarest * _SHORTEST)))
    exact = [weight / total * length for weight in weights]
    counts = [max(int(share), 1 if share else 0) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_rest[: max(0, length - sum(counts))]:
        counts[number] += 1
    return counts
