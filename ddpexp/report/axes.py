"""The parallel coordinates of a sweep: an axis for each value that differs, and one for what runs are compared by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddpexp.sweep.encoding import is_geometric, numbers, ordered
from ddpexp.sweep.record import is_finite
from ddpexp.sweep.rows import Row
from ddpexp.sweep.table import shown

_AXES = 10
_TICKS = 12


def axes(
    rows: Sequence[Row], keys: Sequence[str], objective: tuple[str, Sequence[float | None]]
) -> list[dict[str, Any]]:
    """Return the axes, each with the place of every run from 0 to 1 and its ticks; nothing for fewer than three runs.

    Numbers that are spread by factors are on a logarithmic axis, other texts are in the order in which they appear.
    """
    name, values = objective
    if len(rows) < 3 or not keys or not any(map(is_finite, values)):
        return []
    found = [_of_texts(key, [row.values.get(key, "") for row in rows]) for key in keys[:_AXES]]
    return [*found, _of_numbers(name, values, [shown(name, value) for value in values])]


def _of_texts(key: str, texts: Sequence[str]) -> dict[str, Any]:
    distinct = ordered(texts)
    if len(numbers(distinct)) == len(distinct) > 2:
        return _of_numbers(key, [float(text) for text in texts], texts)
    places = {text: number / max(1, len(distinct) - 1) for number, text in enumerate(distinct)}
    return {
        "name": key,
        "places": [places[text] for text in texts],
        "texts": [text or "-" for text in texts],
        "ticks": [[at, text or "-"] for text, at in places.items()],
    }


def _of_numbers(key: str, values: Sequence[float | None], texts: Sequence[str]) -> dict[str, Any]:
    """Lay out numbers; those that are not finite have no place."""
    text_of = {value: text for value, text in zip(values, texts, strict=True) if is_finite(value)}
    finite = sorted(text_of)
    scale = math.log if is_geometric(finite) else float
    low, high = scale(finite[0]), scale(finite[-1])
    places = {value: (scale(value) - low) / (high - low) if high > low else 0.5 for value in finite}
    ticks = [finite[-1]]
    for value in finite:  # the least one after the greatest
        if all(abs(places[value] - places[other]) >= 1 / _TICKS for other in ticks):
            ticks.append(value)
    return {
        "name": key,
        "places": [places.get(value) if value is not None else None for value in values],
        "texts": [text or "-" for text in texts],
        "ticks": [[places[value], text_of[value]] for value in ticks],
    }
