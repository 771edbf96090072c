"""Which micro-batches are tried, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ddpexp.config.compose import compose
from ddpexp.config.fitted import recorded, resolved
from ddpexp.config.parse import parse
from ddpexp.data.adapters import adapted
from ddpexp.data.base import IndexData
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.lengths import ByLength
from ddpexp.errors import Failure, WorkerError
from ddpexp.find.micro_batch import Tried, divisors, fastest, largest, next_size, predicted_bytes
from ddpexp.find.trial import is_out_of_memory
from ddpexp.find.worker import with_longest
from ddpexp.train.micro_batch_effects import effects
from tests.refusals import refused

MIB = 1 << 20


def searched(samples: int, capacity: int, least: int = 1) -> list[Tried]:
    """Search as for a rank with so many samples of a step, where micro-batches up to `capacity` fit."""
    tried: list[Tried] = []
    while (size := next_size(divisors(samples), tried)) is not None:
        assert size not in {one.micro_batch_size for one in tried}
        outcome = "fails" if size < least else "fits" if size <= capacity else "out of memory"
        tried.append(Tried(size, samples // size, outcome, peak_bytes=size * MIB))  # type: ignore[arg-type]
    return tried


@pytest.mark.parametrize("samples", [1, 7, 60, 96, 128, 4096, 6000])
def test_the_largest_divisor_that_fits_is_found_by_few_trials(samples: int) -> None:
    for capacity in {1, 2, 5, 48, 97, samples - 1, samples} - {0}:
        tried = searched(samples, capacity)
        found = largest(tried)
        assert found is not None
        assert found.micro_batch_size == max(size for size in divisors(samples) if size <= capacity)
        assert len(tried) <= 16


def test_a_search_in_which_nothing_fits_ends_with_a_single_sample() -> None:
    tried = searched(4096, 0)
    assert largest(tried) is None
    assert [one.micro_batch_size for one in tried] == [128, 64, 32, 16, 8, 4, 2, 1]


def test_a_single_sample_that_fails_says_nothing_of_larger_micro_batches() -> None:
    tried = searched(16, 8, least=2)
    assert [(one.micro_batch_size, one.outcome) for one in tried][:2] == [(1, "fails"), (2, "fits")]
    assert (largest(tried) or tried[0]).micro_batch_size == 8


def test_a_step_of_very_many_passes_is_not_the_first_one_tried() -> None:
    assert next_size(divisors(4096), []) == 128
    assert next_size(divisors(32), []) == 1


def test_the_next_peak_is_predicted_by_the_growth_between_the_last_two() -> None:
    tried = [Tried(1, 8, "fits", 110 * MIB), Tried(2, 4, "fits", 120 * MIB), Tried(4, 2, "fits", 140 * MIB)]
    assert predicted_bytes(tried, 8) == 180 * MIB
    assert predicted_bytes(tried[:1], 2) is None
    assert predicted_bytes([*tried, Tried(8, 1, "out of memory")], 6) == 160 * MIB
    shrinking = [Tried(1, 8, "fits", 120 * MIB), Tried(2, 4, "fits", 110 * MIB)]
    assert predicted_bytes(shrinking, 4) == 110 * MIB


def test_the_fastest_need_not_be_the_largest() -> None:
    rates = {1: 10.0, 2: 30.0, 4: 20.0}
    tried = [Tried(size, 4 // size, "fits", MIB, rate) for size, rate in rates.items()]
    quickest = fastest([*tried, Tried(8, 1, "out of memory")])
    assert quickest is not None
    assert quickest.micro_batch_size == 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("OutOfMemoryError", "GPU 0 of 79.15 GiB has no memory for 20 GiB more"),
        ("MemoryError", ""),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
        ("RuntimeError", "std::bad_alloc"),
        ("SIGKILL", "killed by SIGKILL: out of memory: the control group /x may use 1 GiB."),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_every_way_to_run_out_of_memory_is_known(kind: str, message: str) -> None:
    assert is_out_of_memory(WorkerError(Failure(0, "here", kind, message)))


@pytest.mark.parametrize(("kind", "message"), [("ValueError", "Expected more than 1 value"), ("SIGSEGV", "killed")])
def test_other_failures_are_not_taken_for_a_lack_of_memory(kind: str, message: str) -> None:
    assert not is_out_of_memory(WorkerError(Failure(0, "here", kind, message)))


def test_trials_see_the_longest_samples_in_every_step() -> None:
    lengths = np.array([3, 9, 1, 7, 5, 2, 8, 4])
    data = adapted(torch.utils.data.TensorDataset(torch.arange(8)))
    assert isinstance(data, IndexData)
    order = ByLength(data, lengths, 4)
    train = TrainBatches(data, plan_batches(4, 2, 1), 0, 0, torch.device("cpu"), order=order)
    steps = list(with_longest(train).steps(0, 3))
    assert [[int(x) for batch in step for x in batch[0]] for step in steps] == [[1, 6, 3, 4]] * 3


def test_what_a_micro_batch_changes_is_said_with_the_names_of_the_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1), nn.Dropout(0.0))
    text = effects({"model": model})
    assert "micro-batch (1)" in text
    assert "dropout draws anew for each micro-batch (2)" in text
    assert "last bits" in effects({"model": nn.Linear(1, 1)})
    assert "(b.0)" in effects({"a": nn.Linear(1, 1), "b": nn.Sequential(nn.BatchNorm1d(1))})


def test_a_micro_batch_to_be_found_is_refused_with_exact_sums_and_with_batches_by_tokens() -> None:
    words = ["recipe=mnist", "trainer.micro_batch_size=fit"]
    with refused("trainer.micro_batch_size=fit"):
        composed = compose([*words, "trainer.reduction=exact"])
        assert composed is not None
        parse(composed.values)
    with refused("trainer.micro_batch_size=fit"):
        composed = compose([*words, "data.batch_tokens=100", "data.lengths=lengths"])
        assert composed is not None
        parse(composed.values)


def test_a_run_has_the_micro_batch_that_its_manifest_keeps() -> None:
    composed = compose(["recipe=mnist", "trainer.micro_batch_size=fit"])
    assert composed is not None
    experiment = parse(composed.values)
    manifest = {"resolved": {"trainer.micro_batch_size": 16}}
    assert resolved(experiment, manifest).trainer.micro_batch_size == 16
    assert resolved(experiment, {}).trainer.micro_batch_size == "fit"
    for strange in ({"resolved": 3}, {"resolved": {"trainer.micro_batch_size": "16"}}, None):
        assert recorded(strange) is None
    typed = compose(["recipe=mnist", "trainer.micro_batch_size=8"])
    assert typed is not None
    assert resolved(parse(typed.values), manifest).trainer.micro_batch_size == 8
