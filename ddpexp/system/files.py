"""Write files, all texts with their secrets masked; read untrusted files within bounds; format paths for messages.

What a user or a program reads later is written here and by nothing else in ddpexp: `tests/test_writers.py` lists the
exceptions, each with its reason.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import re
import secrets
import shlex
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from ddpexp.errors import DdpexpError
from ddpexp.system.secrets import Masked, masked, masked_tree
from ddpexp.system.streams import MaskedText
from ddpexp.system.yaml_text import LOADER

JSON_BYTES = 64 << 20  # per file: everything large is in safetensors
_YAML_BYTES, _DEPTH = 4 << 20, 100
_VALUES = 50_000  # per YAML file, far more than a run's hundred keys and their lists
_DIGITS = 1000
_VALUE_CHARACTERS = 1 << 16  # per value
_INTERPOLATION_CHARACTERS = 1 << 14  # of all values with ${...} together, which are slow to parse
_TAIL_BYTES = 1 << 16
_BLOCK = 1 << 24  # bytes that are hashed at a time


class MovedError(DdpexpError):
    """The run directory was moved or removed while the run was writing to it."""


class Anchor:
    """Keep a run directory open, to notice when its path no longer leads to it."""

    def __init__(self, path: Path) -> None:
        """Open the directory. Raises OSError."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> None:
        """Check that the path still leads to the directory; temporary errors of the file system are ignored.

        Raises:
            MovedError: it leads to nothing, or to another directory.
        """
        try:
            same = os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        except OSError:
            return
        if not same:
            raise MovedError(
                f"the run directory {relative(self._path)} was moved or removed while the run was writing to "
                "it, so nothing more can be saved there. What was written before is in it",
                suggestion="Resume it where it is now.",
            )


def open_to_append(path: Path) -> MaskedText:
    """Open a file of the run for appending texts; symbolic links are not followed."""
    return MaskedText(open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644)), "utf-8")


def whole_lines(path: Path) -> int:
    """Return how many bytes of a file are complete lines: an interrupted write leaves a partial one at the end.

    Raises OSError.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _TAIL_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
    return 0


def back_up(path: Path) -> Path | None:
    """Copy a file that is about to be replaced to the first free numbered name; None where there is no file."""
    if not path.is_file():
        return None
    copy = first_free_name(path)
    write(copy, path.read_text(errors="surrogateescape"))
    return copy


def first_free_name(path: Path) -> Path:
    """Return the first numbered variant of a path that does not exist."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.stem}-{number}{path.suffix}")):
        number += 1
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def read_json(path: Path) -> Any:
    """Read an untrusted JSON file: a regular file of bounded size and depth.

    Raises: OSError, ValueError.
    """
    return parse_json(read_plain_file(path))


def read_plain_file(path: Path) -> bytes:
    """Read a regular file of bounded size.

    Raises: OSError, ValueError.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > JSON_BYTES:
            raise ValueError(f"{path.name} has {size:,} bytes, more than {JSON_BYTES:,}")
        return file.read()


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading that may be named by anybody: only a regular one, or a link to one.

    Opening a pipe would wait for its other end, reading a terminal would wait for a key, and a device may have no end.

    Raises:
        OSError: it is something else, or cannot be read.
    """
    _check_regular(os.stat(path), path)  # opening a device can change its state
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    file = open(descriptor, "rb")  # noqa: SIM115
    try:
        _check_regular(os.fstat(descriptor), path)  # another file may be there by now
    except OSError:
        file.close()
        raise
    return file


def read_regular_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file in UTF-8. Raises: OSError, UnicodeDecodeError."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
        return file.read()


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {
            stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
            stat.S_IFSOCK: "a socket",
        }  # fmt: skip
        kind = kinds.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


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
    """Return whether lists and mappings are nested at most `depth` deep; deeper trees would overflow recursive code."""
    level = [tree]
    for _ in range(depth + 1):
        if not level:
            return True
        level = [
            inner
            for node in level
            if isinstance(node, list | dict)
            for inner in (node.values() if isinstance(node, dict) else node)
        ]
    return not level


