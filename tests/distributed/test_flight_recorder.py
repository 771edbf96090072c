"""torch's flight recorder, read in a process of one rank, and how a supervisor gets what it holds."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddpexp.distributed import flight_recorder
from ddpexp.launch.workers.collectives import Record, unpack
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page

LONG = 30.0


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group(group_desc="flight")  # of the default one, calls of other tests may be left
        for size in (1000, 10):
            dist.all_reduce(torch.ones(size), group=group)
        made = flight_recorder.read()
        assert made is not None
        if not made.groups:
            pytest.skip("this torch leaves the recorder off, and it was made before this test")
        yield made
    finally:
        dist.destroy_process_group()


def test_the_recorder_of_this_torch_has_the_format_that_is_read(record: Record) -> None:
    group = record.groups[-1]
    assert group.ranks in ((), (0,))  # gloo's is empty
    assert group.description == "flight"
    newest = [group.calls[number] for number in sorted(group.calls)][-2:]
    assert [str(call) for call in newest] == ["all_reduce (Float[1000])", "all_reduce (Float[10])"]
    assert [call.elements for call in newest] == [1000, 10]


def test_an_inquiry_is_answered_from_a_thread_while_the_rank_does_something_else(record: Record) -> None:
    ours, theirs = socket.socketpair()
    page, descriptor = Page.make()
    control, lines = Control(theirs, Page(descriptor)), Lines(ours)
    flight_recorder.answer_inquiries(control, {"TORCH_FR_BUFFER_SIZE": "2000"})
    for number in (1, 2):
        assert page.collectives.packed(number) is None
        lines.inquire(number)
        end = time.monotonic() + LONG
        while page.collectives.packed(number) is None and time.monotonic() < end:
            time.sleep(0.01)
        packed = page.collectives.packed(number)
        assert packed is not None
        assert unpack(packed).groups[-1].calls == record.groups[-1].calls
    control.send("done")  # the other direction is not disturbed
    assert lines.read() == ([{"kind": "done"}], True)
    ours.close()
    assert control.wait_for_inquiry() is None
    theirs.close()
    os.close(descriptor)


@pytest.mark.parametrize(
    ("chosen", "added"),
    [
        ({}, {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, {}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}, {}),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/logs/trace_"}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
    ],
)
def test_the_recorder_is_on_and_writes_no_file_unless_the_user_has_chosen(
    chosen: dict[str, str], added: dict[str, str]
) -> None:
    environ = dict(chosen)
    flight_recorder.enable(environ)
    assert environ == {**chosen, **added}
