"""What distinguishes data from other data: lengths, and a few samples where they are informative."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import ddpexp.data.fingerprint
from ddpexp.data.adapters import MapStyle, adapted
from ddpexp.data.datasets import Arrays, Splits
from ddpexp.data.fingerprint import carried_over, contents, differences, fingerprint
from tests.conftest import PATIENCE
from tests.orders import hold_out


@dataclass
class Items(Dataset[Any]):
    """A set of single samples."""

    sample: Callable[[int], Any]
    count: int = 100
    indices_read: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.indices_read.append(index)
        return self.sample(index)


def hashes(sample: Callable[[int], Any]) -> dict[str, str]:
    return contents(MapStyle(Items(sample)))


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sets read on a machine that is busy with other things too."""
    for name in ("_SECONDS", "_WORKER_SECONDS"):
        monkeypatch.setattr(ddpexp.data.fingerprint, name, PATIENCE)


def rows(count: int = 100, seed: int = 0) -> Arrays:
    return Arrays((torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(count)))


def read(train: Any, known: bool = False, num_workers: int = 0, **evals: Any) -> dict[str, dict[str, Any]]:
    sets = {name: adapted(one) for name, one in evals.items()}
    return fingerprint(Splits(adapted(train), sets), known, num_workers)


def test_lengths_and_content_distinguish_data_from_other_data() -> None:
    before = read(rows(), eval=rows(20))
    assert {name: one["samples"] for name, one in before.items()} == {"train": 100, "eval": 20}
    assert differences(before, read(rows(), eval=rows(20))) == []
    assert differences(before, read(rows(80), eval=rows(1020))) == [
        "`train` had 100 samples and has 80 now", "`eval` had 20 samples and has 1,020 now",
    ]  # fmt: skip
    assert differences(before, read(rows(seed=1), eval=rows(20))) == [
        "`train` has as many samples as before, and others"
    ]
    assert differences(before, read(rows(), test=rows(20))) == ["`test` is new", "`eval` is gone"]


def test_a_set_that_gathers_is_read_as_one_that_gives_single_samples() -> None:
    part = hold_out(rows(), 0.5)[0]  # no Arrays any more
    before = read(part)
    assert before["train"]["content"].keys() == {"[]", "[0]", "[1]"}
    assert differences(before, read(hold_out(rows(), 0.5)[0])) == []
    assert differences(before, read(hold_out(rows(seed=1), 0.5)[0])) == [
        "`train` has as many samples as before, and others"
    ]


def test_content_is_not_read_where_something_else_identifies_it() -> None:
    assert read(rows(), known=True) == {"train": {"samples": 100}}
    assert differences(read(rows()), read(rows(seed=1), known=True)) == []


KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.full((3,), i, dtype=torch.bfloat16),
    "array": lambda i: np.full((2, 2), i, dtype=">i4"),
    "scalar": lambda i: np.float32(i),
    "nest": lambda i: {"image": (torch.tensor(i), [str(i), i, None]), "mask": {"x": float(i)}},
    "image": lambda i: Image.new("RGB", (2, 3), (i, 0, 0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sample_is_hashed(kind: str) -> None:
    sample = KINDS[kind]
    same, other = hashes(sample), hashes(lambda i: sample(i + (i == 99)))
    assert same == hashes(sample)
    assert same.keys() == other.keys()
    assert same != other  # the last sample is among those that are read


def test_of_unknown_objects_only_the_type_counts() -> None:
    assert hashes(lambda i: (object(), i)) == hashes(lambda i: (object(), i))
    assert hashes(lambda i: object()) != hashes(lambda i: KINDS)
    assert hashes(lambda i: torch.eye(2).to_sparse()) == contents(MapStyle(Items(lambda i: torch.zeros(2).to_sparse())))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(()),
        lambda: np.random.rand(),
        random.random,
        lambda: np.random.default_rng().integers(2),
        time.monotonic_ns,
    ],
)
def test_what_is_random_in_a_sample_is_left_out(draw: Callable[[], Any]) -> None:
    found = hashes(lambda i: (draw(), i))
    assert set(found) == {"[]", "[1]"}
    assert found == hashes(lambda i: (draw(), i))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_moves_no_random_numbers(num_workers: int) -> None:
    items = Items(lambda i: (i, torch.rand(()), np.random.rand(), random.random()))
    states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    found = read(items, num_workers=num_workers)["train"]
    assert (found["samples"], set(found["content"])) == (100, {"[]", "[0]"})
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == states  # type: ignore[index]
    assert bool(items.indices_read) == (num_workers == 0)  # as in training


@dataclass
class Rows(Dataset[Any]):
    """Samples in a file that is held open, behind a header."""

    path: Path

    def __post_init__(self) -> None:
        self.file = self.path.open("rb")
        self.header = self.file.read(16)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.file.seek(16 + 4000 * index)
        return torch.frombuffer(bytearray(self.file.read(4000)), dtype=torch.uint8)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_set_that_holds_a_file_open_reads_the_same_samples_afterwards(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(16) + b"".join(bytes([index]) * 4000 for index in range(100)))
    items = Rows(path)
    if num_workers:  # each worker of a loader opens its own, or all share one: torch's documentation
        items.file.close()
        assert read(items, num_workers=num_workers)["train"] == {"samples": 100}
        return
    assert "content" in read(items)["train"]
    assert [int(items[index][0]) for index in (1, 50, 99)] == [1, 50, 99]
    items.file.close()


def test_content_that_could_not_be_read_once_is_carried_over() -> None:
    before, slow, other = read(rows()), {"train": {"samples": 100}}, read(rows(seed=1))
    assert differences(before, slow) == []
    assert differences(carried_over(before, slow), other) == ["`train` has as many samples as before, and others"]
    assert carried_over(before, {"train": {"samples": 99}}) == {"train": {"samples": 99}}
    assert carried_over(None, slow) == slow


def test_where_samples_lie_is_not_what_they_are() -> None:
    assert hashes(lambda i: (f"/here/{i}.png", i)) == contents(MapStyle(Items(lambda i: (f"/there/{i}.png", i))))


def fails(index: int) -> Any:
    raise OSError(index)


def leaves(index: int) -> Any:
    raise SystemExit(index)


def test_a_set_that_cannot_be_read_is_known_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(Items(fails), eval=rows()) == {"train": {"samples": 100}, "eval": read(rows())["train"]}
    assert read(Items(leaves)) == {"train": {"samples": 100}}
    monkeypatch.setattr(ddpexp.data.fingerprint, "_SECONDS", 0.5)
    items = Items(lambda i: time.sleep(0.4))
    assert read(rows(), eval=items) == {"train": read(rows())["train"], "eval": {"samples": 100}}
    assert 1 <= len(items.indices_read) <= 2


def test_small_sets_are_read_too() -> None:
    assert read(rows(1)) != read(rows(1, seed=1))
    assert differences({"train": 3, "eval": {"samples": "x", "content": []}}, read(rows(), eval=rows())) == [
        "`train` is new", "`eval` had x samples and has 100 now",
    ]  # fmt: skip


def test_the_length_of_an_epoch_is_compared_where_the_data_has_an_order_of_its_own() -> None:
    before = {"train": {"samples": 10, "samples_per_epoch": 8}}
    assert differences(before, before) == []
    assert differences(before, {"train": {"samples": 10}}) == ["an epoch of `train` had 8 samples and has 10 now"]
    assert differences({"train": {"samples": 10}}, {"train": {"samples": 10, "samples_per_epoch": 10}}) == []
