"""How a rank's process ended, seen from outside: each rule on real pages and logs, without a process."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ddpexp.errors import EXIT_FAILED, Failure
from ddpexp.launch.supervise.severity import Severity
from ddpexp.launch.supervise.worker import Worker
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page
from ddpexp.launch.workers.rank_log import Log

HOST = os.uname().nodename


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


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (failure(kind="SIGKILL", signal=signal.SIGKILL), Severity.DEATH),
        (failure(kind="SIGTERM", signal=signal.SIGTERM), Severity.DEATH),
        (failure(kind="SIGABRT", signal=signal.SIGABRT), Severity.ERROR),  # libraries abort when a connection breaks
        (failure(), Severity.ERROR),
        (
            failure(message="cannot reach the store"),
            Severity.ERROR,
        ),  # only torch's own errors are about its connections
        (failure(kind="RuntimeError", message="shapes differ"), Severity.ERROR),
        (failure(kind="RuntimeError", message="[/third_party/Gloo/transport] timed out"), Severity.DISCONNECTION),
        (failure(kind="RuntimeError", message="Connection closed by peer"), Severity.DISCONNECTION),
        (failure(kind="RuntimeError", message="Connection reset by peer"), Severity.DISCONNECTION),
        (failure(kind="DistBackendError", message="NCCL error: remote process exited"), Severity.DISCONNECTION),
        (
            failure(kind="DistNetworkError", message="the client socket has failed to reach the Store"),
            Severity.DISCONNECTION,
        ),
        (failure(kind="DistStoreError", message="Store wait timed out"), Severity.DISCONNECTION),
        (failure(kind="DistBackendError", message="no such device"), Severity.ERROR),
        (failure(kind="PeerError", message="rank 1 is silent"), Severity.DISCONNECTION),
        (failure(kind="Ended", message="ended because another rank failed"), Severity.ENDED),
        (failure(kind="Ended", message="ended", signal=signal.SIGKILL), Severity.ENDED),  # by our own signal
    ],
    ids=lambda value: f"{value.kind}: {value.message}"[:40] if isinstance(value, Failure) else str(value),
)
def test_deaths_come_before_own_errors_before_broken_connections_before_ends_of_ours(
    found: Failure, expected: Severity
) -> None:
    assert Severity.of(found) is expected


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
        (255, "SystemExit", None, EXIT_FAILED, "the process ended with exit code 255 before its work was done"),
    ],
)
def test_a_silent_end_is_named_by_its_exit_code(
    worker: Callable[..., Worker], code: int, kind: str, signum: int | None, exit_code: int, message: str
) -> None:
    cause = worker().exit_seen(code)
    assert (cause.kind, cause.signal, cause.exit_code, cause.message) == (kind, signum, exit_code, message)


def test_what_the_kernel_has_counted_is_reported_of_a_kill(worker: Callable[..., Worker]) -> None:
    cause = worker().exit_seen(-9, "the kernel has killed 1 process for lack of memory")
    assert cause.message == "killed by SIGKILL: the kernel has killed 1 process for lack of memory"


def test_a_failure_seen_from_outside_has_its_place_and_the_last_lines_of_the_log(worker: Callable[..., Worker]) -> None:
    one = worker(3, step=4)
    one.log.add("".join(f"line {number}\n" for number in range(50)))
    Control(None, one.page).status.set_phase("evaluate")
    found = one.failure_seen("Hung", "it hangs", signum=6, exit_code=7)
    assert (found.rank, found.host, found.kind, found.message, found.phase) == (3, HOST, "Hung", "it hangs", "evaluate")
    assert (found.signal, found.exit_code) == (6, 7)
    assert found.step == 4  # as it has said
    assert found.traceback == "\n".join(f"line {number}" for number in range(30, 50))
    Control(None, one.page).status.step = 9
    assert one.failure_seen("Hung", "it hangs").step == 9  # its page is newer
    assert one.failure_seen("Hung", "it hangs").exit_code == EXIT_FAILED


def test_an_own_error_is_kept_with_the_output_of_its_rank(worker: Callable[..., Worker]) -> None:
    workers = [worker(rank) for rank in range(3)]
    failures = [None, failure(1, traceback="Traceback: line 3\n"), failure(2)]
    for one, own in zip(workers, failures, strict=True):
        one.log_failure(own)
    assert [one.log.last_lines(5) for one in workers] == [
        "",
        "Traceback: line 3\nValueError: no luck",
        "ValueError: no luck",
    ]
