"""Sanitize untrusted text for display and storage: mask secrets, escape control characters, limit the length."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpexp.system.secrets import masked

MESSAGE_BYTES = 8 << 10
TRACEBACK_BYTES = 64 << 10
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_NO_COLOUR = ("\x1b[m", "\x1b[0m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def sanitize(text: str, limit: int | None = None) -> str:
    r"""Return a text that is safe to print: newlines and tabs stay, control characters are written as `\x1b`.

    Secrets are masked first, since a secret that is cut or escaped is no longer found. Units: `limit` is in bytes of
    UTF-8.
    """
    text = masked(text).replace("\r\n", "\n")
    if limit is None:
        return _CONTROL.sub(_escaped, text)
    first = cut(text, limit)  # before escaping, which would be slow for fifty megabytes
    shown = _CONTROL.sub(_escaped, first)
    return shown if len(shown) < len(first) + limit else cut(shown, limit)


def line_of_output(line: str) -> str:
    r"""Return a line that a program has printed as a terminal ends up showing it, safe to print.

    Text that a carriage return has overwritten, as progress bars do, is left out. Colours stay, and end with the line.
    Other control characters, which could move the cursor or clear the screen, are written as `\x1b`.
    """
    last = next((part for part in reversed(line.split("\r")) if part), "")
    texts, colours = _COLOUR.split(last), _COLOUR.findall(last)
    shown = "".join(colour + _CONTROL.sub(_escaped, text) for colour, text in zip(["", *colours], texts, strict=True))
    return f"{shown}\x1b[m" if colours and colours[-1] not in _NO_COLOUR else shown


def is_utf8(text: str) -> bool:
    """Return whether a text can be written to a file: a name of other bytes, which Linux allows, cannot."""
    return _SURROGATE.search(text) is None


def is_number(text: str) -> bool:
    """Return whether Python reads a text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def one_line(text: str) -> str:
    """Return a name that can be printed within a line: newlines and tabs are escaped too."""
    return sanitize(text).replace("\n", "\\n").replace("\t", "\\t")


def cut(text: str, limit: int) -> str:
    """Keep the beginning and the end of a text that is too long, and note how much was left out. Units: UTF-8 bytes."""
    if len(text) <= limit // 4:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) <= limit:
        return text
    half = limit // 2
    first, last = raw[:half].decode("utf-8", "ignore"), raw[-half:].decode("utf-8", "ignore")
    return f"{first}\n... {len(raw) - 2 * half:,} bytes are left out here ...\n{last}"


def first_few(values: Sequence[object], most: int = 5, separator: str = ", ") -> str:
    """Return values as text, at most `most` of them, such as `a, b and 3 more`."""
    text = separator.join(str(value) for value in values[:most])
    left_out = len(values) - most
    return text if left_out <= 0 else f"{text}{' ' if separator == ', ' else separator}and {left_out:,} more"


def counted(number: int, thing: str) -> str:
    """Return a number with its unit, such as `1 step` or `1,024 steps`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def size_text(num_bytes: float, digits: int = 3) -> str:
    """Return a number of bytes as text. Units: kB is 1,000 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            exact = f"{num_bytes / size:,.{digits}g}"
            return f"{exact if 'e' not in exact else f'{num_bytes / size:,.0f}'} {unit}"
    return f"{num_bytes:,.0f} bytes"


def distinct_size_texts(first: int, second: int) -> tuple[str, str]:
    """Return two numbers of bytes as texts, with enough digits to see which is larger."""
    digits = next((digits for digits in range(3, 16) if size_text(first, digits) != size_text(second, digits)), 3)
    return size_text(first, digits), size_text(second, digits)


def binary_size_text(num_bytes: int) -> str:
    """Return a number of bytes as text. Units: KiB is 1,024 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:,} bytes"


def duration(seconds: float | None) -> str:
    """Format a duration."""
    if seconds is None or not 0 <= seconds < 1e9:
        return ""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def flops_text(flops: float) -> str:
    """Return a number of floating-point operations as text. Units: M is 10^6."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= 0.9995 * size:  # 999,999 is 1 M
            return f"{flops / size:.3g} {unit}"
    return f"{flops:.0f}"


def metric_text(name: str, value: float | None) -> str:
    """Return the value of a metric as text: accuracies and MFU in percent. JSON has no number that is not finite."""
    if value is None:
        return "not finite"
    if name.endswith("_per_second") and abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2%}" if "accuracy" in name or name.endswith("mfu") else f"{value:.4g}"


def message_of(error: BaseException) -> str:
    """Return an exception's text; an exception whose `__str__` raises must not hide that it was raised."""
    try:
        return str(error)
    except Exception as second:
        return f"its text is not available: __str__ of {type(error).__name__} raised {type(second).__name__}"


def _escaped(character: re.Match[str]) -> str:
    number = ord(character[0])
    if 0xDC80 <= number <= 0xDCFF:  # Python's for a byte that is not UTF-8
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
