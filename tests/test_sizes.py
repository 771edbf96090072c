"""Files and functions stay short enough to be read in one go."""

from __future__ import annotations

import ast

import pytest

from tests.conftest import ROOT
from tests.test_layering import FILES, parsed

FILE_LINES = 400
FUNCTION_LINES = 60

# What is longer, and why. An entry that is no longer needed fails the test: remove it.
EXCEPTIONS: dict[str, str] = {}


def too_long() -> dict[str, int]:
    """Return the lines of each file (`path`) and function (`path:name`) that exceeds its limit."""
    found = {}
    for path in FILES:
        name = str(path.relative_to(ROOT))
        lines = path.read_text().count("\n")
        if lines > FILE_LINES:
            found[name] = lines
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    found[f"{name}:{node.name}"] = lines
    return found


def test_files_and_functions_are_short() -> None:
    found = too_long()
    new = {name: lines for name, lines in found.items() if name not in EXCEPTIONS}
    assert not new, f"more than {FILE_LINES} lines in a file, or {FUNCTION_LINES} in a function: cut {new}"
    assert EXCEPTIONS.keys() <= found.keys(), "these are short enough: remove them from EXCEPTIONS"


def test_the_check_sees_long_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_sizes.FUNCTION_LINES", 40)
    assert any(":" in name for name in too_long())
