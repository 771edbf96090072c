"""launcher=elastic: torch's elastic agent starts the workers of this machine, and restarts them when some are lost."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

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
from ddpexp.launch import Interrupted, Job
from ddpexp.launch.launchers import torchrun_env
from ddpexp.launch.launchers.agent_status import (
    FEW_CAME,
    JOB_ENDED,
    LIST_LOST,
    AgentStatus,
    Phase,
    memory,
    quiet_agent,
)
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.launch.workers import foreign
from ddpexp.launch.workers.client import Server
from ddpexp.settings.key import Key
from ddpexp.system import programs
from ddpexp.system.network import LOOPBACK, address_towards, check_loopback, check_resolves
from ddpexp.system.terminal import print_message

_END_SECONDS = 2.0  # for the command to end the agent
_PORT = "29400"  # torch's default, for endpoints without a port
_ANSWER_SECONDS = 1.0
_REPORTED_SECONDS = 10.0  # after which a wait is reported
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.02
_RESTART_NOTICE_SECONDS = 30.0  # for this machine's agent to notice a new round; it polls every second
_ABSENT_SECONDS = 5.0  # the same, where a new round is likely but not certain
_SAVE_SECONDS = 5  # beyond the grace period, for the ranks to end
_STORE_KEY = "ddpexp"  # every round of machines has its own store


@dataclass(frozen=True)
class Elastic(Launcher):
    """Run under torch's elastic agent: machines may join and leave within a range such as trainer.nodes=1:4.

    The same command is run on every machine.
    """

    accepts_range: ClassVar[bool] = True
    takes_slots: ClassVar[bool] = True
    restate_on_resume: ClassVar[tuple[str, ...]] = ("rdzv_endpoint", "rdzv_conf")  # torch unpickles data from there

    max_restarts: Annotated[int, Key(at_least=0)] = 3
    rdzv_backend: Literal["c10d", "etcd-v2"] = "c10d"
    rdzv_endpoint: str | None = None
    rdzv_id: str = "ddpexp"
    rdzv_conf: str | None = None

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the agent with this machine's workers and return the exit code of the job.

        Raises:
            RefusedError: a number of machines over which the batch does not divide, or an unreachable rendezvous.
            StoppedError: a signal to this process ended the run.
        """
        low, high = job.request.node_range
        here = resolve(job.request.gpus, job.request.device, job.request.backend, job.request.threads)
        job.check([replace(here, nodes=n, world_size=n * here.world_size) for n in range(low, high + 1)])
        rendezvous = self._rendezvous(high, job.request.timeout.init_seconds)
        check_loopback()
        if server is not None:
            server.close()  # each rank's command starts its own
        if self.rdzv_endpoint is not None:
            _check_unfinished(job)
        description = json.dumps(job.require_portable().describe()).encode()
        with memory(description) as described, AgentStatus.make(here.world_size) as status:
            arguments = [
                str(os.getpid()), f"--nnodes={low}:{high}", f"--nproc-per-node={here.world_size}",
                f"--max-restarts={self.max_restarts}", *rendezvous, f"--log-dir={os.devnull}", *programs.COMMAND,
                "member", str(described),
            ]  # fmt: skip
            argv = programs.python("ddpexp.launch.launchers.elastic_agent:main", argv=arguments)
            environ = {
                "OMP_NUM_THREADS": "1",  # silences torchrun's warning; each worker sets its own number of threads
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(job.request.grace_seconds) + _SAVE_SECONDS),
                **os.environ,
                **status.variables(),
            }
            environ |= quiet_agent(os.environ)

            watch = self._watch(job, status)
            try:
                code = foreign.run(
                    argv, environ, job.request.grace_seconds, (signal.SIGUSR1, signal.SIGQUIT),
                    ended=lambda: any(map(_ends_all, status.codes())),
                    lost=watch.gives_up,
                )  # fmt: skip
                if code == EXIT_DONE:
                    return code
                if watch.lost:
                    code = LIST_LOST
                if code in (JOB_ENDED, LIST_LOST):
                    _check_unfinished(job)  # the run may have finished
                self._explain(code, status.phase(), low, watch)
                return next(iter(status.codes()), EXIT_FAILED)
            except StoppedError as error:
                _report_stop(status.phase(), error)
                error.quiet = True  # where there are ranks, they record and report it
                raise

    def _watch(self, job: Job, status: AgentStatus) -> _Watch:
        endpoint, what = None, "torch's agent to start the workers"
        if self.rdzv_endpoint is not None:
            what = f"the machines of trainer.nodes={job.request.nodes} to meet at {self.rdzv_endpoint}"
            endpoint = _Endpoint(self.rdzv_endpoint) if self.rdzv_backend == "c10d" else None
        return _Watch(job, status, endpoint, what, self.rdzv_backend == "c10d")

    def _explain(self, code: int, phase: Phase, min_nodes: int, watch: _Watch) -> None:
        """Print why the agent has given up, where the ranks are not the reason."""
        endpoint = f"launcher.rdzv_endpoint={self.rdzv_endpoint}"
        if watch.lost and self.rdzv_endpoint is None:
            raise RefusedError(
                f"torch's agent has started no worker within trainer.timeout.init_seconds={watch.limit_seconds:g}",
                suggestion="See its output above, and ddpexp doctor.",
            )
        if code == LIST_LOST and phase == Phase.FIRST:
            raise RefusedError(
                "The machine that keeps the list of the machines does not answer",
                key=endpoint,
                suggestion="Start the command on that machine too, and check that this one can reach it.",
            )
        if code == LIST_LOST:
            text = f"{endpoint}, which keeps the list of the machines, does not answer any more"
            print_message(f"ddpexp: {text}: without it the ranks cannot be restarted here")
        elif code == JOB_ENDED:
            print_message(
                f"ddpexp: the job launcher.rdzv_id={self.rdzv_id} at {endpoint} has ended on the other machines: see "
                "their output"
            )
        elif code == FEW_CAME:
            error = RefusedError(
                f"Fewer than the {min_nodes} machines of trainer.nodes have joined within trainer.timeout.init_seconds",
                key=endpoint,
                suggestion="Start the command on the other machines too, or raise trainer.timeout.init_seconds.",
            )
            if not watch.has_run:
                raise error
            print_message(f"ddpexp: {error}")

    def member(self, job: Job, server: Server | None = None) -> int:
        """Run one rank that the agent has started; like `TorchrunEnv.launch`."""
        job = replace(job, request=replace(job.request, nodes="auto", gpus="auto"))
        status, local_rank = AgentStatus.here(), int(os.environ["LOCAL_RANK"])
        status.leave(local_rank, EXIT_DONE)  # replaces the code of an earlier attempt
        code = EXIT_FAILED
        try:
            code = torchrun_env.run(job, server, _STORE_KEY)
            return code
        except ENDS as error:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # both this machine's agent and another's may send it
            end = first_end(error)
            code = end.exit_code
            if _will_restart(end, status):
                code = EXIT_FAILED if isinstance(end, AbsentError) else EXIT_DONE
                return _leave_for_restart(end, job)
            raise
        finally:
            status.leave(local_rank, code)
            if _ends_all(code):
                _wait_for_agent_to_end()

    def _rendezvous(self, max_nodes: int, init_seconds: float) -> list[str]:
        if self.rdzv_backend == "etcd-v2" and importlib.util.find_spec("etcd") is None:
            raise RefusedError(
                "needs the package python-etcd",
                key="launcher.rdzv_backend",
                value="etcd-v2",
                suggestion="Install it: pip install 'ddpexp[etcd]'.",
            )
        if self.rdzv_endpoint is None:
            if max_nodes > 1 or self.rdzv_backend != "c10d":
                raise RefusedError(
                    "is missing",
                    key="launcher.rdzv_endpoint",
                    suggestion="Set the HOST:PORT of the rendezvous, the same on all machines.",
                )
            return ["--standalone", f"--local-addr={LOOPBACK}"]  # otherwise by this host's name, which need not resolve
        arguments = [
            f"--rdzv-backend={self.rdzv_backend}",
            f"--rdzv-endpoint={self.rdzv_endpoint}",
            f"--rdzv-id={self.rdzv_id}",
        ]
        host, port = _host_and_port(self.rdzv_endpoint)
        check_resolves(host, f"launcher.rdzv_endpoint={self.rdzv_endpoint}")
        if (address := address_towards(host, port)) is not None:
            # By default the agent publishes this host's name, which other containers often cannot resolve.
            arguments.append(f"--local-addr={address}")
        name = "join_timeout" if self.rdzv_backend == "c10d" else "timeout"  # for the machines to come
        settings = [self.rdzv_conf] if self.rdzv_conf else []
        if not re.search(rf"(^|,)\s*{name}\s*=", self.rdzv_conf or ""):
            settings.append(f"{name}={math.ceil(init_seconds)}")
        return [*arguments, f"--rdzv-conf={','.join(settings)}"]


