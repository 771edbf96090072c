"""What every command of a job does: meet the others, agree, begin or enter the job, start its workers, watch them."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from itertools import accumulate
from typing import Any

from ddpexp.errors import ENDS, EXIT_FAILED, AbsentError, Failure, FinishedError, RefusedError, StoppedError
from ddpexp.launch import Job, Layout, Participants
from ddpexp.launch.rendezvous import starter
from ddpexp.launch.rendezvous.environment import LaunchEnvironment
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.launch.rendezvous.meeting import Meeting, Rendezvous, join, lead
from ddpexp.launch.supervise.causes import Worker
from ddpexp.launch.supervise.supervisor import supervise
from ddpexp.launch.workers import cleanup
from ddpexp.launch.workers.client import Server
from ddpexp.launch.workers.control import CONTROL_FD, PAGE_FD, SIGNALS_FD, STORE_FD, Lines, SharedStatus
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system import start
from ddpexp.system.hardware import cores_quota, gpu_names, usable_core_numbers
from ddpexp.system.limits import check_open_files
from ddpexp.system.network import LOOPBACK, boot_id, interface_of, is_loopback
from ddpexp.system.process import end_with_parent
from ddpexp.system.terminal import Terminal

_PARTING_SECONDS = 10.0  # for the leading command to say why before this one leaves


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of one command."""

    first_rank: int
    workers: int
    local_rank: int  # of the first
    local_world_size: int
    node_rank: int
    own_gpus: bool  # the command sees GPUs that no other of the host sees: its workers count from the first of them
    first_on_host: bool


def run(job: Job, place: LaunchEnvironment, way: Rendezvous | None, server: Server) -> int:
    """Do this command's part of the job and return the exit code; `way` leads to the other commands, if there are any.

    Raises:
        RefusedError, WorkerError, StoppedError: like `Launcher.launch`.
    """
    if place.ends_with_parent:
        report = partial(starter_lost, job, place.starter, place.index == 0)
        end_with_parent(EXIT_FAILED, report, start.parent(), partial(starter.was_lost, place.starter))
    asked = job.request
    told = (place.local_world_size or 1) if place.told else None
    mine = resolve(asked.gpus, asked.device, asked.backend, asked.threads, told)
    world_size = place.size if place.told else mine.world_size * place.size
    layout = replace(mine, nodes=place.nodes or 1, world_size=world_size)
    job.check(layout)
    check_open_files(1 if place.told else mine.world_size, world_size)
    if place.size == 1 or way is None:
        job.begin(layout, Participants([platform.node()], [place.owner] if place.owner else [], place.restarted))
        return _watch(job, layout, RankAssignment(0, world_size, 0, world_size, 0, False, True), None, server)
    who = "rank" if place.told else "node"
    handshake = {
        "index": place.index,
        "size": place.size,
        "host": platform.node(),
        "boot": boot_id(),
        "versions": versions(),
        "identity": job.identity,
        "layout": asdict(layout),
        "workers": 1 if place.told else mine.world_size,
        "told": place.told,
        "local_rank": place.local_rank,
        "local_world_size": place.local_world_size,
        "cores": usable_core_numbers(),
        "quota": cores_quota(),
        "gpus": gpu_names() if layout.device == "cuda" else [],
        "owner": place.owner,
    }
    if place.index == 0:
        return _lead(job, place, way, handshake, asked.timeout.init_seconds, who, server)
    return _follow(job, place, way, handshake, asked.timeout.init_seconds, who, server)


def starter_lost(job: Job, name: str, leads: bool, parent: int) -> None:
    """Write down and say, in the command that leads, that what started it has been killed."""
    if not leads:
        return
    text = f"{name} (process {parent}), which started this command, is gone: it was killed, and its ranks end with it"
    job.fail(Failure(rank=0, host=platform.node(), kind="StarterLost", message=text))
    with suppress(OSError):  # it may have been what read this
        print(f"ddpexp: {text}", file=sys.stderr, flush=True)


