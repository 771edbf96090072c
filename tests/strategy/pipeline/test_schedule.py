"""The order of the passes: every stage gets what it waits for, and keeps no more activations than it says."""

from __future__ import annotations

from collections import deque

import pytest

from ddpexp.strategy.pipeline.schedule import Pass, Pipe, Schedule, num_in_flight, order

Message = tuple[int, int]  # the stage that receives, and the micro-batch


class Workers:
    """Does the passes of all workers, which wait for one another as the processes do."""

    def __init__(self, schedule: Schedule, pipe: Pipe, num_micro_batches: int) -> None:
        self.pipe = pipe
        self.waiting = [order(schedule, place, pipe, num_micro_batches)[::-1] for place in range(pipe.size)]
        self.links: dict[tuple[int, int, bool], deque[Message]] = {}  # by sender, receiver, and activations
        self.kept, self.most = [0] * pipe.size, [0] * pipe.size
        self.done: list[tuple[int, Pass]] = []

    def run(self) -> None:
        """Do passes until nobody can."""
        met = False  # all workers meet once before their first backward passes
        while True:
            moved = False
            met = met or all(passes and not passes[-1].forward for passes in self.waiting)
            for place, passes in enumerate(self.waiting):
                if passes and (passes[-1].forward or met) and self._receives(place, passes[-1]):
                    self._do(place, passes.pop())
                    moved = True
            if not moved:
                return

    def _receives(self, place: int, one: Pass) -> bool:
        """Receive what a pass needs. What arrives first on a link is what is taken from it."""
        source = one.stage - 1 if one.forward else one.stage + 1
        if not 0 <= source < self.pipe.num_stages:
            return True
        link = self.links.get((source % self.pipe.size, place, one.forward))
        if not link:
            return False
        assert link.popleft() == (one.stage, one.micro_batch)
        return True

    def _do(self, place: int, one: Pass) -> None:
        self.done.append((place, one))
        self.kept[place] += 1 if one.forward else -1
        self.most[place] = max(self.most[place], self.kept[place])
        to = one.stage + 1 if one.forward else one.stage - 1
        if 0 <= to < self.pipe.num_stages:
            key = (place, to % self.pipe.size, one.forward)
            self.links.setdefault(key, deque()).append((to, one.micro_batch))


CASES: list[tuple[Schedule, int, int]] = [
    *(("1f1b", 1, number) for number in (1, 2, 5, 16)),
    *(("gpipe", 1, number) for number in (1, 2, 5, 16)),
    *(("interleaved", stages, number) for stages in (2, 3) for number in (1, 2, 5)),  # times the workers
]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize(("schedule", "stages_per_worker", "number"), CASES)
def test_all_passes_are_done_without_waiting_for_ever(
    schedule: Schedule, stages_per_worker: int, number: int, size: int
) -> None:
    pipe = Pipe(size, stages_per_worker)
    num_micro_batches = number * size if schedule == "interleaved" else number
    workers = Workers(schedule, pipe, num_micro_batches)
    workers.run()
    assert not any(workers.waiting)
    assert len(set(workers.done)) == 2 * pipe.num_stages * num_micro_batches
    assert all(one.stage in pipe.stages_of(place) for place, one in workers.done)
    assert workers.most == [num_in_flight(schedule, place, pipe, num_micro_batches) for place in range(size)]
    if schedule == "1f1b":
        assert workers.most == [min(size - place, num_micro_batches) for place in range(size)]


@pytest.mark.parametrize(("schedule", "stages_per_worker"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_both_kinds_of_passes_go_through_the_micro_batches_in_order(schedule: Schedule, stages_per_worker: int) -> None:
    pipe = Pipe(4, stages_per_worker)
    passes = order(schedule, 1, pipe, 8)
    for stage in pipe.stages_of(1):
        for forward in (True, False):
            numbers = [one.micro_batch for one in passes if one.forward is forward and one.stage == stage]
            assert numbers == list(range(8))


def test_interleaved_stages_wait_less() -> None:
    """A stage of half the layers takes half as long, so the last worker begins after half the time."""

    def seconds(schedule: Schedule, pipe: Pipe) -> float:
        workers = Workers(schedule, pipe, 8)
        when: dict[Pass, float] = {}
        workers.run()
        free = [0.0] * pipe.size
        for place, one in workers.done:
            before = Pass(one.micro_batch, one.forward, one.stage - 1 if one.forward else one.stage + 1)
            begin = max(free[place], when.get(before, 0.0), when.get(Pass(one.micro_batch, True, one.stage), 0.0))
            when[one] = free[place] = begin + (1 if one.forward else 2) / pipe.stages_per_worker
        return max(free)

    assert seconds("1f1b", Pipe(4)) == 8 * 3 + 3 * 3
    assert seconds("interleaved", Pipe(4, 2)) == 8 * 3 + 3 * 3 / 2
