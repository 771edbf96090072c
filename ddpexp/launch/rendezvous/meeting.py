"""How the commands of one job find one another and agree: lines of JSON over TCP, rank zero's command in the middle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import selectors
import socket
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol

from ddpexp.errors import AbsentError, RefusedError
from ddpexp.launch.workers.control import Lines
from ddpexp.system.network import LOOPBACK, holder_of, is_loopback, is_wildcard, own_address

_BACKLOG = 4096  # all may come at once; who finds no room is held up by a second and more
_RETRY_SECONDS = (
    0.05  # at first, then a tenth of the time waited: thousands must not keep the leader's host or a disk busy
)
_LONGEST_RETRY_SECONDS = 1.0
_HELLO_SECONDS = 5.0
_SEND_SECONDS = 10.0
_LONGEST_LINE = 1 << 24  # bytes
_LONGEST_HELLO = 1 << 20  # bytes; a stranger's endless line ends here
_STRANGE_SECONDS = 5.0  # how long another program may answer at the leader's port
_STALE_SECONDS = 24 * 3600.0
# Idle seconds, seconds between probes, their number: a host that is cut off is known to be gone after 10 s. Probes rest
# while something is on its way, so that has a bound of its own, in milliseconds.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 4, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 10_000}


class Rendezvous(Protocol):
    """How the commands find the one that leads."""

    def listen(self) -> tuple[socket.socket, str]:
        """Open the leader's socket where the others will look for it; return it with a word that they must know."""
        ...

    def seek(self) -> tuple[str, int, str] | None:
        """Return host, port and word of the leader, or None when they are not known yet."""
        ...

    def close(self) -> None:
        """Forget the place: all have met."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A host and a port that every command was told."""

    host: str
    port: int
    names: tuple[str, str]  # of the keys or variables that told, for errors

    def listen(self) -> tuple[socket.socket, str]:
        """Bind the port.

        Raises:
            RefusedError: the address is not this host's, or the port is taken.
        """
        name, port = self.names
        if is_wildcard(self.host):
            raise RefusedError(f"{name}={self.host} is no address that the others could reach: name this host.")
        try:
            host = (
                LOOPBACK
                if is_loopback(self.host)
                else str(socket.getaddrinfo(self.host, None, socket.AF_INET)[0][4][0])
            )
        except (socket.gaierror, UnicodeError) as error:
            raise RefusedError(f"{name}={self.host} is not a known host: {_reason(error)}.") from None
        try:
            return socket.create_server((host, self.port), backlog=_BACKLOG), ""
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise RefusedError(
                    f"{name}={self.host} is not an address of {socket.gethostname()}, where rank zero runs: name this "
                    "host."
                ) from None
            holder = holder_of(self.port) if error.errno == errno.EADDRINUSE else None
            by = f" by {holder[1]} (process {holder[0]})" if holder else ""
            raise RefusedError(
                f"{port}={self.port} cannot be opened on {self.host}: {_reason(error)}{by}. Choose another port, the "
                "same for all."
            ) from None

    def seek(self) -> tuple[str, int, str]:
        """Return what was told."""
        return LOOPBACK if is_loopback(self.host) else self.host, self.port, ""

    def close(self) -> None:
        """Do nothing: nothing was left anywhere."""


