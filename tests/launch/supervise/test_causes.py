"""Why ranks have ended: each rule on real pages and logs, without a process."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ddpexp.errors import EXIT_FAILED, Failure
from ddpexp.launch.supervise.causes import (
    ReportedFailure,
    Worker,
    cause_of,
    failure_of,
    log_failure,
    rank_causes,
    weight,
)
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page
from ddpexp.launch.workers.rank_log import Log

HOST = os.uname().nodename
GENUINE, OWN, CONNECTION, OURS = 0, 1, 2, 3  # the weights


def failure(rank: int = 0, kind: str = "ValueError", message: str = "no luck", **fields: Any) -> Failure:
    return Failure(rank=rank, host=HOST, kind=kind, message=message, step=None, phase="train", **fields)


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Make a rank with a page, a log and two sockets of its own: `worker(rank, code=1, failed_at=2.0)`."""
    with ExitStack() as stack:

        def make(rank: int = 0, **fields: Any) -> Worker:
            page, descriptor = Page.make()
            stack.callback(os.close, descriptor)
            stack.callback(page.close)
            ours, theirs = (stack.enter_context(one) for one in socket.socketpair())
            log = Log(None, rank)
            stack.callback(log.close)
            return Worker(rank=rank, control=Lines(ours), log=log, page=page, signals=theirs, **fields)

        yield make


def ranks(failures: list[Failure]) -> list[int]:
    return [one.rank for one in failures]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (failure(kind="SIGKILL", signal=signal.SIGKILL), GENUINE),
        (failure(kind="SIGTERM", signal=signal.SIGTERM), GENUINE),
        (failure(kind="SIGABRT", signal=signal.SIGABRT), OWN),  # libraries abort when a connection breaks
        (failure(), OWN),
        (failure(message="cannot reach the store"), OWN),  # only torch's own errors are about its connections
        (failure(kind="RuntimeError", message="shapes differ"), OWN),
        (failure(kind="RuntimeError", message="[/third_party/Gloo/transport] timed out"), CONNECTION),
        (failure(kind="RuntimeError", message="Connection closed by peer"), CONNECTION),
        (failure(kind="RuntimeError", message="Connection reset by peer"), CONNECTION),
        (failure(kind="DistBackendError", message="NCCL error: remote process exited"), CONNECTION),
        (failure(kind="DistNetworkError", message="the client socket has failed to reach the Store"), CONNECTION),
        (failure(kind="DistStoreError", message="Store wait timed out"), CONNECTION),
        (failure(kind="DistBackendError", message="no such device"), OWN),
        (failure(kind="PeerError", message="rank 1 is silent"), CONNECTION),
        (failure(kind="Ended", message="ended because another rank failed"), OURS),
        (failure(kind="Ended", message="ended", signal=signal.SIGKILL), OURS),  # by our own signal
    ],
    ids=lambda value: f"{value.kind}: {value.message}"[:40] if isinstance(value, Failure) else str(value),
)
def test_deaths_come_before_own_errors_before_broken_connections_before_ends_of_ours(
    found: Failure, expected: int
) -> None:
    assert weight(found) == expected


def test_what_a_rank_has_reported_itself_is_its_cause_however_it_ended(worker: Callable[..., Worker]) -> None:
    said = failure(rank=2)
    assert cause_of(worker(2, failure=said, code=-signal.SIGKILL, ended=True)) is said


def test_a_rank_that_was_ended_is_no_cause_whatever_signal_it_took(worker: Callable[..., Worker]) -> None:
    cause = cause_of(worker(1, code=-signal.SIGKILL, ended=True))
    assert (cause.kind, cause.message, cause.signal) == ("Ended", "ended because another rank failed", None)


@pytest.mark.parametrize(
    ("code", "kind", "signum", "exit_code", "message"),
    [
        (-9, "SIGKILL", 9, EXIT_FAILED, "killed by SIGKILL"),
        (-11, "SIGSEGV", 11, EXIT_FAILED, "killed by SIGSEGV"),
        (-40, "signal 40", 40, EXIT_FAILED, "killed by signal 40"),  # a real-time signal has no name
        (143, "SIGTERM", 15, EXIT_FAILED, "ended by SIGTERM, which did not come through the command"),
        (129, "SIGHUP", 1, EXIT_FAILED, "ended by SIGHUP, which did not come through the command"),
        (0, "SystemExit", None, EXIT_FAILED, "the process ended with exit code 0 before its work was done"),
        (1, "SystemExit", None, EXIT_FAILED, "the process ended with exit code 1 before its work was done"),
        (2, "SystemExit", None, EXIT_FAILED, "the process ended with exit code 2 before its work was done"),
        (3, "SystemExit", None, 3, "the process ended with exit code 3 before its work was done"),
        (125, "SystemExit", None, 125, "the process ended with exit code 125 before its work was done"),
        (126, "SystemExit", None, EXIT_FAILED, "the process ended with exit code 126 before its work was done"),
        (128, "SystemExit", None, EXIT_FAILED, "the process ended with exit code 128 before its work was done"),
        (None, "SystemExit", None, EXIT_FAILED, "the process ended with exit code 1 before its work was done"),
    ],
)
def test_a_silent_end_is_named_by_its_exit_code(
    worker: Callable[..., Worker], code: int | None, kind: str, signum: int | None, exit_code: int, message: str
) -> None:
    cause = cause_of(worker(code=code))
    assert (cause.kind, cause.signal, cause.exit_code, cause.message) == (kind, signum, exit_code, message)


