"""The control channel between a worker and the process that watches it: lines of JSON on an inherited socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

CONTROL_FD = "DDPEXP_CONTROL_FD"
STORE_FD = "DDPEXP_STORE_FD"

_SEND_SECONDS = 5.0


class Control:
    """A worker's end. Without a watcher (a launcher that is not ours) every message is dropped."""

    def __init__(self, channel: socket.socket | None) -> None:
        """Take over the socket, or None."""
        self._channel = channel

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Control:
        """Open the channel that the launcher left in this process."""
        number = environ.get(CONTROL_FD)
        return cls(socket.socket(fileno=int(number)) if number else None)

    @property
    def watched(self) -> bool:
        """Tell whether somebody reads: then progress goes there instead of to standard output."""
        return self._channel is not None

    def progress(self, **fields: Any) -> None:
        """Report progress if there is room; never waits, for training does not wait for a terminal."""
        self._send({"kind": "progress", **fields}, wait=False)

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message that must arrive; waits for room up to five seconds."""
        self._send({"kind": kind, **fields}, wait=True)

    def _send(self, message: dict[str, Any], wait: bool) -> None:
        if self._channel is None:
            return
        data = json.dumps(message).encode() + b"\n"
        try:
            if wait:
                self._channel.settimeout(_SEND_SECONDS)
                self._channel.sendall(data)
            else:
                self._channel.settimeout(0)
                # A part of a line would corrupt the next one, so what does not fit whole is completed with patience.
                sent = self._channel.send(data)
                if sent < len(data):
                    self._channel.settimeout(_SEND_SECONDS)
                    self._channel.sendall(data[sent:])
        except OSError:
            return  # the watcher is gone: this process is about to end anyway


class Lines:
    """The watcher's end: messages out of the bytes that arrive."""

    def __init__(self, channel: socket.socket) -> None:
        """Take over the socket."""
        channel.setblocking(False)
        self.channel = channel
        self._rest = b""

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