@dataclass(frozen=True)
class Named:
    """A name after what started them all, in the memory of this host's kernel.

    No file and no port, gone with the leader.
    """

    name: str

    @classmethod
    def after(cls, key: str) -> Named:
        """Make the name, which other users can see."""
        return cls(f"ddpexp-{os.geteuid()}-{hashlib.sha256(key.encode()).hexdigest()[:32]}")

    def listen(self) -> tuple[socket.socket, str]:
        """Open the socket; who comes must be this user, which the kernel says.

        Raises:
            RefusedError: somebody else has the name.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{self.name}")
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise RefusedError(
                f"the socket @{self.name}, where the ranks look for rank zero, is another process's: {_reason(error)}. "
                f"End that one (ss -xlp shows it), or start the ranks anew."
            ) from None
        return listener, ""

    def seek(self) -> tuple[str, int, str]:
        """Return the name."""
        return f"\0{self.name}", 0, ""

    def close(self) -> None:
        """Do nothing: nothing was left anywhere."""


@dataclass
class Published:
    """A file beside the run directory that the leader writes and the others wait for.

    Named after what started them all.
    """

    path: Path
    _known: tuple[str, int, str] | None = None  # what it says, as written or read here

    @classmethod
    def under(cls, folder: Path, key: str) -> Published:
        """Choose the file, in a folder that all hosts see."""
        return cls(folder / f".meeting-{hashlib.sha256(key.encode()).hexdigest()[:16]}")

    def listen(self) -> tuple[socket.socket, str]:
        """Bind a free port and write it down.

        Raises:
            RefusedError: the file cannot be written.
        """
        listener = socket.create_server((own_address(), 0), backlog=_BACKLOG)
        host, port = listener.getsockname()[:2]
        word = secrets.token_hex(16)
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump([host, port, word], file)
            os.replace(temporary, self.path)
        except OSError as error:
            listener.close()
            raise RefusedError(
                f"{self.path} cannot be written, where the ranks look for rank zero: {_reason(error)}."
            ) from None
        self._known = host, port, word
        _sweep(self.path.parent)
        return listener, word

    def seek(self) -> tuple[str, int, str] | None:
        """Read the file, if it is there and this user's."""
        found = self._read()
        self._known = found or self._known
        return found

    def _read(self) -> tuple[str, int, str] | None:
        try:
            descriptor = os.open(
                self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            )  # a pipe would wait for a writer
        except OSError:
            with suppress(OSError):
                os.listdir(self.path.parent)  # a network file system looks again
            return None
        try:
            found = os.fstat(descriptor)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            return _place(os.read(descriptor, 1024)) if ours else None
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove the file, unless it leads to another leader by now."""
        if self._known is not None and self._read() == self._known:
            self.path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what jobs have left that were killed at once on all hosts while they met."""
    for path in folder.glob(".meeting-*"):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _STALE_SECONDS:
                path.unlink()


def by_key(key: str, folder: Path, one_host: bool) -> Rendezvous:
    """Choose the way for commands that know a word which no other job has; `folder` is seen by all hosts."""
    return Named.after(key) if one_host else Published.under(folder, key)


@dataclass
class StoreRendezvous:
    """A store that somebody else keeps, asked through functions."""

    publish: Callable[[str], object]
    ask: Callable[[], str | None]
    local: bool

    def listen(self) -> tuple[socket.socket, str]:
        """Bind a free port and put it into the store."""
        listener = socket.create_server((LOOPBACK if self.local else own_address(), 0), backlog=_BACKLOG)
        word = secrets.token_hex(16)
        self.publish(json.dumps([*listener.getsockname()[:2], word]))
        return listener, word

    def seek(self) -> tuple[str, int, str] | None:
        """Ask the store."""
        text = self.ask()
        return None if text is None else _place(text)

    def close(self) -> None:
        """Do nothing: the store ends with what keeps it."""


@dataclass
class Peer:
    """One end of a connection between two commands."""

    index: int
    channel: socket.socket
    host: str = ""
    first_rank: int = 0  # of those that it runs, known when all have met
    _rest: bytes = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a peer that is gone is noticed when it is read from."""
        self.send_line(_line(message))

    def send_line(self, line: bytes) -> None:
        """Send a message that is a line already."""
        before = self.channel.gettimeout()  # none while the watch reads
        with suppress(OSError):
            self.channel.settimeout(_SEND_SECONDS)
            self.channel.sendall(line)
        self.channel.settimeout(before)

    def receive(self, deadline: float) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            EOFError: the peer is gone, or says what is no message. TimeoutError: nothing came until `deadline`, a time
            of the monotonic clock.
        """
        while (message := self._message()) is None:
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            self._read(_LONGEST_LINE)
        return message

    def heard(self) -> dict[str, Any] | None:
        """Return the first message if all of it has arrived, without waiting. Raises EOFError like `receive`."""
        self.channel.setblocking(False)
        with suppress(BlockingIOError):
            while True:  # to the end: one that gave up waiting has said hello and closed
                self._read(_LONGEST_HELLO)
        return self._message()

    def _read(self, longest: int) -> None:
        try:
            data = self.channel.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            raise
        except OSError:
            data = b""
        if not data or len(self._rest) > longest:
            raise EOFError
        self._rest += data

    def _message(self) -> dict[str, Any] | None:
        line, end, rest = self._rest.partition(b"\n")
        if not end:
            return None
        self._rest = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise EOFError from None
        if not isinstance(message, dict):
            raise EOFError
        return message

    def lines(self) -> Lines:
        """Read messages from now on without waiting."""
        return Lines(self.channel, self._rest)


