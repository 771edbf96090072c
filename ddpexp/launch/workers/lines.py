"""The supervisor's end of a control channel: lines of JSON, from a worker or from another command."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any


class Lines:
    """The supervisor's end: parses messages from the bytes that arrive."""

    def __init__(self, channel: socket.socket, rest: bytes = b"") -> None:
        """Take over the socket; `rest` are bytes that were already read from it."""
        channel.setblocking(False)
        self.channel = channel
        self._rest = rest

    def inquire(self, number: int) -> None:
        """Ask the worker which collectives it has called; it answers through its page, unless it cannot."""
        with suppress(OSError):
            self.channel.send(b"%d\n" % number, socket.MSG_DONTWAIT)

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
