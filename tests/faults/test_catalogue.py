"""Every fault and threat of the catalogue has a test that puts it into a real run, and a line.

That says what users see.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.conftest import ROOT

CATALOGUE = [
    *map(str, [*range(1, 29), *range(31, 36), *range(54, 69), 70, 71, 72, 73, 74, 75]),
    *(f"S{number}" for number in (1, 4, 5, 6, 7, 9, 10, 11, 16, 17, 18, 19, 20)),
]


def marked() -> dict[str, set[str]]:
    """Return the files of the tests that are marked with each number."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "mark.fault" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                for argument in node.args:
                    found.setdefault(str(ast.literal_eval(argument)), set()).add(path.name)
    return found


def test_every_fault_has_a_test() -> None:
    found = marked()
    assert set(CATALOGUE) == set(found)


def test_every_fault_stands_in_the_documentation() -> None:
    rows = re.findall(r"^\| ([S\d, ]+?) \|", Path(ROOT / "docs/reliability.md").read_text(), re.MULTILINE)
    named = [number for row in rows for number in row.split(", ")]
    assert sorted(named) == sorted(CATALOGUE)
