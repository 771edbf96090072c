"""Slots: which jobs run at once, on which GPUs, with how many cores."""

from __future__ import annotations

import pytest

from ddpexp.sweep.slots import Slots
from ddpexp.system.hardware import CORES
from tests.refusals import refused

EIGHT = [str(number) for number in range(8)]


def test_eight_gpus_hold_four_jobs_of_two_each_with_its_own() -> None:
    slots = Slots(gpus=EIGHT, cores=16)
    taken = [slots.take(2, on_gpus=True) for _ in range(4)]
    assert taken == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert slots.take(1, on_gpus=True) is None
    assert slots.environ([2, 3], on_gpus=True) == {"CUDA_VISIBLE_DEVICES": "2,3", CORES: "4"}
    slots.give_back([2, 3])
    assert slots.take(1, on_gpus=True) == [2]
    assert slots.take(2, on_gpus=True) is None


def test_gpus_are_called_as_the_commands_own_variable_calls_them() -> None:
    slots = Slots(gpus=["3", "GPU-5a", "7"], cores=6)
    assert slots.environ(slots.take(2, on_gpus=True) or [], on_gpus=True)["CUDA_VISIBLE_DEVICES"] == "3,GPU-5a"
    assert slots.names([2]) == ["7"]


def test_more_slots_than_gpus_share_them_and_a_job_never_gets_one_twice() -> None:
    slots = Slots(4, gpus=["0", "1"], cores=8)
    first, second = slots.take(2, on_gpus=True), slots.take(2, on_gpus=True)
    assert (first, second) == ([0, 1], [2, 3])
    assert slots.names(second or []) == ["0", "1"]
    slots.give_back([0, 2])  # both of the first GPU
    assert slots.take(2, on_gpus=True) is None
    assert slots.take(1, on_gpus=True) == [0]
    assert slots.take(1, on_gpus=True) == [2]


def test_the_emptiest_gpu_comes_first() -> None:
    slots = Slots(4, gpus=["0", "1"], cores=8)
    assert slots.take(1, on_gpus=True) == [0]
    assert slots.take(1, on_gpus=True) == [1]


def test_without_gpus_a_slot_is_a_core_and_the_cores_are_shared_out() -> None:
    slots = Slots(gpus=[], cores=8)
    assert (slots.count, str(slots)) == (8, "8 slots (8 CPU cores)")
    assert slots.environ([0, 1], on_gpus=False) == {CORES: "2"}
    assert Slots(2, gpus=[], cores=8).environ([1], on_gpus=False) == {CORES: "4"}
    assert Slots(8, gpus=[], cores=2).environ([1], on_gpus=False) == {CORES: "1"}


def test_a_job_that_wants_all_waits_for_all() -> None:
    slots = Slots(3, gpus=[], cores=8)
    assert slots.take(1, on_gpus=False) == [0]
    assert slots.take(None, on_gpus=False) is None
    slots.give_back([0])
    assert slots.take(None, on_gpus=False) == [0, 1, 2]


@pytest.mark.parametrize(
    ("gpus", "count", "workers", "says"),
    [
        (
            [],
            2,
            4,
            "trainer.gpus=4: cores",
        ),
        (
            ["0", "1"],
            2,
            4,
            "trainer.gpus=4: slots",
        ),
        (["0", "1"], 4, 3, "trainer.gpus=3"),
    ],
)
def test_a_job_larger_than_the_machine_is_refused(gpus: list[str], count: int, workers: int, says: str) -> None:
    with refused(says):
        Slots(count, gpus=gpus, cores=2).check_arguments(workers, on_gpus=bool(gpus))
