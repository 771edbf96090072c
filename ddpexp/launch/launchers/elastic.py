"""launcher=elastic: torch's elastic agent starts the workers of this machine.

And starts them again when some are lost.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ddpexp.errors import (
    ENDS,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REFUSED,
    AbsentError,
    End,
    FinishedError,
    RefusedError,
    StoppedError,
    first_end,
)
from ddpexp.launch import Job
from ddpexp.launch.launchers import torchrun_env
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.launchers.elastic_board import (
    FEW_CAME,
    JOB_ENDED,
    LIST_LOST,
    Phase,
    StoreMailbox,
    memory,
    quiet_agent,
)
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.launch.workers import foreign
from ddpexp.launch.workers.client import Server
from ddpexp.system.terminal import say

_END_SECONDS = 2.0  # for the command to end the agent
_PORT = "29400"  # torch's, where the endpoint names none
_ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.02
_HEAR_SECONDS = 30.0  # for this machine's agent to hear that the machines meet again; it asks every second
_ABSENT_SECONDS = 5.0  # the same, where that is likely and not certain
_SAVE_SECONDS = 5  # beyond the grace for the last words
_STORE_KEY = "ddpexp"  # every round of machines has a store of its own


@dataclass(frozen=True)
class Elastic(Launcher):
    """Type the same command on every machine; a range of machines, such as trainer.nodes=1:4, may come and go."""

    restate_on_resume: ClassVar = ("rdzv_endpoint", "rdzv_conf")  # torch unpickles what it finds there

    max_restarts: int = 3
    rdzv_backend: Literal["c10d", "etcd-v2"] = "c10d"
    rdzv_endpoint: str | None = None
    rdzv_id: str = "ddpexp"
    rdzv_conf: str | None = None

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the agent with this machine's workers and return the exit code of the job.

        Raises:
            RefusedError: a number of machines that the batch does not split over, or a rendezvous that is not there.
            StoppedError: a signal to this process ended the run.
        """
        low, high = self._range(job.request.nodes)
        here = resolve(job.request.gpus, job.request.device, job.request.backend, job.request.threads)
        for nodes in range(low, high + 1):
            try:
                job.check(replace(here, nodes=nodes, world_size=nodes * here.world_size))
            except RefusedError as error:
                raise RefusedError(f"with {nodes} of trainer.nodes={job.request.nodes}: {error}") from None
        rendezvous = self._rendezvous(high)
        keeper = _Keeper(self.rdzv_endpoint) if self.rdzv_endpoint is not None and self.rdzv_backend == "c10d" else None
        if server is not None:
            server.close()  # each worker's command has its own
        if self.rdzv_endpoint is not None:
            _check_unfinished(job)
        job.leads = False  # one of the commands that the agent starts does
        with memory(json.dumps(job.described()).encode()) as described, StoreMailbox.make(here.world_size) as board:
            words = [
                sys.executable, "-m", "ddpexp.launch.launchers.elastic_agent", str(os.getpid()),
                f"--nnodes={low}:{high}",
                f"--nproc-per-node={here.world_size}", f"--max-restarts={self.max_restarts}", *rendezvous,
                f"--log-dir={os.devnull}", "-m", "ddpexp", "member", str(described),
            ]  # fmt: skip
            saving = str(int(job.request.grace_seconds) + _SAVE_SECONDS)
            # Each worker sets its own number of threads.
            environ = {
                "OMP_NUM_THREADS": "1",
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": saving,
                **os.environ,
                **board.variables(),
            }
            environ |= quiet_agent(os.environ)

            def list_is_lost() -> bool:
                phase = board.phase()
                again = bool(board.codes()) or phase == Phase.MEETS  # the ranks ran here and are to be started again
                if keeper is None or not (again or phase == Phase.FIRST) or keeper.answers():
                    return False
                keeper.lost = again or _is_finished(job)  # there is a list to wait for only while a run lasts
                return keeper.lost

            try:
                code = foreign.run(
                    words, environ, job.request.grace_seconds, (signal.SIGUSR1, signal.SIGQUIT),
                    ended=lambda: any(map(_ends_all, board.codes())),
                    lost=list_is_lost,
                )  # fmt: skip
            except StoppedError as error:
                _say_where(board.phase(), error)
                raise
            if code == EXIT_DONE:
                return code
            if keeper is not None and keeper.lost:
                code = LIST_LOST
            if code in (JOB_ENDED, LIST_LOST):
                _check_unfinished(job)  # it may have ended well
            self._explain(code, board.phase(), low)
            return next(iter(board.codes()), EXIT_FAILED)

    def _explain(self, code: int, phase: Phase, least: int) -> None:
        """Say why the agent has given up, where it is not because of the ranks."""
        place = f"launcher.rdzv_endpoint={self.rdzv_endpoint}"
        if code == LIST_LOST and phase == Phase.FIRST:
            raise RefusedError(
                f"{place} does not answer, where the list of the machines is to be kept: start the command on that "
                "machine, too, "
                f"and see that this one reaches it."
            )
        if code == LIST_LOST:
            text = f"{place} does not answer any more, where the list of the machines is kept"
            say(f"ddpexp: {text}: without it the ranks cannot be started again here")
        elif code == JOB_ENDED:
            say(
                f"ddpexp: the job launcher.rdzv_id={self.rdzv_id} at {place} has ended on the other machines: see what "
                "they say"
            )
        elif code == FEW_CAME:
            text = f"fewer than the {least} machines of trainer.nodes have come to {place} in time"
            say(
                f"ddpexp: {text}: start the command on the others, too (join_timeout in launcher.rdzv_conf is the time "
                "in seconds)"
            )

    def member(self, job: Job, server: Server | None = None) -> int:
        """Be one rank that the agent has started; like `TorchrunEnv.launch`."""
        job.request = replace(job.request, nodes="auto", gpus="auto")
        board, local_rank = StoreMailbox.here(), int(os.environ["LOCAL_RANK"])
        board.leave(local_rank, EXIT_DONE)  # an attempt before this one may have left another
        code = EXIT_FAILED
        try:
            code = torchrun_env.run(job, server, _STORE_KEY)
            return code
        except ENDS as error:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # this machine's agent may send it after another's
            end = first_end(error)
            code = end.exit_code
            if _is_to_begin_again(end, board):
                code = EXIT_FAILED if isinstance(end, AbsentError) else EXIT_DONE
                return _leave_to_begin_again(end, job)
            raise
        finally:
            board.leave(local_rank, code)
            if _ends_all(code):
                _wait_for_the_end()

    def _range(self, nodes: int | str) -> tuple[int, int]:
        low, _, high = ("1" if nodes == "auto" else str(nodes)).partition(":")
        first, last = int(low), int(high or low)
        if first < 1 or last < first:
            raise RefusedError(
                f"trainer.nodes={nodes} is no range: the least number of machines comes first, such as 1:4."
            )
        return first, last

    def _rendezvous(self, most: int) -> list[str]:
        if self.max_restarts < 0:
            raise RefusedError(f"launcher.max_restarts={self.max_restarts}: use 0 or more.")
        if self.rdzv_backend == "etcd-v2" and importlib.util.find_spec("etcd") is None:
            raise RefusedError(
                "launcher.rdzv_backend=etcd-v2 needs the package python-etcd: pip install 'ddpexp[etcd]'."
            )
        if self.rdzv_endpoint is None:
            if most > 1 or self.rdzv_backend != "c10d":
                raise RefusedError(
                    "launcher.rdzv_endpoint is missing: name the place where the machines meet, HOST:PORT, the same on "
                    "all of them."
                )
            return ["--standalone"]
        words = [
            f"--rdzv-backend={self.rdzv_backend}",
            f"--rdzv-endpoint={self.rdzv_endpoint}",
            f"--rdzv-id={self.rdzv_id}",
        ]
        return [*words, *([f"--rdzv-conf={self.rdzv_conf}"] if self.rdzv_conf else [])]


