"""How the global batch is cut, and what is said when it does not split."""

from __future__ import annotations

import pytest

from ddpexp.data.batch_plan import BatchPlan, check_range, plan_batches
from ddpexp.errors import RefusedError


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_global_batch_is_micro_times_accumulation_times_world(size: int) -> None:
    assert plan_batches(128, "auto", size) == BatchPlan(128, 128 // size, 1, size)
    assert plan_batches(128, 16, size) == BatchPlan(128, 16, 8 // size, size)


@pytest.mark.parametrize(
    ("total", "micro", "size", "sentence"),
    [
        (
            100, "auto", 8,
            "trainer.global_batch_size=100 does not split over 8 workers. "
            "Use a multiple of 8, for example trainer.global_batch_size=104.",
        ),
        (
            3, "auto", 4,
            "trainer.global_batch_size=3 does not split over 4 workers. "
            "Use a multiple of 4, for example trainer.global_batch_size=4.",
        ),
        (
            96, 16, 4,
            "trainer.global_batch_size=96 does not split over 4 workers with trainer.micro_batch_size=16 (64 a pass). "
            "Use a multiple of 64, for example trainer.global_batch_size=128. Or use 1, 2, 3 or 6 workers.",
        ),
        (
            100, 16, 2,
            "trainer.global_batch_size=100 does not split over 2 workers with trainer.micro_batch_size=16 (32 a pass). "
            "Use a multiple of 32, for example trainer.global_batch_size=128.",
        ),
        (
            8, 8, 2,
            "trainer.global_batch_size=8 does not split over 2 workers with trainer.micro_batch_size=8 (16 a pass). "
            "Use a multiple of 16, for example trainer.global_batch_size=16. Or use 1 worker.",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_split_is_refused_with_what_does(
    total: int, micro: int, size: int, sentence: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        plan_batches(total, micro, size)
    assert str(caught.value) == sentence


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
    ("total", "micro", "per_machine", "nodes", "sentence"),
    [
        (
            64, "auto", 1, "1:4",
            "with 3 of trainer.nodes=1:4: trainer.global_batch_size=64 does not split over 3 workers. Use a multiple "
            "of 12, which splits over every number of machines in the range, for example trainer.global_batch_size=72. "
            "Or use a smaller range, such as trainer.nodes=1:2.",
        ),
        (
            64, "auto", 8, "1:6",
            "with 3, 5 and 6 of trainer.nodes=1:6: trainer.global_batch_size=64 does not split over 24, 40 and 48 "
            "workers. Use a multiple of 480, which splits over every number of machines in the range, for example "
            "trainer.global_batch_size=480. Or use a smaller range, such as trainer.nodes=1:2.",
        ),
        (
            64, 16, 2, "2:3",
            "with 3 of trainer.nodes=2:3: trainer.global_batch_size=64 does not split over 6 workers with "
            "trainer.micro_batch_size=16. Use a multiple of 192, which splits over every number of machines in the "
            "range, for example trainer.global_batch_size=192. Or use a smaller range, such as trainer.nodes=2.",
        ),
        (
            128, "auto", 1, "1:32",
            "with 3, 5, 6, 7, 9, 10, 11, 12 and 18 more of trainer.nodes=1:32: trainer.global_batch_size=128 does not "
            "split over 3, 5, 6, 7, 9, 10, 11, 12 and 18 more workers. Use a smaller range, such as trainer.nodes=1:2.",
        ),
    ],
)  # fmt: skip
def test_for_a_range_of_machines_a_batch_is_named_that_splits_over_all_of_them(
    total: int, micro: int, per_machine: int, nodes: str, sentence: str
) -> None:
    first, last = map(int, nodes.split(":"))
    sizes = {number: number * per_machine for number in range(first, last + 1)}
    with pytest.raises(RefusedError) as caught:
        check_range(total, micro, sizes, nodes)
    assert str(caught.value) == sentence
    if "for example" in sentence:
        better = int(sentence.split("trainer.global_batch_size=")[2].split(".")[0])
        for size in sizes.values():
            assert plan_batches(better, micro, size).global_batch_size == better
    narrower = sentence.rsplit("trainer.nodes=", 1)[1].removesuffix(".")
    for number in range(first, int(narrower.split(":")[-1]) + 1):
        assert plan_batches(total, micro, sizes[number]).global_batch_size == total
