"""Where the time of the steps goes, over all ranks: what is recorded of it. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ddpexp.distributed.phases import COLLECTIVE, OTHER, PHASES
from ddpexp.settings.metrics import STEP_PARTS, TIMES

NOBODY, NOT_KNOWN = -1, -2
SLOW_RANK, SLOW_FACTOR = f"{TIMES}slow_rank", f"{TIMES}slow_factor"
SLOW_CLOCK, SLOW_MOST_CLOCK, SLOW_REASONS = (f"{TIMES}slow_{name}" for name in ("clock", "most_clock", "reasons"))
STEP_PHASES = tuple(phase for number, phase in enumerate(PHASES[: OTHER + 1]) if number != COLLECTIVE)
RECORDED_PHASES = (*STEP_PARTS, *PHASES[OTHER + 1 :])
"""The phases as records have them, behind `TIMES`, in their order."""
_DIGITS = 9  # nanoseconds
_MOST_NUMBERS = 1 << 16  # of single steps, that all ranks together pass on in a record
_BLOCK = 20  # steps, at least, that are judged together
_SLOWER = 1.15  # times what the others take: a rank that is named
_LAST = 0.7  # the part of the steps in which the others wait for it


@dataclass(frozen=True)
class StepTimes:
    """The steps between two records on one rank. Units: seconds.

    Attributes:
        stage: Of a pipeline: ranks of one stage do the same work.
        num_steps: The number of steps.
        phases: The time in each of `PHASES`.
        collectives: The time in collectives of each of the last steps, negative behind an evaluation or a checkpoint.
    """

    stage: int
    num_steps: int
    phases: Sequence[float]
    collectives: Sequence[float]

    @classmethod
    def of(cls, row: Sequence[float]) -> StepTimes:
        """Return what `row` has made numbers of."""
        stage, num_steps, *rest = row
        return cls(int(stage), int(num_steps), rest[: len(PHASES)], rest[len(PHASES) :])

    def row(self, world_size: int) -> list[float]:
        """Return it as numbers, equally many on each of `world_size` ranks that have done the same steps."""
        most = max(1, _MOST_NUMBERS // world_size)
        return [self.stage, self.num_steps, *self.phases, *self.collectives[-most:]]

    def plus(self, other: StepTimes) -> StepTimes:
        """Return these steps and the ones after them."""
        return StepTimes(
            self.stage,
            self.num_steps + other.num_steps,
            [a + b for a, b in zip(self.phases, other.phases, strict=True)],
            [*self.collectives, *other.collectives],
        )

    @property
    def busy(self) -> float:
        """Return the time of a step outside of collectives."""
        return (sum(self.phases[: OTHER + 1]) - self.phases[COLLECTIVE]) / self.num_steps


class TimesRecorder:
    """Makes records of the times of all ranks; single steps are put together before a rank is called slow."""

    def __init__(self) -> None:
        """Start without steps."""
        self._block: list[StepTimes] = []  # of each rank, too few steps to judge
        self._slow = (NOT_KNOWN, 1.0)  # by the last block that was judged

    def record(self, ranks: Sequence[StepTimes]) -> dict[str, float]:
        """Return the time of a step in each phase, and which rank is slow (`NOBODY`, or `NOT_KNOWN` yet).

        Of several ranks it is the median, and the least and the greatest beside it. A collective ends at about the same
        time everywhere, so the least time of a rank in those of a step is communication, and what other ranks spend
        there beyond it is waiting. Units: seconds.
        """
        if not ranks[0].num_steps:
            return {}
        values = dict(_spreads(ranks))
        block = [a.plus(b) for a, b in zip(self._block, ranks, strict=True)] if self._block else list(ranks)
        self._block = block if block[0].num_steps < _BLOCK else []
        if len(ranks) > 1:
            if not self._block:
                self._slow = slow_rank(block) or (NOBODY, 1.0)
            rank, factor = self._slow
            values |= {SLOW_RANK: float(rank), SLOW_FACTOR: round(factor, 3)}
        return values


def slow_rank(ranks: Sequence[StepTimes]) -> tuple[int, float] | None:
    """Return the rank for which the others wait, and how many times slower than theirs its steps are.

    It is busy for longer than the others of its stage, and the last to come to the collectives of most steps, so it
    waits least.
    """
    for stage in {rank.stage for rank in ranks}:
        members = [number for number, rank in enumerate(ranks) if rank.stage == stage]
        steps = [step for step in _steps([ranks[member] for member in members]) if min(step) >= 0]
        last = Counter(members[step.index(min(step))] for step in steps if max(step) > min(step))
        if len(members) < 2 or not last:
            continue
        [(slowest, times)] = last.most_common(1)
        others = median(ranks[member].busy for member in members if member != slowest)
        if times >= _LAST * len(steps) and ranks[slowest].busy >= _SLOWER * others > 0:
            return slowest, ranks[slowest].busy / others
    return None


def _spreads(ranks: Sequence[StepTimes]) -> Iterable[tuple[str, float]]:
    waiting = _parts_of_waiting(ranks) if len(ranks) > 1 else ()
    columns: dict[str, list[float]] = {}
    for number, phase in enumerate(PHASES):
        values = [rank.phases[number] / rank.num_steps for rank in ranks]
        if number != COLLECTIVE:
            columns[phase] = values
        elif len(ranks) > 1:
            columns["waiting"] = [value * part for value, part in zip(values, waiting, strict=True)]
            columns["communication"] = [value * (1 - part) for value, part in zip(values, waiting, strict=True)]
    middle = len(ranks) // 2
    for phase, values in columns.items():
        values.sort()
        # Not by `statistics.median`, which takes ten times as long.
        yield f"{TIMES}{phase}", round((values[middle] + values[-1 - middle]) / 2, _DIGITS)
        if middle:
            yield f"{TIMES}{phase}_least", round(values[0], _DIGITS)
            yield f"{TIMES}{phase}_greatest", round(values[-1], _DIGITS)


def _parts_of_waiting(ranks: Sequence[StepTimes]) -> list[float]:
    """Return the part of each rank's time in collectives in which it waits for others."""
    least = sum(min(map(abs, step)) for step in _steps(ranks))
    totals = [sum(map(abs, rank.collectives)) for rank in ranks]
    return [1 - least / total if total > 0 else 0.0 for total in totals]


def _steps(ranks: Sequence[StepTimes]) -> list[tuple[float, ...]]:
    """Return the times of the ranks in the collectives of each step."""
    return list(zip(*(rank.collectives for rank in ranks), strict=True))
