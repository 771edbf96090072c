"""The order of the passes: every stage gets what it waits for, and keeps no more activations than it says."""

from __future__ import annotations

import pytest

from ddpexp.strategy.pipeline.schedule import Pass, Schedule, num_in_flight, order


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 16])
def test_all_passes_are_done_without_waiting_for_ever(
    schedule: Schedule, num_stages: int, num_micro_batches: int
) -> None:
    waiting = [order(schedule, stage, num_stages, num_micro_batches)[::-1] for stage in range(num_stages)]
    done: set[tuple[int, Pass]] = set()
    kept, most = [0] * num_stages, [0] * num_stages
    moved = True
    while moved:
        moved = False
        for stage, passes in enumerate(waiting):
            if not passes:
                continue
            number, forward = passes[-1].micro_batch, passes[-1].forward
            source = stage - 1 if forward else stage + 1  # of the activations or of the gradient
            if 0 <= source < num_stages and (source, Pass(number, forward)) not in done:
                continue
            done.add((stage, passes.pop()))
            kept[stage] += 1 if forward else -1
            most[stage] = max(most[stage], kept[stage])
            moved = True
    assert not any(waiting)
    assert len(done) == 2 * num_stages * num_micro_batches
    expected = [num_in_flight(schedule, stage, num_stages, num_micro_batches) for stage in range(num_stages)]
    assert most == expected
    if schedule == "1f1b":
        assert most == [min(num_stages - stage, num_micro_batches) for stage in range(num_stages)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_both_kinds_of_passes_go_through_the_micro_batches_in_order(schedule: Schedule) -> None:
    passes = order(schedule, 1, 4, 9)
    for forward in (True, False):
        assert [one.micro_batch for one in passes if one.forward is forward] == list(range(9))