@dataclass
class Meeting:
    """The connections of this command: to all others when it leads, else to the one that leads."""

    index: int
    peers: list[Peer] = field(default_factory=list)
    address: str = LOOPBACK  # of this host, as the others reach it
    speaks: bool = True  # this command's terminal is the one for its host: not where the leading one's is

    @property
    def leads(self) -> bool:
        """Tell whether this command is the one in the middle."""
        return self.index == 0

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to every connected command."""
        line = _line(message)
        for peer in self.peers:
            peer.send_line(line)

    def close(self) -> None:
        """Close every connection."""
        for peer in self.peers:
            peer.channel.close()


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def lead(way: Rendezvous, size: int, seconds: float, who: str) -> tuple[Meeting, list[dict[str, Any]]]:
    """Wait for all others; return the meeting and what each said of itself, by index from 1.

    Raises:
        RefusedError: somebody did not come within `seconds`, or came twice.
    """
    listener, word = way.listen()
    deadline = time.monotonic() + seconds
    address = _address(listener)
    found: dict[int, tuple[Peer, dict[str, Any]]] = {}
    try:
        with listener, closing(_Acceptor(listener, word)) as door:
            while len(found) < size - 1:
                if time.monotonic() >= deadline:
                    absent = sorted(set(range(1, size)) - set(found))
                    raise AbsentError(_missing(absent, size, seconds, who) + _only_here(way, address))
                for peer, handshake in door.wait(deadline):
                    if handshake is None:  # it may come again
                        found.pop(peer.index, None)
                    else:
                        _accept_handshake(peer, handshake, size, found, who)
        ordered = [found[index] for index in sorted(found)]
        return Meeting(0, [peer for peer, _ in ordered], address), [handshake for _, handshake in ordered]
    except RefusedError as error:
        for peer, _ in found.values():
            peer.send({"kind": "absent" if isinstance(error, AbsentError) else "refused", "message": str(error)})
            peer.channel.close()
        raise
    finally:
        way.close()


def _accept_handshake(
    peer: Peer, handshake: dict[str, Any], size: int, found: dict[int, tuple[Peer, dict[str, Any]]], who: str
) -> None:
    index = handshake["index"]
    if not 0 < index < size or handshake.get("size") != size or index in found:
        error = RefusedError(_contradiction(handshake, size, found, who))
        peer.send({"kind": "refused", "message": str(error)})
        peer.channel.close()
        raise error
    peer.index, peer.host = index, handshake["host"]
    peer.send({"kind": "welcome", "host": socket.gethostname()})
    found[index] = (peer, handshake)


@dataclass(eq=False)
class _PendingPeer:
    peer: Peer
    until: float  # when it must have said who it is
    known: bool = False  # it has


class _Acceptor:
    """Who comes to the listener. All are heard at once: a stranger that says nothing keeps nobody out.

    Whoever comes or speaks costs the same, however many are there already.
    """

    def __init__(self, listener: socket.socket, word: str) -> None:
        self._listener, self._word = listener, word
        self._selector = selectors.DefaultSelector()
        self._unknown: OrderedDict[_PendingPeer, None] = (
            OrderedDict()
        )  # who has come first must first have said who it is
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, deadline: float) -> Iterator[tuple[Peer, dict[str, Any] | None]]:
        """Yield those who say hello with the word, and with None those who had done so and are gone."""
        until = min([deadline, *(pending.until for pending in islice(self._unknown, 1))])
        keys = [key for key, _ in self._selector.select(max(0.0, until - time.monotonic()))]
        guests: list[_PendingPeer] = [key.data for key in keys if key.data is not None]
        for pending in sorted(guests, key=lambda pending: not pending.known):  # who leaves may be coming again
            yield from self._hear(pending)
        if len(guests) < len(keys):
            self._admit()
        now = time.monotonic()
        for pending in list(takewhile(lambda pending: pending.until < now, self._unknown)):
            self._turn_away(pending)

    def close(self) -> None:
        """Turn away all who have not said who they are."""
        for pending in list(self._unknown):
            self._turn_away(pending)
        self._selector.close()

    def _admit(self) -> None:
        for _ in range(_BACKLOG):  # then those who are here already are heard first
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return  # nobody else waits
            if not _is_ours(channel):
                channel.close()
                continue
            _keep_alive(channel)
            pending = _PendingPeer(Peer(-1, channel), time.monotonic() + _HELLO_SECONDS)
            self._selector.register(channel, selectors.EVENT_READ, pending)
            self._unknown[pending] = None

    def _hear(self, pending: _PendingPeer) -> Iterator[tuple[Peer, dict[str, Any] | None]]:
        try:
            handshake = pending.peer.heard()
        except EOFError:
            self._turn_away(pending)
            if pending.known:
                yield pending.peer, None
            return
        if handshake is None or pending.known:
            return
        if handshake.get("word") == self._word and _is_handshake(handshake):
            pending.known = True
            del self._unknown[pending]
            yield pending.peer, handshake
        else:
            self._turn_away(pending)

    def _turn_away(self, pending: _PendingPeer) -> None:
        self._unknown.pop(pending, None)
        self._selector.unregister(pending.peer.channel)
        pending.peer.channel.close()


def _is_handshake(message: Mapping[str, Any]) -> bool:
    """Tell whether a message can be one of ours.

    The word alone does not say so, for on a port that was told it is empty.
    """
    index, size = message.get("index"), message.get("size")
    return type(index) is int and type(size) is int and isinstance(message.get("host"), str)


def join(way: Rendezvous, handshake: Mapping[str, Any], seconds: float, who: str) -> Meeting:
    """Find the one that leads and introduce this command with `handshake`, which names its `index`.

    Raises:
        RefusedError: it was not found within `seconds`.
    """
    started = time.monotonic()
    deadline = started + seconds
    seen, dead, strange_since = f"nothing was heard of it{_where(way)}", False, None
    while time.monotonic() < deadline:
        place = way.seek()
        if place is not None:
            host, port, word = place
            at = "on this host" if isinstance(way, Named) else f"at {host}:{port}"
            began = time.monotonic()
            try:
                with ExitStack() as stack:
                    channel = stack.enter_context(_connect(host, port, _bounded(deadline)))
                    strange_since = began if strange_since is None else strange_since
                    peer = _introduced(Peer(0, channel), {**handshake, "word": word}, deadline)
                    stack.pop_all()
                return Meeting(int(handshake["index"]), [peer], _address(channel))
            except (EOFError, _SilentError):
                seen, dead = f"what answers {at} is not it", False
            except (OSError, UnicodeError) as error:
                seen, dead = f"nobody answered {at} ({_reason(error)})", isinstance(error, ConnectionRefusedError)
                strange_since = None
        if isinstance(way, Fixed) and strange_since is not None and time.monotonic() - strange_since > _STRANGE_SECONDS:
            raise RefusedError(
                f"{who} {handshake['index']} did not find {who} 0: another program answers at {way.host}:{way.port}. "
                f"Choose another {way.names[1]}, the same for all, or end that program."
            )
        waited = time.monotonic() - started
        time.sleep(min(_LONGEST_RETRY_SECONDS, max(_RETRY_SECONDS, waited / 10), max(0.0, seconds - waited)))
    if dead:
        way.close()  # it leads to one that was killed
    raise AbsentError(
        f"{who} {handshake['index']} did not find {who} 0 within {seconds:g} s: {seen}. Was it started, and is its "
        "host reached?"
    )


class _SilentError(Exception):
    """Who answers says nothing."""


def _connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to a port, or to a name of this host's kernel. Raises EOFError where another user has the name."""
    if not host.startswith("\0"):
        return socket.create_connection((host, port), timeout=seconds)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(seconds)
        channel.connect(host)
        if not _is_ours(channel):
            raise EOFError
    except BaseException:
        channel.close()
        raise
    return channel


