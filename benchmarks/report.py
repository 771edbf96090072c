"""Write what was measured: `results.json` with every round, `RESULTS.md` with the tables.

A picture of each benchmark.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.suite import Report, Row

FOLDER = Path(__file__).resolve().parent
_WORSE = 1.2
_HEAD = """\
# Results

Made by `python -m benchmarks` ([how](../docs/benchmarks.md)). The programs of a benchmark run in turn, round by round. Figures are
medians; a ratio is the median of the rounds' own ratios, with its quartiles: *ddpexp divided by the other program* unless the line
says "times faster". A/A is ddpexp divided by ddpexp in the same rounds: what the machine's noise alone does. A bar that is missed
stays here, with the reason.
"""


def write(name: str, title: str, found: Report, on: str | None = None, date: str | None = None) -> None:
    """Keep a benchmark's findings beside those of the others, and draw all anew.

    `on` and `date`: where and when, if not here and now.
    """
    path = FOLDER / "results.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept[name] = {
        "title": title,
        "machine": on or machine(),
        "date": date or time.strftime("%Y-%m-%d"),
        **asdict(found),
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
    render(kept)


def show(title: str, found: Report, seconds: float) -> None:
    """Print a benchmark's rows."""
    print(f"\n{title} ({seconds:.0f} s)")
    for row in found.rows:
        met = {True: "met", False: "MISSED", None: ""}[row.met]
        rest = [row.ratio, row.again and f"A/A {row.again}", row.bar and f"bar {row.bar}", met, row.note]
        print(f"  {row.what}: {row.figures}" + "".join(f"; {part}" for part in rest if part))


def regressions(name: str, found: Report) -> list[str]:
    """Return the rows that miss a bar which was met when it was recorded, or miss it by a fifth more than then."""
    path = FOLDER / "results.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    recorded = {row["what"]: row for row in kept.get(name, {}).get("rows", [])}
    return [row.what for row in found.rows if row.met is False and not _was_as_bad(row, recorded.get(row.what, {}))]


def _was_as_bad(row: Row, recorded: Mapping[str, Any]) -> bool:
    if recorded.get("met") is not False:
        return False
    then = recorded.get("value")
    if row.value is None or then is None:
        return True
    return bool(max(row.value / then, then / row.value) <= _WORSE or (row.value > then) == row.bar.startswith("≥"))


def render(kept: Mapping[str, Any]) -> None:
    """Make the tables and the pictures from what is kept."""
    lines = [_HEAD]
    for name, one in kept.items():
        lines += [f"## {one['title']}", "", f"`python -m benchmarks {name}`, {one['date']}: {one['machine']}", ""]
        lines += ["| | figures | ratio | A/A | bar | |", "|---|---|---|---|---|---|"]
        for row in one["rows"]:
            met = {True: "met", False: "**missed**", None: ""}[row["met"]]
            note = f"{met}: {row['note']}" if met and row["note"] else met or row["note"]
            lines.append(
                f"| {row['what']} | {row['figures']} | {row['ratio']} | {row['again']} | {row['bar']} | {note} |"
            )
        lines.append("")
        if one["charts"]:
            _draw(one["charts"], one["title"], FOLDER / "plots" / f"{name}.png")
            lines += [f"![{one['title']}](plots/{name}.png)", ""]
    (FOLDER / "RESULTS.md").write_text("\n".join(lines))


def machine() -> str:
    """Return what this machine is."""
    try:
        model = next(
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        )
    except (OSError, StopIteration):
        model = platform.machine()
    gpus = ""
    if Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi"):
        gpus = gpus_of(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout)
    return (
        f"{os.cpu_count()} cores of {model}{gpus}, Python {platform.python_version()}, torch "
        f"{metadata.version('torch')}"
    )


def gpus_of(text: str) -> str:
    """Return the GPUs in the output of `nvidia-smi -L`, each kind with its number; empty without one."""
    names = re.findall(r"^GPU \d+: (.+) \(UUID: ", text, re.MULTILINE)
    return "".join(f", {names.count(name)} x {name}" for name in dict.fromkeys(names))


def _draw(charts: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [
        0.8 + (2.6 if chart["x"] else 0.3 * sum(len(arms) + 1 for arms in chart["groups"].values())) for chart in charts
    ]
    figure, axes = pyplot.subplots(
        len(charts), 1, figsize=(8, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    figure.suptitle(title, x=0.01, ha="left")
    for chart, [axis] in zip(charts, axes, strict=True):
        (_lines if chart["x"] else _bars)(axis, chart)
        axis.set_title(chart["title"], fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _bars(axis: Any, chart: Mapping[str, Any]) -> None:
    place, places, labels = 0.0, [], []
    for group, arms in chart["groups"].items():
        for arm, values in arms.items():
            middle = statistics.median(values)
            low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [middle] * 3
            spread = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
            color = "#1f77b4" if arm.startswith("ddpexp") else "#909090"
            if chart["log"]:  # a bar has no beginning there
                axis.errorbar(middle, place, xerr=spread, fmt="o", color=color, capsize=2)
            else:
                axis.barh(place, middle, 0.8, xerr=spread, color=color, capsize=2)
            number = f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}"
            axis.annotate(f" {number}", (max(high, middle), place), va="center", fontsize=7)
            places.append(place)
            labels.append(f"{arm}, {group}" if group else arm)
            place -= 1
        place -= 0.6
    axis.set_yticks(places, labels)
    axis.set_xlabel(chart["unit"], fontsize=8)
    if chart["log"]:
        axis.set_xscale("log")


def _lines(axis: Any, chart: Mapping[str, Any]) -> None:
    for arm, points in chart["groups"].items():
        numbers = sorted(points, key=float)
        middles = [statistics.median(points[number]) for number in numbers]
        axis.plot([float(number) for number in numbers], middles, marker="o", markersize=3, label=arm)
    axis.set_xlabel(chart["x"], fontsize=8)
    axis.set_ylabel(chart["unit"], fontsize=8)
    axis.legend(fontsize=7)
    axis.set_xscale("log")
    if chart["log"]:
        axis.set_yscale("log")
