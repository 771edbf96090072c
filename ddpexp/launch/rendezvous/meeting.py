"""Connect the commands of a job: all others join the leading one, which accepts and authenticates them.

Used by the coordinator.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from ddpexp.errors import AbsentError, RefusedError
from ddpexp.launch.rendezvous.kinds import Fixed, Named, Published, Rendezvous
from ddpexp.launch.rendezvous.wire import (
    Meeting,
    Peer,
    connect,
    is_same_user,
    keep_alive,
    local_address,
    reason_of,
)
from ddpexp.system.network import is_loopback

_ACCEPT_BATCH = 4096  # connections that are accepted before their handshakes are read
# The first pause between attempts, then a tenth of the time waited: thousands of commands must not keep the leader's
# host or a disk busy.
_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 1.0
_HANDSHAKE_SECONDS = 5.0
_STRANGE_SECONDS = 5.0  # how long another program may answer at the leader's port


def lead(
    rendezvous: Rendezvous, size: int, seconds: float, unit: str, starter: str | None = None
) -> tuple[Meeting, list[dict[str, Any]]]:
    """Wait for all others; return the connections and the handshakes, ordered by index from 1.

    `unit` is what a command stands for in messages: node or rank; `starter` is the program whose variables give `size`.

    Raises:
        RefusedError: a command did not join within `seconds`, or two have the same index.
    """
    listener, token = rendezvous.listen()
    deadline = time.monotonic() + seconds
    address = local_address(listener)
    joined: dict[int, tuple[Peer, dict[str, Any]]] = {}
    try:
        with listener, closing(_Acceptor(listener, token)) as acceptor:
            while len(joined) < size - 1:
                if time.monotonic() >= deadline:
                    absent = sorted(set(range(1, size)) - set(joined))
                    hint = _explain_loopback(rendezvous, address) or _explain_variables(starter)
                    raise _missing(absent, size, seconds, unit, hint)
                for peer, handshake in acceptor.wait(deadline):
                    if handshake is None:  # it has left, and may join again
                        joined.pop(peer.index, None)
                    else:
                        _accept_handshake(peer, handshake, size, joined, unit)
        ordered = [joined[index] for index in sorted(joined)]
        return Meeting(0, [peer for peer, _ in ordered], address), [handshake for _, handshake in ordered]
    except RefusedError as error:
        for peer, _ in joined.values():
            peer.send({"kind": "absent" if isinstance(error, AbsentError) else "refused", "error": error.as_dict()})
            peer.channel.close()
        raise
    finally:
        rendezvous.close()


def _accept_handshake(
    peer: Peer, handshake: dict[str, Any], size: int, joined: dict[int, tuple[Peer, dict[str, Any]]], unit: str
) -> None:
    index = handshake["index"]
    if not 0 < index < size or handshake.get("size") != size or index in joined:
        error = _contradiction(handshake, size, joined, unit)
        peer.send({"kind": "refused", "error": error.as_dict()})
        peer.channel.close()
        raise error
    peer.index, peer.host = index, handshake["host"]
    peer.send({"kind": "welcome", "host": socket.gethostname()})
    joined[index] = (peer, handshake)


@dataclass(eq=False)
class _PendingPeer:
    peer: Peer
    until: float  # the deadline for its handshake
    authenticated: bool = False


class _Acceptor:
    """Accepts connections and authenticates them, all concurrently: a silent stranger keeps nobody out.

    Each connection and message costs the same, however many peers there are.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener, self._token = listener, token
        self._selector = selectors.DefaultSelector()
        # Peers without a handshake so far, in the order of their deadlines.
        self._pending: OrderedDict[_PendingPeer, None] = OrderedDict()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, deadline: float) -> Iterator[tuple[Peer, dict[str, Any] | None]]:
        """Yield peers with their handshakes as they authenticate, and with None those of them that have left."""
        until = min([deadline, *(pending.until for pending in islice(self._pending, 1))])
        keys = [key for key, _ in self._selector.select(max(0.0, until - time.monotonic()))]
        readable: list[_PendingPeer] = [key.data for key in keys if key.data is not None]
        # Authenticated peers first: one that has left may be joining again.
        for pending in sorted(readable, key=lambda pending: not pending.authenticated):
            yield from self._read(pending)
        if len(readable) < len(keys):
            self._accept()
        now = time.monotonic()
        for pending in list(takewhile(lambda pending: pending.until < now, self._pending)):
            self._reject(pending)

    def close(self) -> None:
        """Reject all peers that have not authenticated."""
        for pending in list(self._pending):
            self._reject(pending)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return  # the queue is empty
            if not is_same_user(channel):
                channel.close()
                continue
            keep_alive(channel)
            pending = _PendingPeer(Peer(-1, channel), time.monotonic() + _HANDSHAKE_SECONDS)
            self._selector.register(channel, selectors.EVENT_READ, pending)
            self._pending[pending] = None

    def _read(self, pending: _PendingPeer) -> Iterator[tuple[Peer, dict[str, Any] | None]]:
        try:
            handshake = pending.peer.first_message()
        except EOFError:
            self._reject(pending)
            if pending.authenticated:
                yield pending.peer, None
            return
        if handshake is None or pending.authenticated:
            return
        if handshake.get("word") == self._token and _is_handshake(handshake):
            pending.authenticated = True
            del self._pending[pending]
            yield pending.peer, handshake
        else:
            self._reject(pending)

    def _reject(self, pending: _PendingPeer) -> None:
        self._pending.pop(pending, None)
        self._selector.unregister(pending.peer.channel)
        pending.peer.channel.close()


