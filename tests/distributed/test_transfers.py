"""Copies to a GPU: the order of what is queued for them, with stand-ins for the streams, which need a GPU.

What they do on one is in tests/test_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpexp.distributed import transfers
from ddpexp.distributed.transfers import moved

GPU = torch.device("cuda", 0)


class Streams:
    """Records what is queued on which stream."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, str]] = []
        self.current = "compute"

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def named(self, name: str) -> Any:
        streams = self

        class Stream:
            def __init__(self, *_: Any) -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                streams.queued.append((self.name, f"wait for {other.name}"))

        return Stream


class Large(Tensor):
    """A tensor in pinned memory, whose copies are recorded."""

    streams: Streams

    def is_pinned(self, device: Any = None) -> bool:
        return True

    def to(self, *arguments: Any, **named: Any) -> Tensor:
        assert (arguments, named) == ((GPU,), {"non_blocking": True})
        self.streams.queued.append((self.streams.current, "copy"))
        return self

    def record_stream(self, stream: Any) -> None:
        self.streams.queued.append((stream.name, "use"))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    found = Streams()
    Large.streams = found
    compute = found.named("compute")()
    monkeypatch.setattr(torch.cuda, "Stream", found.named("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    transfers._copy_stream.cache_clear()
    yield found
    transfers._copy_stream.cache_clear()


def test_a_large_copy_has_a_stream_of_its_own_for_which_later_work_waits(streams: Streams) -> None:
    moved(torch.zeros(1 << 20, dtype=torch.uint8).as_subclass(Large), GPU)
    assert streams.queued == [("copies", "copy"), ("compute", "wait for copies"), ("compute", "use")]


def test_a_small_copy_is_queued_with_the_rest(streams: Streams) -> None:
    moved(torch.zeros((1 << 20) - 1, dtype=torch.uint8).as_subclass(Large), GPU)
    assert streams.queued == [("compute", "copy")]