@dataclass
class _Watch:
    """The watch over torch's agent, which may wait without end for its list of machines or for its first workers."""

    job: Job
    status: AgentStatus
    endpoint: _Endpoint | None
    what: str  # it waits for before there are workers
    limits_the_wait: bool  # with etcd torch's agent does
    has_run: bool = False
    lost: bool = False
    _reported: bool = False
    _since: float = field(default_factory=time.monotonic)

    @property
    def limit_seconds(self) -> float:
        """Return how long there may be no workers at first."""
        return self.job.request.timeout.init_seconds

    def gives_up(self) -> bool:
        """Return whether the agent is to be ended."""
        phase = self.status.phase()
        self.has_run = self.has_run or phase in (Phase.RUNS, Phase.LOOKS)
        restarting = bool(self.status.codes()) or phase == Phase.MEETS  # the ranks ran here and are to be restarted
        is_overdue = phase == Phase.FIRST and self._is_overdue()
        if self.endpoint is None:
            self.lost = is_overdue and self.limits_the_wait
        elif restarting or phase == Phase.FIRST:
            # Before the first round, and within the limit, it may still come up.
            self.lost = not self.endpoint.answers() and (restarting or is_overdue or _is_finished(self.job))
        return self.lost

    def _is_overdue(self) -> bool:
        waited = time.monotonic() - self._since
        if waited > _REPORTED_SECONDS and not self._reported:
            print_message(f"ddpexp: waiting for {self.what} (trainer.timeout.init_seconds={self.limit_seconds:g})")
            self._reported = True
        return waited > self.limit_seconds


