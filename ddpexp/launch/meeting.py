"""How the commands of one job find one another and agree: lines of JSON over TCP, rank zero's command in the middle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ddpexp.errors import RefusedError
from ddpexp.launch.control import Lines
from ddpexp.launch.network import LOOPBACK, is_loopback, own_address

_RETRY_SECONDS = 0.05
_HELLO_SECONDS = 5.0
_LONGEST_LINE = 1 << 24  # bytes; a stranger's endless line ends here


class Way(Protocol):
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
        try:
            return socket.create_server((LOOPBACK if is_loopback(self.host) else self.host, self.port), backlog=1024), ""
        except socket.gaierror as error:
            raise RefusedError(f"{name}={self.host} is not a known host: {error.strerror}.") from None
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise RefusedError(
                    f"{name}={self.host} is not an address of {socket.gethostname()}, where rank zero runs: name this host."
                ) from None
            raise RefusedError(
                f"{port}={self.port} cannot be opened on {self.host}: {error.strerror}. Choose another port, the same for all."
            ) from None

    def seek(self) -> tuple[str, int, str]:
        """Return what was told."""
        return LOOPBACK if is_loopback(self.host) else self.host, self.port, ""

    def close(self) -> None:
        """Do nothing: nothing was left anywhere."""


@dataclass(frozen=True)
class Published:
    """A file that the leader writes and the others wait for, named after what started them all."""

    path: Path
    local: bool  # one host: then loopback is enough

    @classmethod
    def under(cls, folder: Path, key: str, local: bool) -> Published:
        """Choose the file: beside the run directory, which all hosts see, or in a private folder of this host."""
        place = _private_folder() if local else folder
        return cls(place / f".meeting-{hashlib.sha256(key.encode()).hexdigest()[:16]}", local)

    def listen(self) -> tuple[socket.socket, str]:
        """Bind a free port and write it down.

        Raises:
            RefusedError: the file cannot be written.
        """
        listener = socket.create_server((LOOPBACK if self.local else own_address(), 0), backlog=1024)
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
            raise RefusedError(f"{self.path} cannot be written, where the ranks look for rank zero: {error.strerror}.") from None
        return listener, word

    def seek(self) -> tuple[str, int, str] | None:
        """Read the file, if it is there and this user's."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            with suppress(OSError):
                os.listdir(self.path.parent)  # a network file system looks again
            return None
        with os.fdopen(descriptor) as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            try:
                host, port, word = json.load(file)
                return str(host), int(port), str(word)
            except ValueError:
                return None

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


@dataclass
class Told:
    """A store that somebody else keeps, asked through functions."""

    publish: Callable[[str], None]
    ask: Callable[[], str | None]
    local: bool

    def listen(self) -> tuple[socket.socket, str]:
        """Bind a free port and put it into the store."""
        listener = socket.create_server((LOOPBACK if self.local else own_address(), 0), backlog=1024)
        word = secrets.token_hex(16)
        self.publish(json.dumps([*listener.getsockname()[:2], word]))
        return listener, word

    def seek(self) -> tuple[str, int, str] | None:
        """Ask the store."""
        text = self.ask()
        if text is None:
            return None
        host, port, word = json.loads(text)
        return str(host), int(port), str(word)

    def close(self) -> None:
        """Do nothing: the store ends with what keeps it."""


