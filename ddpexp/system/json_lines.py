"""Reading files of JSON lines, which are not trusted: with bounded size, and without exceptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpexp.system.files import JSON_BYTES, open_regular

_LINE_BYTES = 1 << 20


def json_lines(
    path: Path, key: str | None = None, on_damaged: Callable[[int], object] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines, with a key only those that may have it; nothing if it is unreadable.

    `on_damaged` is called with the number of each line that is no object, except a last line that is still being
    written.
    """
    name = b"" if key is None else json.dumps(key).encode()
    number = 1
    for line in raw_lines(path):
        if name in line and (record := parse_line(line)):
            yield record
        elif on_damaged is not None and name in line and line.strip() and line.endswith(b"\n"):
            on_damaged(number)
        number += line.endswith(b"\n")


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; nothing if it is unreadable."""
    size = 0
    with suppress(OSError, ValueError), open_regular(path) as file:
        while (line := file.readline(_LINE_BYTES)) and (size := size + len(line)) < JSON_BYTES:
            yield line


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line; a truncated one is empty."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
