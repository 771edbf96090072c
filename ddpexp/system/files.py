"""Files that are replaced as a whole, read within bounds, and shown by the shortest path."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from ddpexp.errors import DdpexpError
from ddpexp.system.secrets import masked_tree

JSON_BYTES = 64 << 20  # of one file: everything large is in safetensors


_YAML_BYTES, _DEPTH = 4 << 20, 100


_VALUES = 50_000  # of one YAML file, which a run's hundred keys and their lists do not reach


_DIGITS = 1000


_VALUE_CHARACTERS, _INTERPOLATION_CHARACTERS = (
    1 << 16,
    1 << 14,
)  # of one value; of all that hold ${...}, which are slow to parse


_TAIL_BYTES = 1 << 16


class MovedError(DdpexpError):
    """The run directory was moved or removed while the run was writing to it."""


class Anchor:
    """Holds a run directory open, to notice that its path leads to it no more."""

    def __init__(self, path: Path) -> None:
        """Open the directory. Raises OSError."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> None:
        """See that the path still leads to the directory; a file system that cannot tell for a moment passes.

        Raises:
            MovedError: it leads to nothing, or to another one.
        """
        try:
            same = os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        except OSError:
            return
        if not same:
            raise MovedError(
                f"the run directory {relative(self._path)} was moved or removed while the run was writing to it, so "
                "nothing more "
                f"can be saved there. What was written before is in it: resume it where it is now."
            )


def open_to_append(path: Path) -> TextIO:
    """Open a file of the run's to write at its end; a link is not followed."""
    return open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644))


def whole_lines(path: Path) -> int:
    """Return how many bytes of a file are whole lines: a write that was cut short leaves a torn one at the end.

    Raises OSError.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _TAIL_BYTES)
            file.seek(begin)
            place = file.read(end - begin).rfind(b"\n")
            if place >= 0:
                return begin + place + 1
            end = begin
    return 0


def keep(path: Path) -> Path | None:
    """Keep a copy of a file that is about to be replaced, under the first free number; None where there is no file."""
    if not path.is_file():
        return None
    copy = first_free_name(path)
    write(copy, path.read_text())
    return copy


def first_free_name(path: Path) -> Path:
    """Return the first name with a number behind it that nothing has."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.stem}-{number}{path.suffix}")):
        number += 1
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def read_json(path: Path) -> Any:
    """Read a JSON file that anybody may have made: a plain file of bounded size and depth.

    Raises: OSError, ValueError.
    """
    return parse_json(read_plain_file(path))


def read_plain_file(path: Path) -> bytes:
    """Read a plain file of bounded size.

    Raises: OSError, ValueError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would keep this waiting
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        if found.st_size > JSON_BYTES:
            raise ValueError(f"{path.name} has {found.st_size:,} bytes, more than {JSON_BYTES:,}")
        return file.read()


def parse_json(raw: bytes) -> Any:
    """Parse JSON of bounded depth.

    Raises: ValueError.
    """
    try:
        tree = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not is_shallow(tree, _DEPTH):
        raise ValueError("it is nested too deeply")
    return tree


def is_shallow(tree: Any, depth: int) -> bool:
    """Tell whether lists and mappings are nested so deep at most; what walks a tree calls itself, which has a limit."""
    level = [tree]
    for _ in range(depth + 1):
        if not level:
            return True
        level = [
            inner
            for one in level
            if isinstance(one, list | dict)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return not level


def check_yaml(path: Path) -> None:
    """See that a run's YAML file, which anybody may have made, can be read: of bounded size, see check_yaml_text.

    Raises: OSError, ValueError, yaml.YAMLError.
    """
    if path.stat().st_size > _YAML_BYTES or not path.is_file():
        raise ValueError(f"it is no plain file of {_YAML_BYTES:,} bytes at most")
    check_yaml_text(path.read_text())


def check_yaml_text(text: str) -> None:
    """See that YAML, which anybody may have written, can be read soon: of bounded depth and length, nothing said twice.

    Raises: ValueError, yaml.YAMLError.
    """
    depth = values = interpolations = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.ScalarEvent):
            values += 1
            interpolations += len(event.value) if "${" in event.value else 0
            if len(event.value) > _DIGITS and event.implicit[0] and re.match(r"[-+]?\d", event.value):
                raise ValueError(f"it holds a number of {len(event.value):,} digits")
            if values > _VALUES or len(event.value) > _VALUE_CHARACTERS or interpolations > _INTERPOLATION_CHARACTERS:
                raise ValueError(
                    f"it holds more than {_VALUES:,} values, one of more than {_VALUE_CHARACTERS:,} characters, or "
                    "more than "
                    f"{_INTERPOLATION_CHARACTERS:,} characters with ${{...}}"
                )
        if depth > _DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(event, yaml.AliasEvent):  # a few of them can stand for more than there is memory
            raise ValueError("it refers to itself with *, which no run writes")


def write(path: Path, text: str | bytes) -> None:
    """Replace a file as a whole: a reader sees the old text or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink()
        raise


def dumps(value: Mapping[str, Any]) -> str:
    """Format JSON for people, secrets masked; numbers that are not finite become null, for JSON has none."""
    return json.dumps(masked_tree(_finite(value)), indent=2, allow_nan=False) + "\n"


def sha256(text: str) -> str:
    """Hash a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def first_free(path: Path) -> Path:
    """Make a folder of this name, or of the first free one with a number behind it."""
    for number in range(1, 10_000):
        candidate = path if number == 1 else path.with_name(f"{path.name}_{number}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            continue
    raise FileExistsError(path)


def relative(path: Path) -> str:
    """Show a path as short as it can be typed from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def shortest(path: Path) -> str:
    """Return a path as short as it can be typed from here, from this folder or from the root."""
    full = path.resolve()
    short = min(str(full), os.path.relpath(full), key=len)
    return f"./{short}" if short.startswith("-") else short


def typed(path: Path) -> str:
    """Return the shortest path as it is typed in a shell."""
    return shlex.quote(shortest(path))