def test_what_the_kernel_has_counted_is_reported_of_a_kill(worker: Callable[..., Worker]) -> None:
    cause = cause_of(worker(code=-9, killed_for="the kernel has killed 1 process for lack of memory"))
    assert cause.message == "killed by SIGKILL: the kernel has killed 1 process for lack of memory"


def test_a_failure_seen_from_outside_has_its_place_and_the_last_lines_of_the_log(worker: Callable[..., Worker]) -> None:
    one = worker(3, step=4)
    one.log.add("".join(f"line {number}\n" for number in range(50)))
    Control(None, one.page).status.set_phase("evaluate")
    found = failure_of(one, "Hung", "it hangs", signum=6, exit_code=7)
    assert (found.rank, found.host, found.kind, found.message, found.phase) == (3, HOST, "Hung", "it hangs", "evaluate")
    assert (found.signal, found.exit_code) == (6, 7)
    assert found.step == 4  # as it has said
    assert found.traceback == "\n".join(f"line {number}" for number in range(30, 50))
    Control(None, one.page).status.step = 9
    assert failure_of(one, "Hung", "it hangs").step == 9  # its page is newer
    assert failure_of(one, "Hung", "it hangs").exit_code == EXIT_FAILED


@pytest.mark.parametrize(
    ("fields", "well"),
    [
        ({"done": True, "code": 0}, True),
        ({"done": False, "code": 0}, False),
        ({"done": True, "code": 1}, False),
        ({"done": True, "code": None}, False),
        ({"stopped": True, "code": 143}, True),
        ({"stopped": True, "code": 0}, False),
        ({"stopped": False, "code": 143}, False),
        ({"stopped": True, "code": -15}, False),
    ],
    ids=str,
)
def test_only_a_rank_that_is_done_or_has_left_as_requested_has_ended_well(
    worker: Callable[..., Worker], fields: dict[str, Any], well: bool
) -> None:
    one = worker(**fields)
    assert one.well == well
    assert len(rank_causes([one], [])) == (not well and one.code is not None)


def test_ranks_that_live_or_ended_well_are_no_causes(worker: Callable[..., Worker]) -> None:
    assert rank_causes([worker(0), worker(1, done=True, code=0), worker(2, stopped=True, code=143)], []) == []
    living = worker(3, failure=failure(rank=3))  # it has said so and has not ended yet
    assert ranks(rank_causes([worker(0), living], [])) == [3]


def test_the_most_genuine_cause_comes_first_whenever_it_was_noticed(worker: Callable[..., Worker]) -> None:
    workers = [
        worker(0, code=1, failure=failure(0, kind="PeerError"), failed_at=1.0),
        worker(1, code=-15, ended=True, failed_at=0.5),
        worker(2, code=1, failure=failure(2), failed_at=3.0),
        worker(3, code=-9, failed_at=4.0),
    ]
    assert ranks(rank_causes(workers, [])) == [3, 2, 0, 1]


def test_of_causes_alike_the_earliest_comes_first_and_then_the_lowest_rank(worker: Callable[..., Worker]) -> None:
    times = {0: 2.0, 1: 1.0, 2: 1.0}
    workers = [worker(rank, code=1, failure=failure(rank), failed_at=at) for rank, at in times.items()]
    assert ranks(rank_causes(workers[::-1], [])) == [1, 2, 0]


def test_what_other_commands_report_is_ranked_among_this_ones(worker: Callable[..., Worker]) -> None:
    here = [worker(0, code=1, failure=failure(0), failed_at=2.0)]
    heard = [
        ReportedFailure(failure(4), OWN, 3.0),
        ReportedFailure(failure(5), GENUINE, 9.0),
        ReportedFailure(failure(6), OWN, 1.0),
        ReportedFailure(failure(7), OURS, 0.0),
    ]
    assert ranks(rank_causes(here, heard)) == [5, 6, 0, 4, 7]
    assert rank_causes([], []) == []


def test_ranks_that_must_exit_at_once_have_done_so_unless_they_name_an_error(worker: Callable[..., Worker]) -> None:
    killed = worker(0, code=-9, failed_at=1.0)
    named = worker(1, code=1, failure=failure(1), failed_at=2.0)
    lost = worker(2, code=1, failure=failure(2, kind="PeerError"), failed_at=1.5)
    workers = [killed, named, lost]
    assert ranks(rank_causes(workers, [])) == [0, 1, 2]
    assert ranks(rank_causes(workers, [], at_once=True)) == [1, 2, 0]
    assert ranks(rank_causes([killed, named], [ReportedFailure(failure(5), CONNECTION, 0.0)], at_once=True)) == [
        1,
        5,
        0,
    ]


def test_an_own_error_is_kept_with_the_output_of_its_rank(worker: Callable[..., Worker]) -> None:
    silent, spoke = worker(0, code=1), worker(1, failure=failure(1, traceback="Traceback: line 3\n"))
    bare = worker(2, failure=failure(2))
    for one in (silent, spoke, bare):
        log_failure(one)
    assert [one.log.last_lines(5) for one in (silent, spoke, bare)] == [
        "",
        "Traceback: line 3\nValueError: no luck",
        "ValueError: no luck",
    ]