def _lead(
    job: Job,
    place: LaunchEnvironment,
    way: Rendezvous,
    handshake: dict[str, Any],
    seconds: float,
    who: str,
    server: Server,
) -> int:
    meeting, others = lead(way, handshake["size"], seconds, who)
    try:
        try:
            handshakes = [handshake, *others]
            layout, assignments = settle(handshakes, job.request.threads, who)
            for peer in meeting.peers:
                peer.first_rank = assignments[peer.index].first_rank
            job.check(layout)
            owners = [one["owner"] for one in handshakes if one["owner"]]
            job.begin(layout, Participants([one["host"] for one in handshakes], owners, place.restarted))
            go = {"kind": "go", "layout": asdict(layout), "shared": job.shared()}
            # The first command of a host makes the data ready there; the others find it so.
            for first in (True, False):
                called = [peer for peer in meeting.peers if assignments[peer.index].first_on_host == first]
                for peer in called:
                    peer.send({**go, "seat": asdict(assignments[peer.index])})
                _hear_ready(called, who)
        except ENDS as error:
            kind = "finished" if isinstance(error, FinishedError) else "absent" if _is_absence(error) else "refused"
            meeting.send({"kind": kind, "message": str(error)})
            raise
        with socket.create_server((meeting.address, 0), backlog=4096) as store:
            meeting.send({"kind": "start", "store": list(store.getsockname()[:2])})
            return _watch(job, layout, assignments[0], meeting, server, store)
    except ENDS:
        # The others leave when this connection closes, which is when this command has said why and ended: what started
        # them may kill all that is left as soon as one leaves.
        meeting = Meeting(0)
        raise
    finally:
        meeting.close()


def _hear_ready(peers: Sequence[Any], who: str) -> None:
    for peer in peers:
        try:
            answer = peer.receive(time.monotonic() + 24 * 3600)  # data may have to be made ready there
        except EOFError:
            raise AbsentError(
                f"{who} {peer.index} on {peer.host} ended before the job began: see what it says there."
            ) from None
        if answer["kind"] == "refused":
            raise RefusedError(answer["message"])


def _is_absence(error: BaseException) -> bool:
    """Tell whether nothing is wrong with the job: a command of it is gone, or was stopped before it began."""
    return isinstance(error, AbsentError | StoppedError)


def _follow(
    job: Job,
    place: LaunchEnvironment,
    way: Rendezvous,
    handshake: dict[str, Any],
    seconds: float,
    who: str,
    server: Server,
) -> int:
    meeting = join(way, handshake, seconds, who)
    [leader] = meeting.peers
    meeting.speaks = not place.shares_terminal  # until it is known which command of this host does
    try:
        go = _next(leader, "go")
        assignment, layout = RankAssignment(**go["seat"]), Layout(**go["layout"])
        meeting.speaks = assignment.first_on_host and leader.host != platform.node() and not place.shares_terminal
        job.leads = False
        try:
            job.enter(go["shared"], layout)
        except RefusedError as error:
            leader.send({"kind": "refused", "message": str(error)})
            raise
        leader.send({"kind": "ready"})
        start = _next(leader, "start")
        return _watch(job, layout, assignment, meeting, server, tuple(start["store"]))
    except (RefusedError, FinishedError) as error:
        way.close()  # the one that leads may have been killed before it could
        # The one that leads says so; on another host somebody may be looking at this terminal.
        error.quiet = leader.host == platform.node() or not meeting.speaks
        with suppress(EOFError, TimeoutError):
            leader.receive(time.monotonic() + _PARTING_SECONDS)
        raise
    finally:
        meeting.close()


