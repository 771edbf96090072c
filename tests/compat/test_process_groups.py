from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddpexp.compat.process_groups import (
    clone_of_store,
    flight_records,
    functional_collectives_told,
    is_forked_from_cuda,
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_clone_of_the_store_shares_its_values(alone: None) -> None:
    clone_of_store().set("key", "value")
    assert clone_of_store().get("key") == b"value"


def test_the_flight_recorder_returns_json(alone: None) -> None:
    dist.all_reduce(torch.ones(1))
    records = [json.loads(text) for text in flight_records()]
    assert records
    assert all("version" in record for record in records)


def test_this_process_was_not_forked_from_one_with_cuda() -> None:
    assert is_forked_from_cuda() is False


def test_functional_collectives_are_told_by_their_names(alone: None) -> None:
    names: list[str] = []
    group: Any = dist.group.WORLD
    with functional_collectives_told(names.append):
        functional.all_reduce(torch.ones(1), "sum", group)
    functional.broadcast(torch.ones(1), 0, group)
    assert names == ["all_reduce"]
