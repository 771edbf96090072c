"""Connections between commands: peers, messages as lines of JSON, and detection of hosts that are cut off."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ddpexp.launch.workers.lines import Lines
from ddpexp.system.network import LOOPBACK

_SEND_SECONDS = 10.0
_LONGEST_LINE = 1 << 24  # bytes
_LONGEST_HANDSHAKE = 1 << 20  # bytes; bounds what an unauthenticated peer can send
# Idle seconds, seconds between probes, number of probes: a host that is cut off is detected after 10 s. There are no
# probes while data is unacknowledged, so that has its own limit, in milliseconds.
KEEPALIVE = {socket.TCP_KEEPIDLE: 4, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 10_000}


@dataclass
class Peer:
    """One end of a connection between two commands."""

    index: int
    channel: socket.socket
    host: str = ""
    first_rank: int = 0  # of those that it runs, known after the rendezvous
    _rest: bytes = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a peer that is gone is noticed on reading."""
        self.send_line(encode_line(message))

    def send_line(self, line: bytes) -> None:
        """Send a message that is already encoded."""
        before = self.channel.gettimeout()  # non-blocking while the supervisor reads
        with suppress(OSError):
            self.channel.settimeout(_SEND_SECONDS)
            self.channel.sendall(line)
        self.channel.settimeout(before)

    def receive(self, deadline: float) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            EOFError: the peer is gone, or sends something that is no message. TimeoutError: nothing arrived until
            `deadline`, a time of the monotonic clock.
        """
        while (message := self._message()) is None:
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            self._read(_LONGEST_LINE)
        return message

    def first_message(self) -> dict[str, Any] | None:
        """Return the first message if all of it has arrived, without waiting. Raises EOFError like `receive`."""
        self.channel.setblocking(False)
        with suppress(BlockingIOError):
            while True:  # to the end: a peer that gave up waiting has sent its handshake and closed
                self._read(_LONGEST_HANDSHAKE)
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
        """Return a reader for all further messages, without waiting."""
        return Lines(self.channel, self._rest)


@dataclass
class Meeting:
    """The connections of this command: to all others if it leads, else to the leading one."""

    index: int
    peers: list[Peer] = field(default_factory=list)
    address: str = LOOPBACK  # of this host, as the others reach it
    speaks: bool = True  # this command prints for its host, to users who do not see the leading command's output

    @property
    def leads(self) -> bool:
        """Return whether this is the leading command."""
        return self.index == 0

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to every connected command."""
        line = encode_line(message)
        for peer in self.peers:
            peer.send_line(line)

    def close(self) -> None:
        """Close every connection."""
        for peer in self.peers:
            peer.channel.close()


def encode_line(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent: a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to a TCP port or an abstract Unix socket. Raises EOFError where another user has the socket."""
    if not host.startswith("\0"):
        return socket.create_connection((host, port), timeout=seconds)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(seconds)
        channel.connect(host)
        if not is_same_user(channel):
            raise EOFError
    except BaseException:
        channel.close()
        raise
    return channel


def is_same_user(channel: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to this user; for TCP it is not known."""
    if channel.family != socket.AF_UNIX:
        return True
    _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())


def local_address(channel: socket.socket) -> str:
    """Return this host's address of a socket."""
    return LOOPBACK if channel.family == socket.AF_UNIX else str(channel.getsockname()[0])


def keep_alive(channel: socket.socket) -> None:
    """Enable the detection of peers whose host is cut off."""
    if channel.family == socket.AF_UNIX:
        return  # both ends are on this host
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        channel.setsockopt(socket.IPPROTO_TCP, option, value)


def reason_of(error: Exception) -> str:
    """Return the operating system's message, without what Python adds to it."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)