def _next(leader: Any, kind: str) -> dict[str, Any]:
    try:
        message: dict[str, Any] = leader.receive(time.monotonic() + 24 * 3600)
    except (EOFError, TimeoutError):
        raise AbsentError(
            f"the command of rank zero on {leader.host} ended before the job began: see what it says there."
        ) from None
    if message["kind"] == "refused":
        raise RefusedError(message["message"])
    if message["kind"] == "finished":
        raise FinishedError(message["message"])
    if message["kind"] == "absent":
        raise AbsentError(message["message"])
    if message["kind"] != kind:
        raise RefusedError(
            f"the command of rank zero on {leader.host} is of another version of ddpexp: install the same one."
        )
    return message


def versions() -> dict[str, str | None]:
    """Return the versions of what all commands of a job must have alike, without importing it."""
    found: dict[str, str | None] = {}
    for name in ("ddpexp", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None  # run from a folder of its own
    return {**found, "Python": "{}.{}".format(*sys.version_info)}


def settle(
    handshakes: Sequence[Mapping[str, Any]], threads: str | int, who: str
) -> tuple[Layout, list[RankAssignment]]:
    """Give every command its ranks, from what all have said of themselves, by index.

    Raises:
        RefusedError: versions or configurations that differ, devices that differ, or too few GPUs for the workers of a
        host.
    """
    for one in handshakes[1:]:
        for name, version in handshakes[0]["versions"].items():
            if (found := one.get("versions", {}).get(name)) != version:
                raise RefusedError(
                    f"{name} is {version or 'of no known version'} on {who} 0 ({handshakes[0]['host']}) and "
                    f"{found or 'of no known version'} on {who} {one['index']} ({one['host']}): install the same "
                    "version "
                    f"on all of them."
                )
        difference = first_difference(handshakes[0]["identity"], one["identity"])
        if difference:
            key, one, other = difference
            raise RefusedError(
                f"{key} is {one} on {who} 0 ({handshakes[0]['host']}) and {other} on {who} {one['index']} "
                f"({one['host']}): "
                f"start all of them with the same words."
            )
        for name in ("device", "backend"):
            if one["layout"][name] != handshakes[0]["layout"][name]:
                raise RefusedError(
                    f"{who} 0 ({handshakes[0]['host']}) would run on {name} {handshakes[0]['layout'][name]} and "
                    f"{who} {one['index']} ({one['host']}) on {one['layout'][name]}: type trainer.{name}=... to make "
                    "them equal."
                )
    hosts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in handshakes:
        hosts.setdefault((one["host"], one["boot"]), []).append(one)
    *ranks_before, world_size = accumulate((one["workers"] for one in handshakes), initial=0)
    assignments: dict[int, RankAssignment] = {}
    for node_rank, members in enumerate(hosts.values()):
        *local_ranks, local_size = accumulate((member["workers"] for member in members), initial=0)
        own_gpus = _own_gpus(members, local_size)
        if _told_all(members):
            local_ranks = [member["local_rank"] for member in members]
        for position, member in enumerate(members):
            assignments[member["index"]] = RankAssignment(
                ranks_before[member["index"]], member["workers"], local_ranks[position], local_size, node_rank,
                own_gpus,
                position == 0,
            )  # fmt: skip
    layout = Layout(**handshakes[0]["layout"])
    found = min(_threads(members) for members in hosts.values()) if threads == "auto" else int(threads)
    return replace(layout, nodes=len(hosts), world_size=world_size, threads=found), [
        assignments[index] for index in range(len(handshakes))
    ]


def _told_all(members: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether what started the workers of a host has numbered them, each with a number of its own."""
    told = [-1 if member["local_rank"] is None else member["local_rank"] for member in members]
    return all(member["told"] for member in members) and sorted(told) == list(range(len(told)))


def _threads(members: Sequence[Mapping[str, Any]]) -> int:
    """Divide a host's cores, whether its workers see all of them or each its own."""
    workers: int = sum(member["workers"] for member in members)
    shares = [len({core for member in members for core in member["cores"]}) // workers]
    shares += [len(member["cores"]) // member["workers"] for member in members]
    shares += [member["quota"] // workers for member in members if member["quota"]]
    return max(1, min(shares))


def _own_gpus(members: Sequence[Mapping[str, Any]], workers: int) -> bool:
    """Decide whether the commands of a host see GPUs of their own (Slurm's per-task binding) or all see the same ones.

    Raises:
        RefusedError: there are fewer GPUs than workers.
    """
    shown = [list(member["gpus"]) for member in members]
    if not any(shown):
        return False
    everything = {gpu for gpus in shown for gpu in gpus}
    enough = all(len(gpus) >= member["workers"] for gpus, member in zip(shown, members, strict=True))
    if enough and len(everything) == sum(map(len, shown)):
        return True
    if all(len(gpus) >= workers for gpus in shown):
        return False
    raise RefusedError(
        f"{members[0]['host']} runs {workers} workers, and they see {len(everything)} "
        f"GPU{'s' if len(everything) > 1 else ''}: "
        f"start one worker for each GPU, or use trainer.device=cpu."
    )


def first_difference(one: Any, other: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """Return the first key at which two trees differ, with both values, or None."""
    if one == other:
        return None
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in [*one, *(name for name in other if name not in one)]:
            found = first_difference(one.get(name), other.get(name), f"{key}.{name}" if key else str(name))
            if found:
                return found
        return None
    return key, one, other


def _watch(
    job: Job,
    layout: Layout,
    assignment: RankAssignment,
    meeting: Meeting | None,
    server: Server,
    store: socket.socket | tuple[str, int] | None = None,
) -> int:
    """Start this command's workers and watch them to the end."""
    # Bound here and handed to rank zero, so that the port is ours from the start and on the chosen interface alone: a
    # store that torch opens itself listens on every interface, and a port that is found, closed and opened again can be
    # lost.
    own = socket.create_server((LOOPBACK, 0), backlog=1024) if store is None else None
    listener = own or (store if isinstance(store, socket.socket) else None)
    began = time.time()
    place: tuple[str, int] = listener.getsockname()[:2] if listener else store  # type: ignore[assignment]
    try:
        workers = []
        for number in range(assignment.workers):
            rank = assignment.first_rank + number
            ours, theirs = socket.socketpair()
            signals, theirs_for_signals = socket.socketpair()
            theirs_for_signals.setblocking(False)  # a signal handler writes to it
            environ = environment(layout, assignment, number, place, meeting.address if meeting else LOOPBACK)
            status_page, number_of_page = SharedStatus.make()
            descriptors = {
                CONTROL_FD: theirs.fileno(),
                PAGE_FD: number_of_page,
                SIGNALS_FD: theirs_for_signals.fileno(),
            }
            if rank == 0 and listener is not None:
                descriptors[STORE_FD] = listener.fileno()
            log = Log(job.logs, rank)
            server.start(rank, job.entry, job.arguments, environ, log.fileno(), descriptors)
            theirs.close()
            theirs_for_signals.close()
            os.close(number_of_page)
            workers.append(Worker(rank, Lines(ours), log, status_page, signals))
    finally:
        if listener is not None:
            listener.close()
    try:
        return supervise(server, workers, Terminal(), meeting, job.request, layout.device == "cuda")
    except BaseException:
        cleanup.clear(began)
        raise
    finally:
        for worker in workers:
            worker.log.close()
            worker.status_page.close()


def environment(
    layout: Layout, assignment: RankAssignment, number: int, store: tuple[str, int], address: str
) -> dict[str, str]:
    """Return the variables that tell worker `number` of this command its place; `address` is this host's own."""
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
    if assignment.own_gpus:
        variables["DDPEXP_GPU"] = str(number)
    if not is_loopback(host):
        interface = interface_of(address)
        if interface:
            variables |= {
                name: os.environ.get(name, interface) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            }
    return variables
