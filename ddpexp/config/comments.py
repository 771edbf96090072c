"""What the comments of a YAML file say of the file and of its keys: the only place where keys are explained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import yaml

from ddpexp.system.yaml_text import LOADER

_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
_OF_THE_FILE = ("_target_", "kind", "defaults")  # keys that say what a file is: a comment above them is about the file


@dataclass(frozen=True)
class Comments:
    """A file's comments. In a text a line break is one that was written: of a paragraph, or of an indented example."""

    about: str  # the file itself; empty where nothing is said
    keys: Mapping[str, str]  # by the key's path in the file, such as timeout.init_seconds
    package: str | None  # of Hydra's line `# @package NAME`: where in the tree the file's keys stand


def comments_of(text: str) -> Comments:
    """Read the comments of a YAML file.

    A comment is about the key below it, or the one before it in the same line. The first comment of a file is about the
    file where a blank line follows it, or a key that says what the file is.

    Raises: yaml.YAMLError.
    """
    lines = text.splitlines()
    root = yaml.compose(text, Loader=LOADER)
    package = next((found[1] for line in lines[: _first(lines)] if (found := _PACKAGE.fullmatch(line.strip()))), None)
    keys: dict[str, str] = {}
    about = ""
    entries = list(_entries(root, ""))
    if not entries and (blocks := _blocks(lines[: _first(lines)])):
        about = _joined(blocks[0])
    for number, (path, key, value) in enumerate(entries):
        above = _above(lines, key.start_mark.line, key.start_mark.column)
        behind = _behind(lines, value)
        if number == 0:
            blocks = _blocks(lines[: key.start_mark.line])
            if blocks and (path in _OF_THE_FILE or len(blocks) > 1 or not above):
                about = _joined(blocks[0])
                above = above if len(blocks) > 1 else []
        content = "\n".join(filter(None, (_joined(above), behind)))
        if content:
            keys[path] = content
    return Comments(about, keys, package)


def _first(lines: Sequence[str]) -> int:
    """Return the number of the first line that is neither blank nor a comment."""
    return next(
        (number for number, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines)
    )


def _entries(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.ScalarNode, yaml.Node]]:
    """Yield the path, the key and the value of everything in a mapping, in the file's order."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            path = f"{prefix}{key.value}"
            yield path, key, value
            yield from _entries(value, f"{path}.")


def _above(lines: Sequence[str], number: int, column: int) -> list[str]:
    """Return the comment directly above the key that begins a line, at the same indentation."""
    if lines[number][:column].strip():
        return []  # within {a: 1, b: 2}: what stands above is about the first
    first = number
    while (
        first and lines[first - 1].startswith(f"{' ' * column}#") and not _PACKAGE.fullmatch(lines[first - 1].strip())
    ):
        first -= 1
    return [line.strip() for line in lines[first:number]]


def _behind(lines: Sequence[str], value: yaml.Node) -> str:
    """Return the comment in the line in which a value ends."""
    if isinstance(value, yaml.ScalarNode):
        in_line = value.style not in ("|", ">")
    else:
        in_line = isinstance(value, yaml.CollectionNode) and bool(value.flow_style)
    if not in_line:
        return ""
    end = value.end_mark
    rest = lines[end.line][end.column :] if end.line < len(lines) else ""
    found = re.match(r"\s+#+\s*(.+)", rest)
    return found[1].strip() if found else ""


def _blocks(lines: Sequence[str]) -> list[list[str]]:
    """Return the comments above a file's first key, parted where there are blank lines."""
    blocks: list[list[str]] = [[]]
    for line in map(str.strip, lines):
        if not line:
            blocks.append([])
        elif not _PACKAGE.fullmatch(line):
            blocks[-1].append(line)
    return [block for block in blocks if block]


def _joined(comment: Sequence[str]) -> str:
    """Return the text of comment lines: wrapped ones joined, paragraphs and what is indented apart."""
    text = ""
    for line in comment:
        content = line.lstrip("#").rstrip()
        content = content[1:] if content.startswith(" ") else content
        previous = text.rpartition("\n")[2]
        if not text:
            text = content
        elif any(not line or line.startswith("   ") for line in (previous, content)):
            text = f"{text}\n{content}"
        else:
            text = f"{text} {content}"
    return text.strip("\n")
