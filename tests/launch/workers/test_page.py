"""The page that a rank shares with its command: what either end writes, the other one reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ddpexp.launch.workers.collectives import Call, Group, Record, unpack
from ddpexp.launch.workers.page import PHASES, Page


@pytest.fixture
def ends() -> Iterator[tuple[Page, Page]]:
    """The command's end and the rank's."""
    command, descriptor = Page.make()
    rank = Page(descriptor)
    os.close(descriptor)
    yield command, rank
    command.close()
    rank.close()


def test_what_a_rank_does_is_seen_by_its_command(ends: tuple[Page, Page]) -> None:
    command, rank = ends
    assert (command.status.step, command.status.phase) == (None, "start")
    for phase in PHASES:
        rank.status.set_phase(phase)
        assert command.status.phase == phase
    rank.status.step = 0
    assert command.status.step == 0
    before = command.status.progress
    rank.status.heartbeat()
    assert command.status.progress != before


def test_rank_zero_requests_an_agreement_by_its_number(ends: tuple[Page, Page]) -> None:
    command, rank = ends
    assert command.agreements.requested[0] == 0
    rank.agreements.request(3, "end")
    assert command.agreements.requested == (3, "end")


def test_of_agreements_for_one_step_the_last_in_order_is_done(ends: tuple[Page, Page]) -> None:
    command, rank = ends
    for number, what in enumerate(("save", "stop", "end"), start=1):
        command.agreements.commit(number, 7, what)  # type: ignore[arg-type]
    command.agreements.begin(3)
    assert rank.agreements.due(0, 6) == (0, None)
    assert rank.agreements.due(0, 7) == (3, "stop")


def test_a_stop_and_the_order_to_leave_are_two_things(ends: tuple[Page, Page]) -> None:
    command, rank = ends
    assert (rank.stop.requested, rank.stop.leaves_at_once) == (False, False)
    command.stop.request(15)
    assert (rank.stop.requested, rank.stop.leaves_at_once) == (True, False)
    command.stop.leave_at_once()
    assert (rank.stop.requested, rank.stop.leaves_at_once) == (True, True)


def test_an_answer_is_for_one_request_of_the_terminal(ends: tuple[Page, Page]) -> None:
    command, rank = ends
    assert rank.terminal.is_granted(1) is None
    command.terminal.answer(1, granted=True)
    assert (rank.terminal.is_granted(1), rank.terminal.is_granted(2)) == (True, None)
    command.terminal.answer(2, granted=False)
    assert rank.terminal.is_granted(2) is False


def test_a_record_is_the_answer_to_one_inquiry(ends: tuple[Page, Page]) -> None:
    command, rank = ends
    call = Call("all_reduce", "Float[10]", 10, "completed")
    record = Record([Group("0", "default_pg", (0, 1), 1, 1, {1: call})])
    rank.collectives.publish(1, record)
    packed = command.collectives.packed(1)
    assert packed is not None
    assert unpack(packed) == record
    assert command.collectives.packed(2) is None


def test_the_parts_of_a_page_do_not_overlap(ends: tuple[Page, Page]) -> None:
    command, rank = ends
    rank.status.step = 1
    rank.status.set_phase("train")
    rank.status.heartbeat()
    rank.agreements.request(1, "save")
    for number in range(1, 9):  # as many as there are slots
        command.agreements.commit(number, 2, "save")
    command.agreements.begin(8)
    command.stop.request(15)
    command.stop.leave_at_once()
    command.terminal.answer(5, granted=True)
    rank.collectives.publish(6, Record([]))
    assert (command.status.step, command.status.phase, command.status.progress[2]) == (1, "train", 1)
    assert command.agreements.requested == (1, "save")
    assert rank.agreements.due(0, 2) == (8, "save")
    assert (rank.stop.signal[0], rank.stop.leaves_at_once, rank.terminal.is_granted(5)) == (15, True, True)
    assert command.collectives.packed(6) == b"[true,[]]"


def test_no_cache_line_is_written_by_the_rank_and_the_command() -> None:
    page, descriptor = Page.make()
    os.close(descriptor)
    agreements = page.agreements
    by_rank = [*vars(page.status).values(), agreements.waits_for, agreements.waits_at, agreements.wish]
    by_rank += [page.collectives.inquiry, page.collectives.num_bytes]
    by_command = [agreements.newest, page.stop.signal, page.stop.at_once, page.terminal.decision]
    by_command += [word for slot in agreements.slots for word in (slot.number, slot.agreed)]
    for number, word in enumerate([*by_rank, *by_command], start=1):
        word[0] = number
    lines = [{number for number in content if number} for content in _cache_lines(page)]
    assert sum(map(len, lines)) == len(by_rank) + len(by_command)
    for numbers in lines:
        assert len({number <= len(by_rank) for number in numbers}) <= 1
    page.close()


def _cache_lines(page: Page) -> list[bytes]:
    content = bytes(page._memory)
    return [content[at : at + 64] for at in range(0, len(content), 64)]
