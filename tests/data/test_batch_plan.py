"""How the global batch is cut, and what is said when it does not split."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddpexp.data.batch_plan import BatchPlan, check_range, plan_batches
from ddpexp.errors import RefusedError
from tests.refusals import is_about, refused


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_global_batch_is_micro_times_accumulation_times_world(size: int) -> None:
    assert plan_batches(128, "auto", size) == BatchPlan(128, 128 // size, 1, size)
    assert plan_batches(128, 16, size) == BatchPlan(128, 16, 8 // size, size)


@pytest.mark.parametrize(
    ("total", "micro", "size", "sentence"),
    [
        (
            100, "auto", 8,
            "trainer.global_batch_size=100: multiple",
        ),
        (
            3, "auto", 4,
            "trainer.global_batch_size=3",
        ),
        (
            96, 16, 4,
            "trainer.global_batch_size=96",
        ),
        (
            100, 16, 2,
            "trainer.global_batch_size=100: pass",
        ),
        (
            8, 8, 2,
            "trainer.global_batch_size=8",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_split_is_refused_with_what_does(
    total: int, micro: int, size: int, sentence: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        plan_batches(total, micro, size)
    assert is_about(caught.value, sentence)


def test_every_size_that_a_refusal_names_splits() -> None:
    for total in (60, 96, 100):
        for micro in (1, 4, 5):
            for size in range(1, 13):
                try:
                    cut = plan_batches(total, micro, size)
                except RefusedError as error:
                    message = str(error)
                    better = int(message.split("for example trainer.global_batch_size=")[1].split(".")[0])
                    assert plan_batches(better, micro, size).gradient_accumulation_steps >= 1
                    if " Or use " in message:
                        for other in (
                            message.split(" Or use ")[1].removesuffix(" workers.").replace(" or ", ", ").split(", ")
                        ):
                            assert plan_batches(total, micro, int(other)).global_batch_size == total
                else:
                    assert cut.micro_batch_size * cut.gradient_accumulation_steps * size == total


def test_one_sample_a_step_is_a_batch() -> None:
    assert plan_batches(1, "auto", 1) == plan_batches(1, 1, 1) == BatchPlan(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("total", "micro", "per_machine", "nodes", "overrides"),
    [
        (64, "auto", 1, "1:4", ["trainer.global_batch_size=72", "trainer.nodes=1:2"]),
        (64, "auto", 8, "1:6", ["trainer.global_batch_size=480", "trainer.nodes=1:2"]),
        (64, 16, 2, "2:3", ["trainer.global_batch_size=192", "trainer.nodes=2"]),
        (128, "auto", 1, "1:32", ["trainer.nodes=1:2"]),
    ],
)
def test_for_a_range_of_machines_a_batch_is_named_that_splits_over_all_of_them(
    total: int, micro: Any, per_machine: int, nodes: str, overrides: list[str]
) -> None:
    first, last = map(int, nodes.split(":"))
    sizes = {number: number * per_machine for number in range(first, last + 1)}
    with refused(f"trainer.global_batch_size={total}: trainer.nodes={nodes}") as caught:
        check_range(total, micro, sizes, nodes)
    assert re.findall(r"trainer\.\w+=[\d:]*\d", caught.value.suggestion) == overrides
    if len(overrides) > 1:
        better = int(overrides[0].partition("=")[2])
        for size in sizes.values():
            assert plan_batches(better, micro, size).global_batch_size == better
    narrower = overrides[-1].partition("=")[2]
    for number in range(first, int(narrower.split(":")[-1]) + 1):
        assert plan_batches(total, micro, sizes[number]).global_batch_size == total