def _is_ours(channel: socket.socket) -> bool:
    """Tell whether this user is at the other end, as far as the kernel knows it."""
    if channel.family != socket.AF_UNIX:
        return True
    _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())


def _address(channel: socket.socket) -> str:
    """Return the address of this host that a socket has."""
    return LOOPBACK if channel.family == socket.AF_UNIX else str(channel.getsockname()[0])


def _introduced(leader: Peer, handshake: Mapping[str, Any], deadline: float) -> Peer:
    """Say hello and hear the welcome. Raises EOFError: this is not the one that leads. _SilentError.

    It says nothing.
    """
    if leader.channel.family != socket.AF_UNIX and leader.channel.getsockname() == leader.channel.getpeername():
        # A port of our own, chosen by chance, which answers itself. Closed with a reset, or the leader could not bind
        # it for the minute that the kernel keeps it.
        leader.channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise EOFError
    _keep_alive(leader.channel)
    leader.send(handshake)
    try:
        answer = leader.receive(time.monotonic() + _bounded(deadline))
    except TimeoutError:
        raise _SilentError from None
    if answer.get("kind") == "refused" and isinstance(answer.get("message"), str):
        raise RefusedError(answer["message"])
    if answer.get("kind") != "welcome" or not isinstance(answer.get("host"), str):
        raise EOFError
    leader.host = answer["host"]
    return leader