@dataclass
class Peer:
    """One end of a connection between two commands."""

    index: int
    channel: socket.socket
    host: str = ""
    _rest: bytes = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a peer that is gone is noticed when it is read from."""
        with suppress(OSError):
            self.channel.settimeout(10)
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            EOFError: the peer is gone. TimeoutError: nothing came until `deadline`, a time of the monotonic clock.
        """
        while b"\n" not in self._rest:
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self.channel.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError:
                data = b""
            if not data or len(self._rest) > _LONGEST_LINE:
                raise EOFError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
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

    @property
    def leads(self) -> bool:
        """Tell whether this command is the one in the middle."""
        return self.index == 0

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to every connected command."""
        for peer in self.peers:
            peer.send(message)

    def close(self) -> None:
        """Close every connection."""
        for peer in self.peers:
            peer.channel.close()


def lead(way: Way, size: int, seconds: float, who: str) -> tuple[Meeting, list[dict[str, Any]]]:
    """Wait for all others; return the meeting and what each said of itself, by index from 1.

    Raises:
        RefusedError: somebody did not come within `seconds`, or came twice.
    """
    listener, word = way.listen()
    deadline = time.monotonic() + seconds
    meeting = Meeting(0, address=str(listener.getsockname()[0]))
    found: dict[int, tuple[Peer, dict[str, Any]]] = {}
    try:
        with listener:
            while len(found) < size - 1:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    channel, _ = listener.accept()
                except TimeoutError:
                    raise RefusedError(_missing(sorted(set(range(1, size)) - set(found)), size, seconds, who)) from None
                peer = Peer(-1, channel)
                try:  # a stranger that says nothing must not keep the others out
                    hello = peer.receive(min(deadline, time.monotonic() + _HELLO_SECONDS))
                except (EOFError, TimeoutError):
                    channel.close()
                    continue
                if hello.get("word") != word or not isinstance(hello.get("index"), int):
                    channel.close()
                    continue
                if not 0 < hello["index"] < size or hello.get("size") != size or hello["index"] in found:
                    error = RefusedError(_contradiction(hello, size, found, who))
                    peer.send({"kind": "refused", "message": str(error)})
                    raise error
                peer.index, peer.host = hello["index"], str(hello["host"])
                peer.send({"kind": "welcome", "host": socket.gethostname()})
                found[peer.index] = (peer, hello)
        ordered = [found[index] for index in sorted(found)]
        meeting.peers = [peer for peer, _ in ordered]
        return meeting, [hello for _, hello in ordered]
    except RefusedError as error:
        for peer, _ in found.values():
            peer.send({"kind": "refused", "message": str(error)})
            peer.channel.close()
        raise
    finally:
        way.close()


def join(way: Way, hello: Mapping[str, Any], seconds: float, who: str) -> Meeting:
    """Find the one that leads and introduce this command with `hello`, which names its `index`.

    Raises:
        RefusedError: it was not found within `seconds`.
    """
    deadline = time.monotonic() + seconds
    place = None
    while time.monotonic() < deadline:
        place = way.seek()
        if place is not None:
            host, port, word = place
            try:
                channel = socket.create_connection((host, port), timeout=min(5, max(0.1, deadline - time.monotonic())))
            except OSError:
                channel = None
            if channel is not None and channel.getsockname() != channel.getpeername():  # a port of our own answers itself
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                peer = Peer(0, channel)
                peer.send({**hello, "word": word})
                try:  # one that is not ours, or belongs to an attempt before this one, closes or says nothing
                    answer = peer.receive(min(deadline, time.monotonic() + 3 * _HELLO_SECONDS))
                except (EOFError, TimeoutError):
                    answer = {}
                if answer.get("kind") == "refused":
                    channel.close()
                    raise RefusedError(str(answer["message"]))
                if answer.get("kind") == "welcome":
                    peer.host = str(answer["host"])
                    return Meeting(int(hello["index"]), [peer], str(channel.getsockname()[0]))
                channel.close()
        time.sleep(_RETRY_SECONDS)
    seen = f"nobody answered at {place[0]}:{place[1]}" if place else f"nothing was heard of it{_where(way)}"
    raise RefusedError(
        f"{who} {hello['index']} did not find {who} 0 within {seconds:g} s: {seen}. Was it started, and is its host reached?"
    )


def _where(way: Way) -> str:
    return f" in {way.path.parent}, which all hosts must see" if isinstance(way, Published) else ""


def _missing(absent: Sequence[int], size: int, seconds: float, who: str) -> str:
    shown = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
    return f"{who} {shown} of {size} did not come within {seconds:g} s: were they started, and do they reach this host?"


def _contradiction(hello: Mapping[str, Any], size: int, found: Mapping[int, Any], who: str) -> str:
    index, host = hello["index"], hello.get("host")
    if index in found or index == 0:
        other = found[index][0].host if index in found else "the first host"
        return f"two commands say that they are {who} {index}, on {other} and on {host}: each needs a number of its own."
    return (
        f"{who} {index} on {host} counts {hello.get('size')} in all, {who} 0 counts {size}: start all of them with the same number."
    )


def _private_folder() -> Path:
    """Return a folder of this host that no other user can write to.

    Raises:
        RefusedError: somebody else has taken its name.
    """
    folder = Path(tempfile.gettempdir()) / f"ddpexp-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not folder.is_dir() or folder.is_symlink():
        raise RefusedError(f"{folder} is not this user's private folder: remove it, or set TMPDIR to another place.")
    return folder