@dataclass
class _Endpoint:
    """The rendezvous port, where one of the machines keeps the list of all; an agent that loses it may wait forever."""

    address: str
    _failures: int = 0
    _next: float = 0.0

    def answers(self) -> bool:
        """Return whether it can be connected to, checked once a second; False after two failures in a row."""
        if time.monotonic() < self._next:
            return self._failures < 2
        try:
            socket.create_connection(_host_and_port(self.address), timeout=_ANSWER_SECONDS).close()
            self._failures = 0
        except (OSError, ValueError, OverflowError):
            self._failures += 1
        self._next = time.monotonic() + _ANSWER_SECONDS
        return self._failures < 2


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """Return host and port of `launcher.rdzv_endpoint`; -1 for what is not a number."""
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", _PORT)
    return host.strip("[]"), int(port) if str(port).isdecimal() else -1


def _check_unfinished(job: Job) -> None:
    """Raise FinishedError if the requested run is finished; the ranks check for everything else that is refused."""
    with suppress(RefusedError):
        job.require_portable().foresee()


def _is_finished(job: Job) -> bool:
    try:
        _check_unfinished(job)
    except FinishedError:
        return True
    return False


def _will_restart(end: End, status: AgentStatus) -> bool:
    """Return whether a rank ends only to be restarted, by this machine's agent or by another machine's."""
    if isinstance(end, AbsentError):
        _wait_for_agent(status, _ABSENT_SECONDS)
        return True
    if not isinstance(end, StoppedError):
        return False
    if end.signum == signal.SIGUSR2:  # possibly from another machine's agent, before this machine's has noticed
        _wait_for_agent(status, _RESTART_NOTICE_SECONDS)
        return status.phase() == Phase.MEETS
    # When a rank has failed, the agent ends the others from within its check; other checks take only microseconds.
    for _ in range(2):
        if status.phase() not in (Phase.LOOKS, Phase.MEETS):
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _wait_for_agent(status: AgentStatus, seconds: float) -> None:
    """Wait until this machine's agent ends the ranks for a new round, or until a signal ends them."""
    deadline = time.monotonic() + seconds
    with suppress(StoppedError):
        while status.phase() != Phase.MEETS and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _leave_for_restart(end: End, job: Job) -> int:
    """Record how far the run is, print it once, and return the exit code."""
    if isinstance(end, StoppedError) and os.environ["RANK"] == "0":
        rest, *_ = job.lifecycle.end(Interrupted(end.step, end.saved)).splitlines()
        print_message(f"ddpexp: the machines meet again; {rest}")
    elif isinstance(end, AbsentError) and not end.quiet:
        print_message(f"ddpexp: {end}")
    return EXIT_FAILED


def _report_stop(phase: Phase, error: StoppedError) -> None:
    """Report a signal that arrived while there was no rank to report it."""
    if phase in (Phase.FIRST, Phase.MEETS):
        rest = (
            "nothing was started"
            if phase == Phase.FIRST
            else "what was saved before stays, and the same command resumes it"
        )
        print_message(f"ddpexp: interrupted by {signal.Signals(error.signum).name} while the machines met: {rest}")


def _ends_all(code: int) -> bool:
    """Return whether the ranks are not to be restarted: it would fail in the same way, or a user has stopped them."""
    return code == EXIT_REFUSED or code > 128


def _wait_for_agent_to_end() -> None:
    """Stay alive while the command ends the agent: on a rank's exit it would start a new round, and miss a signal."""
    with suppress(StoppedError):
        time.sleep(_END_SECONDS)
