"""Try mutants of one file: `python -m tests.mutate ddpexp/train/loop.py 20 -- tests/train/test_loop.py`.

Each of 20 places, the same in every run with the same `--seed`, is changed in a copy of the checkout, and the tests run
there until one fails. A mutant that survives is a line that no test would miss, or one that changes nothing.

Neither mutmut nor cosmic-ray fits: both choose or swap a mutant within the process or the checkout that they run in,
and our tests start `python -m ddpexp` commands, which must see the mutant too while the working tree stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Add,
        ast.Sub),
    (ast.Mult, ast.FloorDiv), (ast.And, ast.Or),
]  # fmt: skip
SWAPS = {**dict(_PAIRS), **{other: one for one, other in _PAIRS}, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
CONSTANTS = {"True": "False", "False": "True", "0": "1", "1": "0", "None": "..."}
SKIPPED = ("annotation", "returns", "decorator_list")
LOGGING = ("debug", "info", "warning", "error", "exception")


def mutants(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what may be replaced within a node, and by which text.

    Not in annotations, raised errors or texts for people.
    """
    match node:
        case ast.Raise() | ast.JoinedStr():
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attr))) if attr in LOGGING:
            return
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield node, _changed(node, ops=[SWAPS[type(op)]()])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            yield node, _changed(node, op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant() if repr(node.value) in CONSTANTS:
            yield node, CONSTANTS[repr(node.value)]
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Assign() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.Call(keywords=[*_, _]):
            yield node, _changed(node, keywords=node.keywords[:-1])
        case ast.Call(args=[*_, _]):
            yield node, _changed(node, args=node.args[:-1])
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in SKIPPED:
                yield from mutants(child)


def _changed(node: ast.AST, **fields: object) -> str:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def replaced(source: str, node: ast.AST, text: str) -> str:
    """Return the source with a node's text replaced. Units: ast counts columns in bytes."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    return b"".join([*lines[:first], before, text.encode(), after, *lines[last + 1 :]]).decode()


def tried(folder: Path, tests: list[str], seconds: float) -> str:
    """Run the tests in the copy: killed, survived or timeout.

    Leaves no process behind, for the tests' commands are in sessions.
    """
    words = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp", *tests]
    paths = [f"{folder}/checkout", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MUTANT": str(folder)}
    mark = f"MUTANT={folder}".encode()
    try:
        command = [sys.executable, "-m", "pytest", *words]
        with open(os.devnull, "r+b") as nowhere:
            done = subprocess.run(
                command,
                cwd=folder / "checkout",
                env=environ,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                timeout=seconds,
            )
        return "killed" if done.returncode else "survived"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def main() -> int:
    """Try the mutants that the command line selects; return how many survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description="Try mutants of one file.")
    parser.add_argument("file", help="relative to the checkout")
    parser.add_argument("count", type=int)
    parser.add_argument("tests", nargs="+", help="after --: what pytest gets")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
    source = (ROOT / arguments.file).read_text()
    places = list(mutants(ast.parse(source)))
    chosen = random.Random(f"{arguments.file} {arguments.seed}").sample(places, min(arguments.count, len(places)))
    counts = {"killed": 0, "survived": 0, "timeout": 0}
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        files = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True).split(
            "\0"
        )
        for file in filter(lambda file: (ROOT / file).is_file(), files):
            (folder / "checkout" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / "checkout" / file)
        mutated = folder / "checkout" / arguments.file
        begin = time.monotonic()
        if tried(folder, arguments.tests, 1800) != "survived":
            sys.exit("the tests fail without a mutant")
        seconds = 3 * (time.monotonic() - begin) + 30
        for node, text in sorted(chosen, key=lambda one: one[0].lineno):  # type: ignore[attr-defined]
            line: int = node.lineno  # type: ignore[attr-defined]
            changed = replaced(source, node, text)
            mutated.write_text(changed)
            for cached in mutated.parent.glob(
                f"__pycache__/{mutated.stem}.*"
            ):  # two mutants of a second may have one size
                cached.unlink()
            end = tried(folder, arguments.tests, seconds)
            counts[end] += 1
            old, new = source.splitlines()[line - 1].strip(), changed.splitlines()[line - 1].strip()
            print(f"{end:8} {arguments.file}:{line}: {old} -> {new}", flush=True)
    print(f"{len(chosen)} of {len(places)} mutants: {', '.join(f'{number} {end}' for end, number in counts.items())}")
    return min(counts["survived"], 125)


if __name__ == "__main__":
    sys.exit(main())
