"""In a command of a test: `client.Server` takes a fork of the zygote where that is as good as a new interpreter."""

from __future__ import annotations

import importlib.machinery
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tests.warm.state import SOCKET, ignored_signals, state, surroundings

_CLIENT = "ddpexp.launch.workers.client"


def install() -> None:
    """Change the class once its module is imported, which must not come before the command's own first lines."""
    sys.meta_path.insert(0, _Finder(ignored_signals()))


class _Finder:
    def __init__(self, ignored: list[int]) -> None:
        self._ignored = ignored

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != _CLIENT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module, self._ignored)

        loader.exec_module = exec_module
        return spec


def change(client: Any, ignored: list[int]) -> None:
    """Change the class of a module that is imported; `ignored` are the signals that this process was started with."""
    client.Server.__init__ = constructor(client, ignored)


def constructor(client: Any, ignored: list[int]) -> Callable[..., None]:
    """Return what makes a server of a fork where it can, and as ever where it cannot."""
    new_interpreter = client.Server.__init__

    def init(self: Any, start_method: str = "forkserver", preload: Sequence[str] = client.PRELOAD) -> None:
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with channel, theirs:
            pid = _fork(theirs, ignored) if (start_method, preload) == ("forkserver", client.PRELOAD) else None
            if pid is None:
                new_interpreter(self, start_method, preload)
                return
            self.start_method, self.channel, self.memory = start_method, channel.dup(), client.Memory()
            self.pid, self._process = pid, client._Process(pid, is_child=False)

    return init


def _fork(channel: socket.socket, ignored: list[int]) -> int | None:
    """Return the process id of a server that serves the channel, or None where it would not be as a new one."""
    request = {
        "state": state(ignored),
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "path": [folder for folder in sys.path if folder],
        **surroundings(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [json.dumps(request).encode()], [channel.fileno(), 0, 1, 2])
        answer = json.loads(connection.recv(1000))
    assert answer is None or isinstance(answer, int)
    return answer
