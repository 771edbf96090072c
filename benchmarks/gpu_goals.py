"""What the pieces of the benchmark on GPUs find, the goals, and README's table of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suite import ROOT, Bar, Chart, Row

_KEY = "trainer.deterministic=true"
EQUAL = f"kill -9 and resume, {_KEY}"
PERCEPTRON = "steps a second, 784-128-10, batch 128"
RESNET18 = "steps a second, ResNet-18, 3 x 32 x 32, batch 512, compiled"
RESNET50 = "steps a second, ResNet-50, batch 256"
GPT = "steps a second, GPT-2 124M, compiled by block"
CIFAR10 = "time of recipe=cifar10"
CHECKPOINT = "stall of a checkpoint, 100 million parameters"
GOALS: Mapping[str, tuple[str, str, Bar | None]] = {
    EQUAL: ("weights against those of the undisturbed run", "equal", None),
    PERCEPTRON: ("against a loop by hand", "ratio at least 0.9", Bar("at least", 0.9)),
    RESNET18: ("against a loop by hand", "ratio at least 0.98", Bar("at least", 0.98)),
    RESNET50: ("against a loop by hand", "ratio at least 0.98", Bar("at least", 0.98)),
    GPT: ("against nanoGPT's loop", "ratio at least 0.98", Bar("at least", 0.98)),
    CIFAR10: ("against airbench94's loop", "ratio at most 1.1", Bar("at most", 1.1)),
    CHECKPOINT: ("time for which training stands still", "less than 100 ms", Bar("at most", 0.1)),
}
"""The beginning of a row's name: what it compares, its goal in words, and the bar."""
README = ROOT / "README.md"
_BEGIN, _END = (
    "<!-- figures of GPUs: written by python -m benchmarks gpu -->\n",
    "<!-- end of the figures of GPUs -->\n",
)


@dataclass(frozen=True)
class Outcome:
    """How a test ended: passed, failed or skipped. Units: seconds."""

    test: str
    outcome: str
    seconds: float
    text: str = ""


Finding = Row | Chart | Outcome


def bar(goal: str) -> Bar:
    """Return the bar of a goal."""
    limit = GOALS[goal][2]
    assert limit is not None
    return limit


def equal(what: str, first: Mapping[str, Any], second: Mapping[str, Any], note: str = "") -> Row:
    """Return whether two runs, given by their results, have ended with the same weights."""
    hashes = [result["weights_sha256"][:12] for result in (first, second)]
    same = first["weights_sha256"] == second["weights_sha256"]
    shown = f"{hashes[0]} in both" if same else f"{hashes[0]} against {hashes[1]}"
    return Row(what, shown, bar="equal", met=same, note=note)


def table(found: Mapping[str, Any] | None) -> str:
    """Return README's table, of what results.json has of the benchmark `gpu`."""
    rows: Sequence[Mapping[str, Any]] = found["rows"] if found else []
    lines = ["| on one GPU | | measured | goal |", "|---|---|---|---|"]
    for what, (against, goal, _) in GOALS.items():
        own = [row for row in rows if row["what"].startswith(what) and row["bar"]]
        measured = "; ".join(_measured(row, what) for row in own) or "not measured yet"
        name = what.replace(_KEY, f"`{_KEY}`")
        lines.append(f"| {name} | {against} | {measured} | {goal} |")
    where = [f"{found['date']}, {found['machine']}.", ""] if found else []
    return "\n".join([*where, *lines, ""])


def _measured(row: Mapping[str, Any], what: str) -> str:
    variant = row["what"].removeprefix(what).strip(", ")
    shown = f"{row['figures']} ({row['ratio'].partition(' ')[0]})" if row["ratio"] else row["figures"]
    missed = "" if row["met"] else ", **missed**"
    return (f"{variant}: " if variant else "") + shown + missed


def write_readme(found: Mapping[str, Any] | None, path: Path = README) -> None:
    """Put the table between its markers."""
    path.write_text(with_table(path.read_text(), table(found)))


def with_table(text: str, made: str) -> str:
    """Return a text with a table between the markers."""
    return re.sub(f"(?<={_BEGIN})(.*?)(?={_END})", lambda _: f"\n{made}\n", text, flags=re.DOTALL)
