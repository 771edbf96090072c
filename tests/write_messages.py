"""Write tests/messages.md anew: `python -m tests.write_messages`. It lists every error that ddpexp constructs.

Read it aloud once when it changes: a sentence that needs its code to be understood is mended in the code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/messages.md"
HEAD = """# Messages

Every error that ddpexp constructs, by room and file, as its template: `python -m tests.write_messages` writes this
file, and a test holds that it is current. **Key=value**, place, reason; then the suggestion.
"""
FIELDS = ("reason", "key", "value", "suggestion", "place")


@dataclass(frozen=True)
class Message:
    """One construction of an error."""

    path: Path
    line: int
    kind: str
    fields: dict[str, str]  # templates, with the expressions in braces

    def __str__(self) -> str:
        value = f"={self.fields['value']}" if "value" in self.fields else ""
        key = f"**{self.fields['key']}{value}** " if "key" in self.fields else ""
        place = f"*{self.fields['place']}* " if "place" in self.fields else ""
        kind = "" if self.kind == "RefusedError" else f"{self.kind}: "
        suggestion = f"\n  {self.fields['suggestion']}" if "suggestion" in self.fields else ""
        return f"- {kind}{key}{place}{self.fields.get('reason', '')}{suggestion}"


def error_classes(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of the classes derived from DdpexpError."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    known = {"DdpexpError"}
    while more := {name for name, names in bases.items() if names & known} - known:
        known |= more
    return known


def messages() -> Iterator[Message]:
    """Yield every construction of an error in ddpexp, in the order of the files."""
    sources = {path: path.read_text() for path in sorted((ROOT / "ddpexp").rglob("*.py"))}
    nodes = {path: list(ast.walk(ast.parse(source))) for path, source in sources.items() if "Error" in source}
    classes = error_classes(node for those in nodes.values() for node in those)
    for path, those in nodes.items():
        for node in those:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                given = dict(zip(FIELDS[:1], node.args, strict=False))
                given |= {word.arg: word.value for word in node.keywords if word.arg in FIELDS}
                templates = {name: template(value) for name, value in given.items()}
                yield Message(path, node.lineno, node.func.id, templates)


def template(node: ast.expr) -> str:
    """Return the text of an expression, with what is not a literal in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else f"{{{node.value!r}}}"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.IfExp):
        return f"[{template(node.body)} | {template(node.orelse)}]"
    if isinstance(node, ast.BoolOp):
        return " | ".join(map(template, node.values))
    return f"{{{ast.unparse(node)}}}"


def text() -> str:
    """Return what the file should hold."""
    lines, room, file = [HEAD], None, None
    for message in messages():
        path = message.path.relative_to(ROOT / "ddpexp")
        if path.parts[0] != room:
            room = path.parts[0]
            lines.append(f"\n## {room}\n")
        if path != file:
            file = path
            lines.append(f"\n{path}\n")
        lines.append(str(message))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
