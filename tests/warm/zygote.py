"""The process that has imported torch, and forks a server for each command that asks for one."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from ddpexp.launch.workers import server
from ddpexp.launch.workers.client import PRELOAD
from ddpexp.launch.workers.control import SIGNALS
from ddpexp.launch.workers.cuda_guard import CudaGuard
from ddpexp.system.forks import fork
from ddpexp.system.process import die_with_parent
from tests.warm.state import MOST_BYTES, ignored_signals, reap, state, take_over

_LATER = (
    "PIL.Image", "PIL.ImageDraw", "PIL.ImageFile", "ddpexp.data.images.dataset",
    "ddpexp.data.mnist.prepare", "ddpexp.launch.launchers.local", "safetensors", "torch.utils.tensorboard",
)  # fmt: skip
"""What ranks import when they come to it: digits, a picture of them, checkpoints, TensorBoard's files."""


def main(listener: int, parent: int) -> None:
    """Serve until the parent ends this process."""
    die_with_parent(parent)
    own = state(ignored_signals())
    failed = server._import((*PRELOAD, *_LATER), CudaGuard())
    assert not failed, failed
    with socket.socket(fileno=listener) as listening:
        while True:
            connection, _ = listening.accept()
            with connection:
                data, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, 4)
                request = json.loads(data)
                pid = None
                if request["state"] == own:
                    pid = fork(partial(_serve, request, fds, listening))
                with suppress(ConnectionError):  # the command is gone; its server finds the channel closed
                    connection.send(json.dumps(pid).encode())
            for number in fds:
                os.close(number)
            reap()


def _serve(request: dict[str, Any], fds: list[int], listening: socket.socket) -> int:
    """Be the server of a command: what `server.main` does, and what a new interpreter would have found."""
    listening.close()
    channel, *streams = fds
    take_over(request, streams)
    sys.path[:] = request["path"]
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # as at the start of a new one
    server.main(channel, os.getppid(), "forkserver", ())  # all is imported
    return 0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
