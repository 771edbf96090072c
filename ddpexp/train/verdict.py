"""What the records of a run say a person should do: nothing, or one sentence. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ddpexp.errors import RefusedError
from ddpexp.run.directory import RunDir
from ddpexp.settings.metrics import MEASURED, STEP_PARTS, TIMES
from ddpexp.system.gpu_state import reason_of
from ddpexp.system.json_lines import json_lines
from ddpexp.system.text import duration
from ddpexp.train.memory_growth import LEAKS, growth_of, point_of
from ddpexp.train.step_times import (
    NOT_KNOWN,
    RECORDED_PHASES,
    SLOW_CLOCK,
    SLOW_FACTOR,
    SLOW_MOST_CLOCK,
    SLOW_RANK,
    SLOW_REASONS,
    STEP_PHASES,
)

_STREAK = 100  # steps in nearly all of which a rank is slow before it is named
_SLOWER = 1.3  # times what the others take, in half of them: other programs slow a rank down by less, or not as long
_NEARLY_ALL = 0.75  # of the records of these steps
_SECONDS = 30.0  # of training, before a part of its time is named
_MOST = 1e15  # of a step or a time: nobody trains that long
_SHOWN = 0.005  # of a step: smaller parts would be shown as 0 %
_LOW_CLOCK = 0.9  # of the most, from which on it is no reason
_LARGE = {"data": 0.25, "evaluation": 0.5, "checkpoint": 0.25}  # parts of the time that are named


@dataclass(frozen=True)
class Verdict:
    """Where time or memory goes that need not go there.

    Attributes:
        phase: Of a step, or `evaluation` or `checkpoint`, or `memory`.
        factor: With a `rank`, the time of its steps over that of the others' steps. Without one, the part of all time
            that the phase takes, or the memory now over the memory before.
        since: The first step of which that is known. Units: steps, from 1.
        rank: The rank that the others wait for; None: all ranks alike.
        reason: Why it is slow, if its GPU says so.
    """

    phase: str
    factor: float
    since: int
    rank: int | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what result.json has of it."""
        return {**asdict(self), "factor": round(self.factor, 2)}

    def sentence(self, manifest: Mapping[str, Any], values: Mapping[str, Any]) -> str:
        """Return it in words; `manifest` names the hosts, and `values` has the resolved values of the run by key."""
        if self.rank is not None:
            host = _host(self.rank, manifest)
            where = "" if host is None else f" on {host}"
            why = f" ({self.reason})" if self.reason else ""
            return (
                f"rank {self.rank}{where} is {self.factor:.2g} times slower than the others, in {self.phase}, since "
                f"step {self.since:,}{why}: they wait for it"
            )
        share = f"{self.factor:.0%}"
        match self.phase:
            case "data":
                workers = values.get("data.num_workers")
                more = 2 * workers if isinstance(workers, int) and workers > 0 else 2
                cache = values.get("data._target_") == "image_folder" and values.get("data.cache") != "raw"
                return f"{share} of a step waits for data: data.num_workers={more}" + (
                    ", or data.cache=raw" if cache else ""
                )
            case "evaluation":
                return f"{share} of the time goes into evaluations: trainer.eval_every makes them rarer"
            case "memory":
                return (
                    f"the memory of a worker grows without end, and is {self.factor:.2g} times as large as after step "
                    f"{self.since:,}; {LEAKS}"
                )
            case _:
                return f"{share} of the time goes into saving: trainer.checkpoint_every makes it rarer"


def read_records(run: RunDir) -> list[dict[str, float]]:
    """Return what a run has measured so far, record by record; records of other contents do not count."""
    return [record for line in json_lines(run.metrics, f"{TIMES}forward") if (record := measures_of(line))]


def read_verdict(run: RunDir) -> Verdict | None:
    """Return the verdict on what a run has recorded so far."""
    return verdict_of(read_records(run))


def times_text(record: Mapping[str, float]) -> str:
    """Return how long a step takes, and which part of it each phase that shows."""
    parts = {name: record.get(f"{TIMES}{name}", 0.0) for name in STEP_PARTS}
    total = sum(parts.values())
    if not total > 0:
        return ""
    shown = sorted((name for name in parts if parts[name] >= _SHOWN * total), key=lambda name: -parts[name])
    shares = ", ".join(f"{name} {parts[name] / total:.0%}" for name in shown)
    return f"{duration(total) if total >= 1 else f'{1000 * total:.3g} ms'} a step: {shares}"


def read_sentence(run: RunDir, values: Mapping[str, Any], records: Sequence[Mapping[str, float]] | None = None) -> str:
    """Return what a run's end, or else its records, say a person should do, if anything.

    `values` are the resolved ones by key, `records` those that `read_records` has returned already.
    """
    try:
        result, manifest = run.read_if_present(run.result) or {}, run.read_if_present(run.manifest) or {}
    except RefusedError:
        result, manifest = {}, {}
    if "verdict" in result:
        verdict = _of_dict(result["verdict"])
    else:
        verdict = verdict_of(read_records(run) if records is None else records)
    return "" if verdict is None else verdict.sentence(manifest, values)