@dataclass
class _Keeper:
    """The port where one of the machines keeps the list of them.

    An agent that has lost it waits for minutes or for ever.
    """

    endpoint: str
    lost: bool = False
    _failures: int = 0
    _next: float = 0.0

    def answers(self) -> bool:
        """Look once a second whether somebody listens there; what does not answer twice is gone."""
        if time.monotonic() < self._next:
            return self._failures < 2
        host, _, port = self.endpoint.rpartition(":") if ":" in self.endpoint else (self.endpoint, "", _PORT)
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
            self._failures = 0
        except (OSError, ValueError):
            self._failures += 1
        self._next = time.monotonic() + _ANSWER_SECONDS
        return self._failures < 2


def _check_unfinished(job: Job) -> None:
    """Raise FinishedError where the run that is asked for is finished.

    And leave what else is to be refused to the ranks.
    """
    with suppress(RefusedError):
        job.foresee()


def _is_finished(job: Job) -> bool:
    try:
        _check_unfinished(job)
    except FinishedError:
        return True
    return False


def _is_to_begin_again(end: End, board: StoreMailbox) -> bool:
    """Tell whether a rank ends only to be started again, by this machine's agent or by another machine's."""
    if isinstance(end, AbsentError):
        _wait_for_agent(board, _ABSENT_SECONDS)
        return True
    if not isinstance(end, StoppedError):
        return False
    if (
        end.signum == signal.SIGUSR2
    ):  # another machine's agent may have sent it, and this one's has still to hear of that
        _wait_for_agent(board, _HEAR_SECONDS)
        return board.phase() == Phase.MEETS
    # The agent ends the ranks that are left when one has failed. It looks for that all the time, but for microseconds
    # then.
    for _ in range(2):
        if board.phase() not in (Phase.LOOKS, Phase.MEETS):
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _wait_for_agent(board: StoreMailbox, seconds: float) -> None:
    """Wait until this machine's agent ends the ranks to meet the others, or a signal says that somebody ends them."""
    deadline = time.monotonic() + seconds
    with suppress(StoppedError):
        while board.phase() != Phase.MEETS and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _leave_to_begin_again(end: End, job: Job) -> int:
    """Write down how far the run is, say so once, and return the code to leave with."""
    if isinstance(end, StoppedError) and os.environ["RANK"] == "0":
        left, *_ = job.interrupt(end.step, end.saved).splitlines()
        say(f"ddpexp: the machines meet again; {left}")
    elif isinstance(end, AbsentError) and not end.quiet:
        say(f"ddpexp: {end}")
    return EXIT_FAILED


def _say_where(phase: Phase, error: StoppedError) -> None:
    """Say that a signal came while no rank was there to say so."""
    if phase in (Phase.FIRST, Phase.MEETS):
        left = (
            "nothing was started"
            if phase == Phase.FIRST
            else "what was saved before stays, and the same command resumes it"
        )
        say(f"ddpexp: interrupted by {signal.Signals(error.signum).name} while the machines met: {left}")


def _ends_all(code: int) -> bool:
    """Tell whether the ranks are not to be started again: nothing would be different, or somebody has stopped them."""
    return code == EXIT_REFUSED or code > 128


def _wait_for_the_end() -> None:
    """Let the command end the agent while all is quiet.

    One that sees a rank leave starts it again, and may miss a signal then.
    """
    with suppress(StoppedError):
        time.sleep(_END_SECONDS)
