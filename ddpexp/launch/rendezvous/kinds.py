"""The ways in which the commands of a job find the leading one: an address, a local name, a file, or a store."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ddpexp.errors import RefusedError
from ddpexp.launch.rendezvous.wire import reason_of
from ddpexp.system.files import missing_folders, remove_empty
from ddpexp.system.network import LOOPBACK, holder_of, is_loopback, is_wildcard, own_address

_BACKLOG = 4096  # all commands may connect at once; a full queue delays a connection by a second and more
_STALE_SECONDS = 24 * 3600.0


class Rendezvous(Protocol):
    """How the commands find the leading one."""

    def listen(self) -> tuple[socket.socket, str]:
        """Open the leader's socket where the others look for it; return it with the token that they must present."""
        ...

    def seek(self) -> tuple[str, int, str] | None:
        """Return host, port and token of the leader, or None while they are not known."""
        ...

    def close(self) -> None:
        """Remove what `listen` has published, once all are connected."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A host and a port that every command is configured with."""

    host: str
    port: int
    names: tuple[str, str]  # of the keys or variables that they are from, for errors

    def listen(self) -> tuple[socket.socket, str]:
        """Bind the port.

        Raises:
            RefusedError: the address is not this host's, or the port is taken.
        """
        name, port = self.names
        if is_wildcard(self.host):
            raise RefusedError(
                "is not an address that the other hosts can reach",
                key=name,
                value=self.host,
                suggestion="Name this host.",
            )
        try:
            host = (
                LOOPBACK
                if is_loopback(self.host)
                else str(socket.getaddrinfo(self.host, None, socket.AF_INET)[0][4][0])
            )
        except (socket.gaierror, UnicodeError) as error:
            raise RefusedError(f"is not a known host: {reason_of(error)}", key=name, value=self.host) from None
        try:
            return socket.create_server((host, self.port), backlog=_BACKLOG), ""
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise RefusedError(
                    f"is not an address of {socket.gethostname()}, where rank zero runs",
                    key=name,
                    value=self.host,
                    suggestion="Name this host.",
                ) from None
            holder = holder_of(self.port) if error.errno == errno.EADDRINUSE else None
            by = f" by {holder[1]} (process {holder[0]})" if holder else ""
            raise RefusedError(
                f"cannot be opened on {self.host}: {reason_of(error)}{by}",
                key=port,
                value=self.port,
                suggestion="Choose another port, the same for all.",
            ) from None

    def seek(self) -> tuple[str, int, str]:
        """Return the configured host and port."""
        return LOOPBACK if is_loopback(self.host) else self.host, self.port, ""

    def close(self) -> None:
        """Do nothing: nothing is left behind."""


@dataclass(frozen=True)
class Named:
    """An abstract Unix socket, for commands of one host: it needs no file and no port, and ends with the leader."""

    name: str

    @classmethod
    def after(cls, key: str) -> Named:
        """Derive the name from a key that all commands know; it is hashed, since other users can see it."""
        return cls(f"ddpexp-{os.geteuid()}-{hashlib.sha256(key.encode()).hexdigest()[:32]}")

    def listen(self) -> tuple[socket.socket, str]:
        """Open the socket; the kernel tells which user connects, and only this user is accepted.

        Raises:
            RefusedError: another process has the name.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{self.name}")
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise RefusedError(
                f"the socket @{self.name}, where the ranks look for rank zero, belongs to another process: "
                f"{reason_of(error)}",
                suggestion="End that process (ss -xlp shows it), or start the ranks again.",
            ) from None
        return listener, ""

    def seek(self) -> tuple[str, int, str]:
        """Return the name as a host, with a NUL byte in front."""
        return f"\0{self.name}", 0, ""

    def close(self) -> None:
        """Do nothing: nothing is left behind."""


@dataclass
class Published:
    """A file beside the run directory that the leader writes and the others wait for."""

    path: Path
    _endpoint: tuple[str, int, str] | None = None  # its content, as written or last read here
    _made: list[Path] = field(default_factory=list)  # the folders above it that this command has made

    @classmethod
    def under(cls, folder: Path, key: str) -> Published:
        """Derive the file's name from a key that all commands know, in a folder that all hosts see."""
        return cls(folder / f".meeting-{hashlib.sha256(key.encode()).hexdigest()[:16]}")

    def listen(self) -> tuple[socket.socket, str]:
        """Bind a free port and publish it in the file.

        Raises:
            RefusedError: the file cannot be written.
        """
        listener = socket.create_server((own_address(), 0), backlog=_BACKLOG)
        host, port = listener.getsockname()[:2]
        token = secrets.token_hex(16)
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        try:
            self._made = missing_folders(self.path.parent)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump([host, port, token], file)
            os.replace(temporary, self.path)
        except OSError as error:
            listener.close()
            raise RefusedError(
                f"cannot be written, where the ranks look for rank zero: {reason_of(error)}", place=self.path
            ) from None
        self._endpoint = host, port, token
        _remove_stale(self.path.parent)
        return listener, token

    def seek(self) -> tuple[str, int, str] | None:
        """Read the file, if it exists and belongs to this user."""
        endpoint = self._read()
        self._endpoint = endpoint or self._endpoint
        return endpoint

    def _read(self) -> tuple[str, int, str] | None:
        try:
            # O_NONBLOCK, since opening a pipe would wait for a writer.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            with suppress(OSError):
                os.listdir(self.path.parent)  # makes a network file system refresh its cache
            return None
        try:
            status = os.fstat(descriptor)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            return _parse_endpoint(os.read(descriptor, 1024)) if ours else None
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove the file, unless another leader has replaced it."""
        if self._endpoint is not None and self._read() == self._endpoint:
            self.path.unlink(missing_ok=True)
        remove_empty(self._made)


def _remove_stale(folder: Path) -> None:
    """Remove files of jobs that were killed on all hosts during the rendezvous."""
    for path in folder.glob(".meeting-*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _STALE_SECONDS:
                path.unlink()


def by_key(key: str, folder: Path, one_host: bool) -> Rendezvous:
    """Return a rendezvous for commands that share a key which no other job has; all hosts see `folder`."""
    return Named.after(key) if one_host else Published.under(folder, key)


@dataclass
class StoreRendezvous:
    """A key-value store that another program runs, such as torchrun's."""

    publish: Callable[[str], object]
    ask: Callable[[], str | None]
    local: bool

    def listen(self) -> tuple[socket.socket, str]:
        """Bind a free port and publish it in the store."""
        listener = socket.create_server((LOOPBACK if self.local else own_address(), 0), backlog=_BACKLOG)
        token = secrets.token_hex(16)
        self.publish(json.dumps([*listener.getsockname()[:2], token]))
        return listener, token

    def seek(self) -> tuple[str, int, str] | None:
        """Read the store."""
        text = self.ask()
        return None if text is None else _parse_endpoint(text)

    def close(self) -> None:
        """Do nothing: the store ends with the program that runs it."""


def _parse_endpoint(text: str | bytes) -> tuple[str, int, str] | None:
    """Parse what a leader has published; None for anything else."""
    try:
        host, port, token = json.loads(text)
        return str(host), int(port), str(token)
    except (ValueError, TypeError):
        return None