def _of_dict(stored: Any) -> Verdict | None:
    """Return the verdict that a result.json has, which anybody may have written."""
    match stored:
        case {"phase": str(phase), "factor": float(factor), "since": int(since), "rank": int() | None as rank, **rest}:
            reason = rest.get("reason")
            is_known = phase in (*RECORDED_PHASES, "memory") and (rank is None or rank >= 0)
            return Verdict(phase, factor, since, rank, reason if isinstance(reason, str) else "") if is_known else None
    return None


def measures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what has been measured in a record, with its step; nothing if one of the values is no plain number."""
    found = {name: value for name, value in line.items() if name in ("step", "epoch") or name.startswith(MEASURED)}
    is_plain = all(type(value) in (int, float) and abs(value) < _MOST for value in found.values())
    return found if is_plain and found.get("step", 0) > 0 and f"{TIMES}forward" in found else {}


def verdict_of(records: Sequence[Mapping[str, float]]) -> Verdict | None:
    """Return what is worth a sentence after these records of metrics.jsonl, all with times, if anything is."""
    return (_slow_rank(records) or _large_phase(records) or _growing_memory(records)) if records else None


def _slow_rank(records: Sequence[Mapping[str, float]]) -> Verdict | None:
    """Return the rank that is the slow one in nearly all of the last steps, if one is."""
    judged = [record for record in records if record.get(SLOW_RANK, NOT_KNOWN) != NOT_KNOWN]
    begins = [records[0]["step"] - _num_steps(records, 0), *(record["step"] for record in judged)]  # one more than them
    first = next((number for number in reversed(range(len(judged))) if begins[-1] - begins[number] >= _STREAK), None)
    if first is None:
        return None
    [(rank, times)] = Counter(record[SLOW_RANK] for record in judged[first:]).most_common(1)
    if rank < 0 or times < _NEARLY_ALL * len(judged[first:]):
        return None
    while first > 0 and judged[first - 1][SLOW_RANK] == rank:
        first -= 1
    slow = [record for record in judged[first:] if record[SLOW_RANK] == rank]
    factor = median(record.get(SLOW_FACTOR, 1.0) for record in slow)
    excess = {phase: _beyond_median(slow[-1], phase) for phase in STEP_PHASES}
    slowest = max(excess, key=lambda phase: excess[phase])
    if factor < _SLOWER:
        return None
    return Verdict(slowest, factor, int(begins[first]) + 1, int(rank), _why_slow(slow[-1]))


def _why_slow(record: Mapping[str, float]) -> str:
    """Return what the slow rank's GPU says about its clock; empty if it is high, or not known."""
    clock, most = record.get(SLOW_CLOCK, 0.0), record.get(SLOW_MOST_CLOCK, 0.0)
    if not 0 < clock < _LOW_CLOCK * most:
        return ""
    reason = reason_of(int(record.get(SLOW_REASONS, 0.0)))
    return f"GPU clock {clock:,.0f} of {most:,.0f} MHz{f': {reason}' if reason else ''}"


def _beyond_median(record: Mapping[str, float], phase: str) -> float:
    name = f"{TIMES}{phase}"
    return record.get(f"{name}_greatest", 0.0) - record.get(name, 0.0)


def _large_phase(records: Sequence[Mapping[str, float]]) -> Verdict | None:
    """Return the phase that takes more of the time than it should, if one does.

    The part of data is of the steps, those of evaluations and checkpoints are of all the time.
    """
    seconds: dict[str, float] = {}
    for number, record in enumerate(records):
        for phase in RECORDED_PHASES:
            value = record.get(f"{TIMES}{phase}", 0.0)
            seconds[phase] = seconds.get(phase, 0.0) + value * _num_steps(records, number)
    total = sum(seconds.values())
    if total < _SECONDS:
        return None
    apart = sum(seconds.get(phase, 0.0) for phase in ("evaluation", "checkpoint", "record"))
    parts = {phase: seconds.get(phase, 0.0) / (total - apart if phase == "data" else total) for phase in _LARGE}
    phase = max(parts, key=lambda phase: parts[phase] - _LARGE[phase])
    if parts[phase] < _LARGE[phase]:
        return None
    return Verdict(phase, parts[phase], int(records[0]["step"] - _num_steps(records, 0)) + 1)


def _growing_memory(records: Sequence[Mapping[str, float]]) -> Verdict | None:
    """Return that memory grows without end, if it does."""
    growth = growth_of([point for record in records if (point := point_of(record)) is not None])
    return None if growth is None else Verdict("memory", growth.now / max(growth.before, 1e-9), growth.since)


def _num_steps(records: Sequence[Mapping[str, float]], number: int) -> float:
    """Return the steps of a record: those since the record before; of the first as many as of the next."""
    if number:
        return records[number]["step"] - records[number - 1]["step"]
    return min(records[0]["step"], records[1]["step"] - records[0]["step"] if len(records) > 1 else records[0]["step"])


def _host(rank: int, manifest: Mapping[str, Any]) -> str | None:
    """Return the host of a rank, where the ranks run on several."""
    hosts, world = manifest.get("hosts"), manifest.get("world")
    if not isinstance(hosts, list) or not isinstance(world, dict) or len(hosts) < 2 or len(hosts) != world.get("nodes"):
        return None
    size = world.get("world_size")
    return str(hosts[rank * len(hosts) // size]) if isinstance(size, int) and rank < size else None
