"""What metrics.jsonl of any run has for a page: thinned curves, and what was measured of its steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ddpexp.report.thinned import Curve, spaced
from ddpexp.settings.metrics import MEASURED, TIMES
from ddpexp.sweep.files import count_of, number_of
from ddpexp.system.json_lines import parse_line, raw_lines
from ddpexp.train.verdict import measures_of

_CURVES = 100  # of a run
_EPOCHS = 32  # points
_LEAST_POINTS = 16  # of a curve
_MOST_POINTS = 2000
_TIMES = 120  # records whose measures are read, of those with an evaluation or a checkpoint, and as many of the others
_NAMES = tuple(f'"{prefix}'.encode() for prefix in MEASURED)
SPREADS = ("_least", "_greatest")
"""How the names of measures end that are in no chart: their median is."""
_BLOCK = 500  # records that are parsed together
_NO_EVALUATION, _NO_CHECKPOINT, _NO_CHECKPOINT_LAST = (
    f'"{TIMES}{end}'.encode() for end in ('evaluation": 0.0,', 'checkpoint": 0.0,', 'checkpoint": 0.0}')
)


@dataclass(frozen=True)
class MeasuredSteps:
    """The steps up to a record, and what was measured of them."""

    last: int
    weight: float  # of how many steps: those that it has itself, and those of the records that it stands for
    measures: Mapping[str, float]


@dataclass(frozen=True)
class Records:
    """What a run has recorded."""

    curves: Mapping[str, Curve] = field(default_factory=dict)  # by metric
    epochs: Sequence[tuple[int, float]] = ()
    measured: Sequence[MeasuredSteps] = ()
    more: int = 0  # metrics that are left out


def read_records(path: Path, most_points: int) -> Records:
    """Read a file that is not trusted; all curves together have at most about `most_points` points.

    Times, memory and the use of GPUs, three quarters of a record, are read of some records only.
    """
    columns: dict[str, tuple[list[int], list[float]]] = {}  # steps and values
    timed: list[tuple[int, bytes]] = []  # a step and its line
    for records, lines in _blocks(path):
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for record, line in zip(records, lines, strict=True):
            if count_of(record.get("step")) is not None:
                groups.setdefault(tuple(record), []).append(record)
                if _NAMES[0] in line:
                    timed.append((record["step"], line))
        for names, alike in groups.items():
            for name in names:
                if name == "epoch" or ("/" in name and not name.startswith(MEASURED)):
                    steps, values = columns.setdefault(name, ([], []))
                    _add([(record["step"], record[name]) for record in alike], steps, values)
    curves = {name: Curve.of(*column) for name, column in columns.items()}
    epochs = curves.pop("epoch", Curve([], []))
    measured = _measured(timed)
    curves |= _curves(measured)
    drawn = [name for name in curves if curves[name].steps]
    chosen = sorted(drawn, key=lambda name: name.startswith("train/"))[:_CURVES]
    most = min(max(_LEAST_POINTS, most_points // max(1, len(chosen))), _MOST_POINTS)
    return Records(
        {name: curves[name].thinned(most) for name in chosen},
        spaced(list(zip(epochs.steps, epochs.values, strict=True)), _EPOCHS),
        measured,
        len(drawn) - len(chosen),
    )


def _blocks(path: Path) -> Iterator[tuple[list[dict[str, Any]], list[bytes]]]:
    """Yield some records at a time, without their times, with their lines: together they are parsed faster."""
    lines = raw_lines(path)
    while block := list(islice(lines, _BLOCK)):
        short = list(map(without_measures, block))
        try:
            records = json.loads(b"[%s]" % b",".join(short))
        except (ValueError, RecursionError):
            records = []
        if len(records) != len(block) or not all(type(record) is dict for record in records):
            records = [parse_line(part) or parse_line(line) for part, line in zip(short, block, strict=True)]
        yield records, block


def _add(points: Sequence[tuple[int, Any]], steps: list[int], values: list[float]) -> None:
    """Add those that are numbers to a column."""
    if {type(value) for _, value in points} != {float}:
        points = [(step, number) for step, value in points if (number := number_of(value)) is not None]
    steps += [step for step, _ in points]
    values += [value for _, value in points]


def without_measures(line: bytes) -> bytes:
    """Return a record without its measures, which stand beside one another; of another record it makes no JSON."""
    begin = line.find(_NAMES[0])
    if begin < 0:
        return line
    last = line.rfind(b'"', 0, line.rfind(b'":'))
    if line.startswith(_NAMES, last):
        return line[:begin].rstrip(b", ") + b"}"
    end = line.find(b",", max(map(line.rfind, _NAMES)))
    return line[:begin] + line[end + 2 :]


def _curves(measured: Sequence[MeasuredSteps]) -> dict[str, Curve]:
    """Return the curves of what was measured but for the times."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for record in measured:
        for name, value in record.measures.items():
            if "/" in name and not name.startswith(TIMES) and not name.endswith(SPREADS):
                steps, values = columns.setdefault(name, ([], []))
                steps.append(record.last)
                values.append(value)
    return {name: Curve.of(*column) for name, column in columns.items()}


def _measured(timed: Sequence[tuple[int, bytes]]) -> list[MeasuredSteps]:
    """Read the measures of some records, each weighted with the steps that it stands for.

    Those with an evaluation or a checkpoint stand for each other alone: their times are large and rare.
    """
    steps = [step for step, _ in timed]
    records = [
        (step, step - before, line) for before, (step, line) in zip([0, *steps], timed, strict=False) if step > before
    ]
    is_plain = [_is_plain(line) for _, _, line in records]
    found = []
    for plain in (True, False):
        alike = [record for record, of_record in zip(records, is_plain, strict=True) if of_record is plain]
        chosen = spaced(alike, _TIMES)
        part = sum(num_steps for _, num_steps, _ in alike) / max(1, sum(num_steps for _, num_steps, _ in chosen))
        for step, num_steps, line in chosen:
            if measures := measures_of(parse_line(line)):
                found.append(MeasuredSteps(step, num_steps * part, measures))
    return sorted(found, key=lambda steps: steps.last)


def _is_plain(line: bytes) -> bool:
    """Return whether a record, with these times at its end, has neither an evaluation nor a checkpoint."""
    is_saved = line.rfind(_NO_CHECKPOINT) < 0 and line.rfind(_NO_CHECKPOINT_LAST) < 0
    return not is_saved and line.rfind(_NO_EVALUATION) >= 0