def _is_handshake(message: Mapping[str, Any]) -> bool:
    """Return whether a message has the form of a handshake; the token alone is not enough, as it may be empty."""
    index, size = message.get("index"), message.get("size")
    return type(index) is int and type(size) is int and isinstance(message.get("host"), str)


def join(rendezvous: Rendezvous, handshake: Mapping[str, Any], seconds: float, unit: str) -> Meeting:
    """Find the leading command and connect to it; `handshake` describes this command, with its `index`.

    Raises:
        RefusedError: it was not found within `seconds`.
    """
    name = f"{unit} {handshake['index']}"
    started = time.monotonic()
    deadline = started + seconds
    seen = f"nothing was heard of it{_where(rendezvous)}"
    dead = False
    strange_since = None
    while time.monotonic() < deadline:
        endpoint = rendezvous.seek()
        if endpoint is not None:
            host, port, token = endpoint
            at = "on this host" if isinstance(rendezvous, Named) else f"at {host}:{port}"
            began = time.monotonic()
            try:
                with ExitStack() as stack:
                    channel = stack.enter_context(connect(host, port, _bounded(deadline)))
                    strange_since = began if strange_since is None else strange_since
                    peer = _introduce(Peer(0, channel), {**handshake, "word": token}, deadline)
                    stack.pop_all()
                return Meeting(int(handshake["index"]), [peer], local_address(channel))
            except (EOFError, _SilentError):
                seen, dead = f"what answers {at} is not it", False
            except (OSError, UnicodeError) as error:
                seen, dead = f"nobody answered {at} ({reason_of(error)})", isinstance(error, ConnectionRefusedError)
                strange_since = None
        is_strange = strange_since is not None and time.monotonic() - strange_since > _STRANGE_SECONDS
        if isinstance(rendezvous, Fixed) and is_strange:
            raise RefusedError(
                f"{name} did not find {unit} 0: another program answers at {rendezvous.host}:{rendezvous.port}",
                suggestion=f"Choose another {rendezvous.names[1]}, the same for all, or end that program.",
            )
        waited = time.monotonic() - started
        time.sleep(min(_LONGEST_RETRY_SECONDS, max(_RETRY_SECONDS, waited / 10), max(0.0, seconds - waited)))
    if dead:
        rendezvous.close()  # it leads to a command that was killed
    raise AbsentError(
        f"{name} did not find {unit} 0 within {seconds:g} s: {seen}",
        suggestion="Was it started, and is its host reachable?",
    )


class _SilentError(Exception):
    """The other end accepts the connection but sends nothing."""


def _introduce(leader: Peer, handshake: Mapping[str, Any], deadline: float) -> Peer:
    """Send the handshake and wait for the answer.

    Raises:
        EOFError: this is not the leading command. _SilentError: it does not answer.
    """
    if leader.channel.family != socket.AF_UNIX and leader.channel.getsockname() == leader.channel.getpeername():
        # The kernel chose the leader's port as our own, so the socket is connected to itself. Close it with a reset,
        # or the leader could not bind the port for the minute that the kernel keeps it.
        leader.channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise EOFError
    keep_alive(leader.channel)
    leader.send(handshake)
    try:
        answer = leader.receive(time.monotonic() + _bounded(deadline))
    except TimeoutError:
        raise _SilentError from None
    if answer.get("kind") == "refused" and isinstance(answer.get("error"), dict):
        raise RefusedError.from_dict(answer["error"])
    if answer.get("kind") != "welcome" or not isinstance(answer.get("host"), str):
        raise EOFError
    leader.host = answer["host"]
    return leader


def _bounded(deadline: float) -> float:
    return min(_HANDSHAKE_SECONDS, max(0.1, deadline - time.monotonic()))


def _where(rendezvous: Rendezvous) -> str:
    if not isinstance(rendezvous, Published):
        return ""
    return f" in {rendezvous.path.parent}, which all hosts must see"


def _explain_loopback(rendezvous: Rendezvous, address: str) -> str:
    """Explain why others cannot connect where a host's own name resolves to loopback, as on Debian."""
    if not isinstance(rendezvous, Fixed) or is_loopback(rendezvous.host) or not is_loopback(address):
        return ""
    return (
        f" Here {rendezvous.names[0]}={rendezvous.host} stands for {address}, which only this host reaches: use its "
        "address."
    )


def _explain_variables(starter: str | None) -> str:
    """Explain that others may be missing because a shell has kept the variables of another start."""
    return f" The variables of {starter} count them: unset those if it has not started this command." if starter else ""


def _missing(absent: Sequence[int], size: int, seconds: float, unit: str, hint: str) -> AbsentError:
    shown = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
    return AbsentError(
        f"{unit} {shown} of {size} did not join within {seconds:g} s",
        suggestion=f"Were they started, and can they reach this host?{hint}",
    )


def _contradiction(handshake: Mapping[str, Any], size: int, joined: Mapping[int, Any], unit: str) -> RefusedError:
    index, host = handshake["index"], handshake.get("host")
    if index in joined or index == 0:
        other = joined[index][0].host if index in joined else "the first host"
        reason = f"two commands are {unit} {index}, on {other} and on {host}: each needs its own number"
        return RefusedError(reason)
    return RefusedError(
        f"{unit} {index} on {host} counts {handshake.get('size')} in all, {unit} 0 counts {size}",
        suggestion="Start all of them with the same number.",
    )
