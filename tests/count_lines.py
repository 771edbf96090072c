"""Count lines of code by room, without docstrings and comments: `python -m tests.count_lines [COMMIT ...]`."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping

from tests.conftest import ROOT

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Return the number of lines that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def by_room(commit: str) -> Mapping[str, int]:
    """Return the lines of code of each room of ddpexp at a commit."""
    rooms: Counter[str] = Counter()
    for path in git("ls-tree", "-r", "--name-only", commit, "ddpexp").split():
        if path.endswith(".py"):
            rooms[path.split("/")[1] if path.count("/") > 1 else "(top)"] += code_lines(git("show", f"{commit}:{path}"))
    return rooms


def main() -> None:
    commits = sys.argv[1:] or ["HEAD"]
    counted = [by_room(commit) for commit in commits]
    print(f"{'room':<14}{''.join(f'{commit[:10]:>12}' for commit in commits)}")
    for room in sorted(set().union(*counted)):
        print(f"{room:<14}{''.join(f'{rooms.get(room, 0):>12,}' for rooms in counted)}")
    print(f"{'all':<14}{''.join(f'{sum(rooms.values()):>12,}' for rooms in counted)}")


if __name__ == "__main__":
    main()
