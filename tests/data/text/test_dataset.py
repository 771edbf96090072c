"""Windows of a text: which tokens they hold, in training, in evaluation and with documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.text.dataset import IGNORED, Windows, load
from ddpexp.data.text.prepare import prepare

CPU = torch.device("cpu")


def windows(num_tokens: int, block_size: int) -> Windows:
    return Windows(torch.arange(num_tokens, dtype=torch.int16), block_size)


@pytest.mark.parametrize("num_tokens", [9, 10, 15, 16, 17, 24, 25, 100])
def test_every_epoch_has_as_many_windows_that_do_not_overlap(num_tokens: int) -> None:
    data = windows(num_tokens, 8)
    offsets = set()
    for epoch in range(200):
        of_epoch = data.of_epoch(3, epoch)
        inputs, targets = of_epoch.gather(torch.arange(len(data)), CPU)
        assert len(of_epoch) == len(data)
        assert torch.equal(inputs.flatten(), torch.arange(len(data) * 8) + of_epoch.offset)
        assert torch.equal(targets, inputs + 1)
        assert int(targets.max()) < num_tokens
        offsets.add(of_epoch.offset)
    assert offsets == set(range(min(8, num_tokens - 8)))


def test_an_epoch_is_a_function_of_seed_and_number() -> None:
    data = windows(10_000, 64)
    assert data.of_epoch(1, 5).offset == data.of_epoch(1, 5).offset
    assert len({data.of_epoch(seed, epoch).offset for seed in range(4) for epoch in range(4)}) > 8


@pytest.mark.parametrize("num_tokens", [9, 10, 16, 17, 18, 100])
def test_in_evaluation_every_token_but_the_first_is_a_target_once(num_tokens: int) -> None:
    data = replace(windows(num_tokens, 8), whole=True)
    inputs, targets = data.gather(torch.arange(len(data)), CPU)
    assert targets[targets != IGNORED].tolist() == list(range(1, num_tokens))
    counted = targets != IGNORED
    assert torch.equal(targets[counted], inputs[counted] + 1)


@pytest.mark.parametrize(("kind", "largest"), [(np.uint8, 255), (np.uint16, 65_535), (np.uint32, 2**32 - 1)])
def test_the_largest_numbers_survive_being_stored(kind: type, largest: int, tmp_path: Path) -> None:
    np.full(40, largest, kind).tofile(tmp_path / "tokens.bin")
    size = np.dtype(kind).itemsize
    splits = load({"folder": str(tmp_path), "num_train": 20, "token_bytes": size, "documents": False, "block_size": 4})
    for data in (splits.train, splits.evals["eval"]):
        inputs, targets = data.gather(torch.tensor([1]), CPU)
        assert inputs.tolist() == targets.tolist() == [[largest] * 4]
        assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)


def test_documents_are_numbered_and_no_target_crosses_a_border(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab\nabcdef\nc\nabcdefgh\n" * 3)
    data = load(prepare(str(path), 8, "bytes", documents="line", eval_fraction=0.0)).train
    batch = data.of_epoch(0, 0).gather(torch.arange(len(data)), CPU)
    text = path.read_bytes()
    document = np.searchsorted(np.cumsum([len(line) for line in text.splitlines(keepends=True)]), range(64), "right")
    offset = data.of_epoch(0, 0).offset
    for row in range(len(data)):
        begin = offset + row * 8
        assert bytes(batch["inputs"][row].tolist()) == text[begin : begin + 8]
        assert batch["documents"][row].tolist() == (document[begin : begin + 8] - document[begin]).tolist()
        for column, target in enumerate(batch["targets"][row].tolist()):
            place = begin + column
            ends = document[place + 1] != document[place]
            assert target == (IGNORED if ends else text[place + 1])
    assert int(batch["count"]) == int((batch["targets"] != IGNORED).sum())


def test_the_same_samples_at_every_number_of_workers_and_from_every_step() -> None:
    data = windows(2_000, 8)
    batch: dict[int, torch.Tensor] = {}
    for num_ranks in (1, 2, 4):
        for first in (0, 70):
            steps = [
                TrainBatches(data, plan_batches(8, 2, num_ranks), rank, 5, CPU).steps(first, 100)
                for rank in range(num_ranks)
            ]
            for step, parts in enumerate(zip(*steps, strict=True), start=first):
                inputs = torch.cat([inputs for micro_batches in parts for inputs, _ in micro_batches])
                assert torch.equal(batch.setdefault(step, inputs), inputs)
    assert len(batch) == 100  # of three epochs


def test_a_position_is_found_without_the_ones_before(tmp_path: Path) -> None:
    """At 80 % of a billion tokens a batch reads its own rows: of the file almost nothing is on the disk."""
    with open(tmp_path / "tokens.bin", "wb") as file:
        file.truncate(2_000_000_000)
    made = {"folder": str(tmp_path), "num_train": 10**9, "token_bytes": 2, "documents": False, "block_size": 1024}
    batches = TrainBatches(load(made).train, plan_batches(8, 8, 1), 0, 0, CPU)
    step = batches.steps_per_epoch * 4 // 5
    [[(inputs, _)]] = batches.steps(step, step + 1)
    assert inputs.shape == (8, 1024)


def test_on_a_device_the_batches_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab\nabcdef\nc\nabcdefgh\n" * 30)
    indices = torch.tensor([3, 0, 5])
    for documents in (None, "line"):
        splits = load(prepare(str(path), 8, documents=documents))
        for data in (splits.train.of_epoch(0, 1), splits.evals["eval"]):
            # host=False takes the way of tokens that are on a device
            here, there = data.gather(indices, CPU), replace(data, host=False).gather(indices, CPU)
            if isinstance(here, dict):
                assert all(torch.equal(here[name], there[name]) for name in here)
            else:
                assert all(map(torch.equal, here, there))


def test_every_token_is_evaluated_at_every_batch_size() -> None:
    data = replace(windows(101, 8), whole=True)
    for size in (1, 3, 100):
        batches = EvalBatches(data, size, 0, 1, CPU)
        assert sum(int((targets != IGNORED).sum()) for _, targets in batches) == 100
