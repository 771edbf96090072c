"""Texts that others had a hand in, as they may be shown and kept.

Without secrets, without control characters, not too long.
"""

from __future__ import annotations

import re

from ddpexp.system.secrets import masked

MESSAGE_BYTES = 8 << 10
TRACEBACK_BYTES = 64 << 10
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def sanitize(text: str, limit: int | None = None) -> str:
    r"""Return a text that a terminal shows as it is: line ends and tabs stay, what would steer it is written as `\x1b`.

    Secrets are masked first, for what is cut or escaped is not found any more. Units: `limit` is in bytes of UTF-8.
    """
    text = masked(text).replace("\r\n", "\n")
    if limit is None:
        return _CONTROL.sub(_escaped, text)
    first = cut(text, limit)  # fifty megabytes are not worth escaping
    shown = _CONTROL.sub(_escaped, first)
    return shown if len(shown) < len(first) + limit else cut(shown, limit)


def one_line(text: str) -> str:
    """Return a name as it may stand within a line."""
    return sanitize(text).replace("\n", "\\n").replace("\t", "\\t")


def cut(text: str, limit: int) -> str:
    """Keep the first and the last part of a text that is too long, and say how much was between. Units.

    Bytes of UTF-8.
    """
    if len(text) <= limit // 4:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) <= limit:
        return text
    half = limit // 2
    first, last = raw[:half].decode("utf-8", "ignore"), raw[-half:].decode("utf-8", "ignore")
    return f"{first}\n... {len(raw) - 2 * half:,} bytes are left out here ...\n{last}"


def message_of(error: BaseException) -> str:
    """Return what an exception says; one that cannot say it must not hide that it was raised."""
    try:
        return str(error)
    except Exception as second:
        return f"its text cannot be had: __str__ of {type(error).__name__} raised {type(second).__name__}"


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