def check_yaml(path: Path) -> None:
    """Check an untrusted YAML file: of bounded size, otherwise like check_yaml_text.

    Raises: OSError, ValueError, yaml.YAMLError.
    """
    if path.stat().st_size > _YAML_BYTES or not path.is_file():
        raise ValueError(f"it is not a regular file of at most {_YAML_BYTES:,} bytes")
    check_yaml_text(path.read_text())


def check_yaml_text(text: str) -> None:
    """Check that untrusted YAML is cheap to load: of bounded depth and size, without aliases.

    Raises: ValueError, yaml.YAMLError.
    """
    depth = values = interpolations = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.ScalarEvent):
            values += 1
            interpolations += len(event.value) if "${" in event.value else 0
            if len(event.value) > _DIGITS and event.implicit[0] and re.match(r"[-+]?\d", event.value):
                raise ValueError(f"it holds a number of {len(event.value):,} digits")
            if values > _VALUES or len(event.value) > _VALUE_CHARACTERS or interpolations > _INTERPOLATION_CHARACTERS:
                raise ValueError(
                    f"it holds more than {_VALUES:,} values, one of more than {_VALUE_CHARACTERS:,} characters, or "
                    f"more than {_INTERPOLATION_CHARACTERS:,} characters with ${{...}}"
                )
        if depth > _DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(event, yaml.AliasEvent):  # a few aliases can expand to more than fits into memory
            raise ValueError("it refers to itself with *, which no run writes")


def write(path: Path, text: str) -> None:
    """Replace a file by a text with its secrets masked, like `write_data`."""
    write_data(path, masked(text).encode("utf-8", "surrogateescape"))


def write_json(path: Path, value: Mapping[str, Any], mode: int = 0o644) -> None:
    """Replace a file by JSON with secrets masked, like `write_data`."""
    write_data(path, dumps(value).encode(), mode)


def write_yaml(path: Path, value: Any) -> None:
    """Replace a file by YAML with secrets masked, like `write_data`."""
    write_data(path, yaml.safe_dump(masked_tree(value), allow_unicode=True, width=math.inf).encode())


def write_data(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file atomically: a reader sees the old content or the new one, even after a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink()
        raise


def flush(path: Path) -> None:
    """Flush a file to the disk, or the names in a folder, so that they survive a power failure. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def dumps(value: Mapping[str, Any]) -> Masked:
    """Return indented JSON with secrets masked; numbers that are not finite become null, since JSON has none."""
    return Masked(json.dumps(masked_tree(_finite(value)), indent=2, allow_nan=False) + "\n")


def json_line(value: Any) -> bytes:
    """Return a line of JSON with secrets masked."""
    return json.dumps(masked_tree(value)).encode() + b"\n"


def answer(path: Path | int, value: Any) -> None:
    """Write JSON for the process that waits for it, to a descriptor or a file in memory.

    Secrets are not masked: values such as paths must stay usable, and nobody else reads them.
    """
    with open(path, "w") as file:
        json.dump(value, file)


def sha256(text: str) -> str:
    """Return the SHA-256 of a text in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file as hexadecimal digits; None if it cannot be read."""
    try:
        return sha256_of_file(path)
    except OSError:
        return None


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a regular file in hexadecimal. Raises: OSError."""
    result = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            result.update(block)
    return result.hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_numbered_folder(path: Path) -> Path:
    """Create a folder of this name, or of the first free numbered variant, and return it."""
    for number in range(1, 10_000):
        candidate = path if number == 1 else path.with_name(f"{path.name}_{number}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            continue
    raise FileExistsError(path)


def missing_folders(folder: Path) -> list[Path]:
    """Return which of a folder and its parents do not exist yet, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of some folders, innermost first, that exist and are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def relative(path: Path) -> str:
    """Return a path relative to the current folder where it is inside it, else as it is."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def shortest(path: Path) -> str:
    """Return the shorter of the absolute path and the path relative to the current folder."""
    full = path.resolve()
    short = min(str(full), os.path.relpath(full), key=len)
    return f"./{short}" if short.startswith("-") else short


def typed(path: Path) -> str:
    """Return the shortest path, quoted for a shell."""
    return shlex.quote(shortest(path))
