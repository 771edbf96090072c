"""Read a Dockerfile: its stages and instructions, as far as the project's own uses the format."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import ROOT


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name in capitals and the rest of its line, with continuations joined."""

    name: str
    rest: str

    def exec_form(self) -> list[str] | None:
        """Return the arguments of the JSON form; None for the shell form."""
        try:
            words = json.loads(self.rest)
        except ValueError:
            return None
        return words if isinstance(words, list) else None

    def pairs(self) -> dict[str, str]:
        """Return the assignments of ENV."""
        return dict(word.split("=", 1) for word in shlex.split(self.rest))


@dataclass
class Stage:
    """What one FROM begins."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, name: str) -> Instruction:
        """Return the instruction that counts, of those that replace one another."""
        return [one for one in self.instructions if one.name == name][-1]


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield Instruction(name.upper(), rest.strip())


def stages(text: str, arguments: Mapping[str, str]) -> tuple[list[Stage], dict[str, str]]:
    """Return the stages and the values of the arguments before them."""
    found: list[Stage] = []
    outer: dict[str, str] = {}
    for one in instructions(text):
        if one.name == "FROM":
            words = expand(one.rest, outer).split()
            found.append(Stage(words[0], words[2] if len(words) > 2 else ""))
        elif found:
            found[-1].instructions.append(one)
        else:
            assert one.name == "ARG", f"{one.name} before the first FROM"
            outer |= argument(one, arguments)
    return found, outer


def argument(one: Instruction, given: Mapping[str, str]) -> dict[str, str]:
    """Return the value of an ARG: the given one, else its default."""
    name, _, default = one.rest.partition("=")
    return {name: given.get(name, default.strip('"'))}


def expand(text: str, values: Mapping[str, str]) -> str:
    """Insert `${NAME}`."""
    return re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], text)


def context(root: Path = ROOT) -> list[Path]:
    """Return the files that .dockerignore lets into the build, relative to the root."""
    rules = [
        line for line in (root / ".dockerignore").read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    return [path for path in _walk(root, rules) if _is_kept(path, rules)]


def _walk(root: Path, rules: list[str]) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if path.is_file():
            yield path.relative_to(root)
        elif _is_kept(path.relative_to(root), rules):  # no rule lets in what lies below a folder that is left out
            yield from (one.relative_to(root) for one in sorted(path.rglob("*")) if one.is_file())


def _is_kept(path: Path, rules: list[str]) -> bool:
    """Apply the rules in order, of which the last that matches the path or a folder above it wins."""
    kept = True
    above = [str(one) for one in (path, *path.parents) if str(one) != "."]
    for rule in rules:
        pattern = rule.removeprefix("!")
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(Path(one).name, pattern[3:]) for one in above)
        else:
            matches = any(fnmatch.fnmatch(one, pattern) and one.count("/") == pattern.count("/") for one in above)
        if matches:
            kept = rule.startswith("!")
    return kept
