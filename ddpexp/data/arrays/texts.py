"""Numbers, dates and names in the texts of a table: which texts are which, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.errors import RefusedError

# Python's float reads more: digits of other scripts, underscores, names such as infinity.
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# As programs write numbers. Codes such as 007 or 1e1 are numbers only where a column is declared to hold numbers.
PLAIN = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d*)?([eE][+-]\d+)?|[+-]?(0|[1-9]\d*)?\.\d+([eE][+-]?\d+)?", re.ASCII)
WHOLE = re.compile(r"0|[1-9]\d*", re.ASCII)
_WHOLE_OR_NEGATIVE = re.compile(r"[+-]?(0|[1-9]\d*)", re.ASCII)
_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?", re.ASCII)
_ZERO_FIRST = re.compile(r"(?:^|,)[+-]?0\d", re.ASCII)

_NUMBER_BYTES = b"0123456789.+-eE"
_WHOLE_BYTES = b"0123456789+-"
_NO_NAME = frozenset({"", "n/a", "#n/a", "nan", "-nan", "null", "<na>"})  # in lower case; what libraries write
_NO_NUMBER = _NO_NAME | {"na", "none", "nil", "?", "-"}
_MICROSECONDS = 86_400e6  # of a day
_LOST = 2.0**-10  # of a standard deviation: rounding to float32 that changes a column


def is_missing(text: str, among_numbers: bool) -> bool:
    """Return whether a text stands for a missing value; more texts do among numbers than among names."""
    return text.lower() in (_NO_NUMBER if among_numbers else _NO_NAME)


def is_whole(text: str) -> bool:
    """Return whether a text is a whole number as programs write it, with or without a sign."""
    return _WHOLE_OR_NEGATIVE.fullmatch(text) is not None


def has_leading_zeros(texts: Sequence[str]) -> bool:
    """Return whether one of the texts of numbers begins with a zero that a number does not need."""
    joined = ",".join(texts)
    return "." not in joined and ("0" in joined) and _ZERO_FIRST.search(joined) is not None


def numbers_of(texts: Sequence[str], whole: bool = False) -> NDArray[Any] | None:
    """Return decimal numbers as float64, or as int64 if they shall be `whole`; None if a text is something else."""
    joined = "".join(texts)
    if not joined.isascii() or joined.encode().translate(None, _WHOLE_BYTES if whole else _NUMBER_BYTES):
        return None
    try:
        if whole:
            return np.fromiter(map(int, texts), np.int64, len(texts))
        return np.fromiter(map(float, texts), np.float64, len(texts))
    except (ValueError, OverflowError):  # +-, or 1e5 among other places
        return None


def numbers_or_missing(texts: Sequence[str]) -> tuple[NDArray[np.float64], int | None]:
    """Return numbers, NaN for those that are missing, and the place of the first text that is neither."""
    found = np.full(len(texts), np.nan)
    for place, text in enumerate(texts):
        if NUMBER.fullmatch(text):
            found[place] = float(text)
        elif not is_missing(text, among_numbers=True):
            return found, place
    return found, None


def days_of(values: Sequence[str] | NDArray[Any]) -> tuple[NDArray[np.float64], int | None]:
    """Return dates as days since 1970-01-01, NaN for those that are missing; the place of the first that is neither."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "M":
        found = values.astype("datetime64[us]").astype(np.float64) / _MICROSECONDS
        found[np.isnat(values)] = np.nan
        return found, None
    found = np.full(len(values), np.nan)
    for place, value in enumerate(values):
        text = str(value).strip()
        if is_missing(text, among_numbers=True):
            continue
        try:
            moment = np.datetime64(text, "us") if _DATE.fullmatch(text) else None
        except ValueError:  # the 31st of February
            moment = None
        if moment is None:
            return found, place
        found[place] = moment.astype(np.int64) / _MICROSECONDS
    return found, None


def dates(values: Sequence[str] | NDArray[Any], where: str, row: int) -> NDArray[np.float64]:
    """Return dates as days since 1970-01-01; the first stands in `row`. Raises: RefusedError, if one is missing."""
    found, wrong = days_of(values)
    wrong = wrong if wrong is not None else next(iter(np.flatnonzero(np.isnan(found)).tolist()), None)
    if wrong is not None:
        raise not_a_date(where, values[wrong], row + wrong)
    return found


def loses_digits(values: NDArray[Any]) -> bool:
    """Return whether float32 changes numbers by a part of their standard deviation that a model could see."""
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    if not len(known):
        return False
    most, spread = float(np.abs(known).max()), float(known.std())
    if spread == 0 or most * 2.0**-24 <= _LOST * spread:
        return False
    return bool(np.abs(known - known.astype(np.float32).astype(np.float64)).max() > _LOST * spread)


def spoken(value: Any) -> str:
    """Return what a place holds, for a message."""
    text = str(value)
    if not text:
        return "is empty"
    if value != value:
        return "has no value"
    return f"holds {text!r}" if isinstance(value, str) else f"holds {value}"


def is_decimal_comma(text: str) -> bool:
    """Return whether a text is a number with a comma in place of the point."""
    return _COMMA.fullmatch(text) is not None


def not_a_number(where: str, value: Any, row: int, fill: str = "", use: str = "") -> RefusedError:
    """Return the error for a value among numbers.

    `row` is counted from 1; `fill` is the key that fills missing values, and `use` another way out.
    """
    holds = f"{spoken(value)} in row {row:,}"
    if is_missing(str(value), among_numbers=True):
        return RefusedError(
            f"{holds}, where a number is needed",
            suggestion=f"Leave the row out, or put a number there{fill or use}.",
            place=where,
        )
    if is_decimal_comma(str(value)):
        point = str(value).replace(",", ".")
        return RefusedError(f"{holds}, with a decimal comma", suggestion=f"Write {point}{use}.", place=where)
    return RefusedError(f"{holds}, which is not a number", suggestion=f"Correct it{use}.", place=where)


def not_a_date(where: str, value: Any, row: int) -> RefusedError:
    """Return the error for a value among dates."""
    return RefusedError(
        f"{spoken(value)} in row {row:,}, which is not a date",
        suggestion="Write 2026-01-31 or 2026-01-31 12:30:00.",
        place=where,
    )
