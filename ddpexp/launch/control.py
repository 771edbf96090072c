"""The control channel between a worker and the process that watches it: lines of JSON on an inherited socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

CONTROL_FD = "DDPEXP_CONTROL_FD"
STORE_FD = "DDPEXP_STORE_FD"


class Control:
    """A worker's end. Without a watcher (a launcher that is not ours) every message is dropped."""

    def __init__(self, channel: socket.socket | None) -> None:
        """Take over the socket, or None."""
        self._channel = channel
        self._rest = b""  # of a line that did not fit whole
        self.step: int | None = None  # steps done, kept by the loop so that an error can say where it happened

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Control:
        """Open the channel that the launcher left in this process."""
        number = environ.get(CONTROL_FD)
        return cls(socket.socket(fileno=int(number)) if number else None)

    @property
    def asked_to_stop(self) -> bool:
        """Tell whether a stop is requested."""
        return False

    def poll(self, done: int, save: bool = False) -> str | None:
        """Return what all ranks do after step `done`: nothing, save, or stop."""
        return None

    @property
    def watched(self) -> bool:
        """Tell whether somebody reads: then progress goes there instead of to standard output."""
        return self._channel is not None

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message if there is room; never waits, for training does not wait for a terminal."""
        if self._channel is None or not self._flush():
            return
        self._rest = _line(kind, fields)
        self._flush()

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message that must arrive, however long the watcher is stopped; its death ends this process anyway."""
        if self._channel is None:
            return
        try:
            self._channel.setblocking(True)
            self._channel.sendall(self._rest + _line(kind, fields))
            self._rest = b""
        except OSError:
            return  # the watcher is gone

    def _flush(self) -> bool:
        """Send what is left of the last line; tell whether all of it went."""
        assert self._channel is not None
        try:
            self._channel.setblocking(False)
            while self._rest:
                self._rest = self._rest[self._channel.send(self._rest) :]
        except OSError:
            return False
        return True


def _line(kind: str, fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


class Lines:
    """The watcher's end: messages out of the bytes that arrive."""

    def __init__(self, channel: socket.socket, rest: bytes = b"") -> None:
        """Take over the socket; `rest` was read from it before."""
        channel.setblocking(False)
        self.channel = channel
        self._rest = rest

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the complete messages that have arrived, and whether the channel is still open."""
        open_ = True
        while True:
            try:
                data = self.channel.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                open_ = False
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines if line], open_