def _bounded(deadline: float) -> float:
    return min(_HELLO_SECONDS, max(0.1, deadline - time.monotonic()))


def _keep_alive(channel: socket.socket) -> None:
    if channel.family == socket.AF_UNIX:
        return  # the kernel knows both ends
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        channel.setsockopt(socket.IPPROTO_TCP, option, value)


def _reason(error: Exception) -> str:
    """Return the operating system's words, without those that Python adds."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


def _place(text: str | bytes) -> tuple[str, int, str] | None:
    """Read what a leader has written down; None when it is something else."""
    try:
        host, port, word = json.loads(text)
        return str(host), int(port), str(word)
    except (ValueError, TypeError):
        return None


def _where(way: Rendezvous) -> str:
    if not isinstance(way, Published):
        return ""
    return f" in {way.path.parent}, which all hosts must see"


def _only_here(way: Rendezvous, address: str) -> str:
    """Explain what the name of a host that stands for loopback there, as on Debian, does to the others."""
    if not isinstance(way, Fixed) or is_loopback(way.host) or not is_loopback(address):
        return ""
    return f" Here {way.names[0]}={way.host} stands for {address}, which only this host reaches: use its address."


def _missing(absent: Sequence[int], size: int, seconds: float, who: str) -> str:
    shown = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
    return f"{who} {shown} of {size} did not come within {seconds:g} s: were they started, and do they reach this host?"


def _contradiction(one: Mapping[str, Any], size: int, found: Mapping[int, Any], who: str) -> str:
    index, host = one["index"], one.get("host")
    if index in found or index == 0:
        other = found[index][0].host if index in found else "the first host"
        return (
            f"two commands say that they are {who} {index}, on {other} and on {host}: each needs a number of its own."
        )
    return (
        f"{who} {index} on {host} counts {one.get('size')} in all, {who} 0 counts {size}: start all of them with "
        "the same number."
    )
