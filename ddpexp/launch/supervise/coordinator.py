"""Run one command's part of a job: connect to the others, begin or enter the job, start its workers, supervise them.

Used by all launchers.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ddpexp.errors import (
    ENDS,
    EXIT_FAILED,
    AbsentError,
    DdpexpError,
    Failure,
    FinishedError,
    RefusedError,
    StoppedError,
)
from ddpexp.launch import Failed, Job, Layout, Participants, Work, WorkerRequest
from ddpexp.launch.rendezvous import starter
from ddpexp.launch.rendezvous.environment import LaunchEnvironment
from ddpexp.launch.rendezvous.kinds import Rendezvous
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.launch.rendezvous.meeting import join, lead
from ddpexp.launch.rendezvous.wire import Meeting, Peer
from ddpexp.launch.supervise.assignment import RankAssignment, assign_ranks, versions
from ddpexp.launch.supervise.supervisor import Supervisor
from ddpexp.launch.supervise.worker import Worker
from ddpexp.launch.workers import cleanup
from ddpexp.launch.workers.client import Server
from ddpexp.launch.workers.control import CONTROL_FD, PAGE_FD, SIGNALS_FD, STORE_FD, TERMINAL_FD
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system import start
from ddpexp.system.gpus import Device, worker_variables
from ddpexp.system.hardware import cores_quota, usable_core_numbers, visible_devices
from ddpexp.system.limits import check_open_files
from ddpexp.system.network import LOOPBACK, boot_id, check_loopback, interface_of, interface_variables, is_loopback
from ddpexp.system.process import end_with_parent
from ddpexp.system.terminal import Terminal
from ddpexp.system.terminal_mode import descriptor_of_terminal

_PARTING_SECONDS = 10.0  # for the leading command to report the reason before this one exits
_READY_SECONDS = 24 * 3600.0  # for other commands to prepare data


def run(
    job: Job, environment: LaunchEnvironment, rendezvous: Rendezvous | None, server: Server, debugs: bool = False
) -> int:
    """Run this command's part of the job and return the exit code.

    `rendezvous` is how the commands of the job find one another, if there are several. `debugs`: where there is one,
    ranks at a breakpoint get this command's terminal, if it has one.

    Raises:
        RefusedError, WorkerError, StoppedError: like `Launcher.launch`.
    """
    if environment.ends_with_parent:
        report = partial(starter_lost, job, environment.starter, environment.index == 0)
        end_with_parent(EXIT_FAILED, report, start.parent(), partial(starter.was_lost, environment.starter))
    request, external = job.request, environment.externally_launched
    external_workers = (environment.local_world_size or 1) if external else None
    local = resolve(request.gpus, request.device, request.backend, request.threads, external_workers)
    world_size = environment.size if external else local.world_size * environment.size
    layout = replace(local, nodes=environment.nodes or 1, world_size=world_size)
    job.check([layout])
    workers = 1 if external else local.world_size
    check_open_files(workers, world_size)
    if environment.size == 1 or rendezvous is None:
        if world_size > 1:
            check_loopback()
        owners = [environment.owner] if environment.owner else []
        job.check_vacant()
        work = job.lifecycle.begin(layout, Participants([platform.node()], owners, environment.restarted))
        assignment = RankAssignment(0, world_size, 0, world_size, 0, False, True)
        return _supervise(job.request, work, layout, assignment, None, server, debugs=debugs)
    handshake = {
        "index": environment.index,
        "size": environment.size,
        "host": platform.node(),
        "boot": boot_id(),
        "versions": versions(),
        "identity": job.identity,
        "layout": asdict(layout),
        "workers": workers,
        "externally_launched": external,
        "local_rank": environment.local_rank,
        "local_world_size": environment.local_world_size,
        "cores": usable_core_numbers(),
        "quota": cores_quota(),
        "gpus": [device.uuid for device in _devices(layout)],
        "owner": environment.owner,
    }
    part = _lead if environment.index == 0 else _follow
    return part(job, environment, rendezvous, handshake, server)


def starter_lost(job: Job, name: str, leads: bool, parent: int) -> None:
    """Record and report, in the leading command, that the launcher which started it was killed."""
    if not leads:
        return
    text = f"{name} (process {parent}), which started this command, is gone: it was killed, and its ranks end with it"
    job.lifecycle.end(Failed(Failure.of_command("StarterLost", text), workers_live=True))
    with suppress(OSError):  # the launcher may have been the reader of this output
        print(f"ddpexp: {text}", file=sys.stderr, flush=True)


def _lead(
    job: Job, environment: LaunchEnvironment, rendezvous: Rendezvous, handshake: dict[str, Any], server: Server
) -> int:
    unit, seconds = _unit(environment), job.request.timeout.init_seconds
    of_variables = environment.starter if environment.ends_with_parent else None
    meeting, others = lead(rendezvous, handshake["size"], seconds, unit, of_variables)
    try:
        try:
            handshakes = [handshake, *others]
            layout, assignments = assign_ranks(handshakes, job.request.threads, unit)
            for peer in meeting.peers:
                peer.first_rank = assignments[peer.index].first_rank
            job.check([layout])
            if is_loopback(meeting.address):
                check_loopback()
            owners = [handshake["owner"] for handshake in handshakes if handshake["owner"]]
            hosts = [handshake["host"] for handshake in handshakes]
            job.check_vacant()
            work = job.lifecycle.begin(layout, Participants(hosts, owners, environment.restarted))
            go = {"kind": "go", "layout": asdict(layout), "shared": work.shared}
            # The first command of a host prepares the data there; the others find it ready.
            for first in (True, False):
                peers = [peer for peer in meeting.peers if assignments[peer.index].first_on_host == first]
                for peer in peers:
                    peer.send({**go, "assignment": asdict(assignments[peer.index])})
                _wait_until_ready(peers, unit)
        except ENDS as error:
            kind = "absent" if _is_absence(error) else "refused"
            if isinstance(error, FinishedError):
                kind = "finished"
            known = error if isinstance(error, DdpexpError) else DdpexpError(str(error))
            meeting.send({"kind": kind, "error": known.as_dict()})
            raise
        with socket.create_server((meeting.address, 0), backlog=4096) as store:
            meeting.send({"kind": "start", "store": list(store.getsockname()[:2])})
            return _supervise(job.request, work, layout, assignments[0], meeting, server, store)
    except ENDS:
        # The others exit when this connection closes, so it stays open until this command has reported the error and
        # exits: launchers may kill all remaining commands as soon as one exits.
        meeting = Meeting(0)
        raise
    finally:
        meeting.close()


def _unit(environment: LaunchEnvironment) -> str:
    return "rank" if environment.externally_launched else "node"


def _wait_until_ready(peers: Sequence[Peer], unit: str) -> None:
    for peer in peers:
        try:
            answer = peer.receive(time.monotonic() + _READY_SECONDS)
        except EOFError:
            raise AbsentError(
                f"{unit} {peer.index} on {peer.host} ended before the job began", suggestion="See its output there."
            ) from None
        if answer["kind"] == "refused":
            raise RefusedError.from_dict(answer["error"])


def _is_absence(error: BaseException) -> bool:
    """Return whether the job itself is fine, but a command is missing or was stopped before the job began."""
    return isinstance(error, AbsentError | StoppedError)


def _follow(
    job: Job, environment: LaunchEnvironment, rendezvous: Rendezvous, handshake: dict[str, Any], server: Server
) -> int:
    meeting = join(rendezvous, handshake, job.request.timeout.init_seconds, _unit(environment))
    [leader] = meeting.peers
    has_terminal = not environment.shares_terminal
    meeting.speaks = has_terminal  # until it is known which command of this host reports
    entered = False
    try:
        go = _next(leader, "go")
        assignment, layout = RankAssignment(**go["assignment"]), Layout(**go["layout"])
        meeting.speaks = assignment.first_on_host and leader.host != platform.node() and has_terminal
        entered = True
        try:
            work = job.lifecycle.enter(go["shared"], layout)
        except RefusedError as error:
            leader.send({"kind": "refused", "error": error.as_dict()})
            raise
        leader.send({"kind": "ready"})
        start = _next(leader, "start")
        return _supervise(job.request, work, layout, assignment, meeting, server, tuple(start["store"]))
    except (RefusedError, FinishedError) as error:
        rendezvous.close()  # the leading command may have been killed before it could
        # The leading command reports it; on another host a user may be looking at this terminal.
        error.quiet = leader.host == platform.node() or not meeting.speaks
        with suppress(EOFError, TimeoutError):
            leader.receive(time.monotonic() + _PARTING_SECONDS)
        raise
    except StoppedError as error:
        error.quiet = entered  # the leading command records and reports it
        raise
    finally:
        meeting.close()


def _next(leader: Peer, kind: str) -> dict[str, Any]:
    try:
        message = leader.receive(time.monotonic() + _READY_SECONDS)
    except (EOFError, TimeoutError):
        raise AbsentError(
            f"the command of rank zero on {leader.host} ended before the job began", suggestion="See its output there."
        ) from None
    if message["kind"] == "refused":
        raise RefusedError.from_dict(message["error"])
    if message["kind"] == "finished":
        raise FinishedError.from_dict(message["error"])
    if message["kind"] == "absent":
        raise AbsentError.from_dict(message["error"])
    if message["kind"] != kind:
        raise RefusedError(
            f"the command of rank zero on {leader.host} uses another version of ddpexp",
            suggestion="Install the same version.",
        )
    return message


def _devices(layout: Layout) -> tuple[Device, ...]:
    """Return the GPUs that this command sees, if the workers use GPUs."""
    return visible_devices() if layout.device == "cuda" else ()


def worker_environment(
    layout: Layout,
    assignment: RankAssignment,
    number: int,
    store: tuple[str, int],
    address: str,
    devices: Sequence[Device] = (),
) -> dict[str, str]:
    """Return the environment variables of worker `number` of this command.

    `address` is this host's own, `devices` are the GPUs that this command sees.
    """
    host, port = store
    variables = {
        "RANK": str(assignment.first_rank + number),
        "LOCAL_RANK": str(assignment.local_rank + number),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(assignment.local_world_size),
        "GROUP_RANK": str(assignment.node_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
    if layout.device == "cuda":
        variables |= worker_variables(devices, number if assignment.own_gpus else assignment.local_rank + number)
    if not is_loopback(host):
        interface = interface_of(address)
        if interface:
            variables |= interface_variables(interface)
    return variables


def _supervise(
    request: WorkerRequest,
    work: Work,
    layout: Layout,
    assignment: RankAssignment,
    meeting: Meeting | None,
    server: Server,
    store: socket.socket | tuple[str, int] | None = None,
    debugs: bool = False,
) -> int:
    """Start this command's workers and supervise them to the end."""
    terminal = descriptor_of_terminal() if debugs else None
    # The store's socket is bound here and passed to rank zero, so that the port is reserved from the start, on the
    # chosen interface only: a store that torch opens itself listens on every interface, and a port that is chosen,
    # closed and opened again can be lost to another process.
    local_store = socket.create_server((LOOPBACK, 0), backlog=1024) if store is None else None
    listener = local_store or (store if isinstance(store, socket.socket) else None)
    began = time.time()
    address: tuple[str, int] = listener.getsockname()[:2] if listener else store  # type: ignore[assignment]
    host, devices = meeting.address if meeting else LOOPBACK, _devices(layout)
    try:
        workers = []
        for number in range(assignment.workers):
            environ = worker_environment(layout, assignment, number, address, host, devices)
            rank, uses_cuda = assignment.first_rank + number, layout.device == "cuda"
            workers.append(_start_worker(work, server, rank, environ, listener, uses_cuda, terminal))
    finally:
        if listener is not None:
            listener.close()
    try:
        supervisor = Supervisor(
            server,
            workers,
            Terminal(),
            meeting,
            request,
            layout=layout,
            terminal_descriptor=terminal,
            requests=work.requests,
        )
        return supervisor.run()
    except BaseException:
        cleanup.clear(began, of_gpus=layout.device == "cuda")
        raise
    finally:
        for worker in workers:
            worker.log.close()
            worker.page.close()


def _start_worker(
    work: Work,
    server: Server,
    rank: int,
    environ: Mapping[str, str],
    store: socket.socket | None,
    uses_cuda: bool,
    terminal: int | None,
) -> Worker:
    control, worker_control = socket.socketpair()
    signals, worker_signals = socket.socketpair()
    worker_signals.setblocking(False)  # a signal handler writes to it
    page, page_descriptor = Page.make()
    descriptors = {
        CONTROL_FD: worker_control.fileno(),
        PAGE_FD: page_descriptor,
        SIGNALS_FD: worker_signals.fileno(),
    }
    if rank == 0 and store is not None:
        descriptors[STORE_FD] = store.fileno()
    if terminal is not None:
        descriptors[TERMINAL_FD] = terminal
    log = Log(work.logs, rank)
    server.start(rank, work.entry, work.arguments, environ, log.fileno(), descriptors, uses_cuda)
    worker_control.close()
    worker_signals.close()
    os.close(page_descriptor)
    return Worker(rank, Lines(control), log, page, signals)
