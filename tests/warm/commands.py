"""The process that has imported what a command imports, and forks the commands of tests: `python -m ddpexp` at once."""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import traceback
from typing import Any, NoReturn

from tests.warm import forks
from tests.warm.state import MOST_BYTES, ignored_signals, reap, state, take_over

_IMPORTED = (
    "_strptime", "antlr4.LL1Analyzer", "ddpexp.__main__", "ddpexp.cli.help", "ddpexp.cli.main",
    "ddpexp.cli.evaluate", "ddpexp.cli.resume", "ddpexp.cli.running", "ddpexp.config.compose", "ddpexp.config.parse",
    "ddpexp.data.images.files",
    "ddpexp.data.mnist.prepare", "ddpexp.launch.supervise.coordinator", "ddpexp.launch.supervise.watchdog",
    "ddpexp.plan.show", "ddpexp.cli.plan", "ddpexp.run.evaluation", "ddpexp.run.training", "ddpexp.sweep.run",
    "ddpexp.cli.report", "ddpexp.cli.status", "ddpexp.cli.table", "ddpexp.train.schedule",
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.basic_sweeper", "hydra._internal.core_plugins.bash_completion",
    "hydra._internal.core_plugins.file_config_source", "hydra._internal.core_plugins.fish_completion",
    "hydra._internal.core_plugins.importlib_resources_config_source",
    "hydra._internal.core_plugins.structured_config_source", "hydra._internal.core_plugins.zsh_completion",
    "hydra._internal.hydra", "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper", "importlib.readers",
    "omegaconf._impl", "pwd", "rich.box", "rich.console", "rich.table",
)  # fmt: skip


def main(listener: int, parent: int) -> None:
    """Serve until the parent ends this process."""
    del sys.path[0]  # of `python -m`: a command takes it out too
    ignored = ignored_signals()
    for name in _IMPORTED:
        importlib.import_module(name)
    assert not {"torch", "numpy"} & set(sys.modules)
    gc.freeze()  # what is here is neither traversed in the forks nor copied for that
    sys.modules["ddpexp.system.process"].die_with_parent(parent)
    forks.change(sys.modules["ddpexp.launch.workers.client"], ignored)
    own = state(ignored)
    with socket.socket(fileno=listener) as listening:
        while True:
            connection, _ = listening.accept()
            with connection:
                data, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
                request = json.loads(data)
                if request["state"] != own or request["environ"].get("PYTHONPATH") != os.environ["PYTHONPATH"]:
                    connection.send(b"null")
                elif os.fork() == 0:
                    listening.close()
                    _watch(request, fds, connection)
            for number in fds:
                os.close(number)
            reap()


def _watch(request: dict[str, Any], streams: list[int], connection: socket.socket) -> NoReturn:
    """Fork the command, and report its process id and how it ends: its parent alone can wait for it."""
    try:
        pid = os.fork()
        if pid == 0:
            connection.close()
            _be(request, streams)
        for number in streams:
            os.close(number)
        connection.send(json.dumps(pid).encode())
        connection.send(json.dumps(os.waitpid(pid, 0)[1]).encode())
    finally:
        os._exit(0)


def _be(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be the command: what `python -m ddpexp` would have found."""
    try:
        os.setsid()
        take_over(request, streams)
        from ddpexp import __main__

        sys.argv[:] = [str(__main__.__file__), *request["argv"]]
        sys.orig_argv[:] = [sys.executable, "-m", "ddpexp", *request["argv"]]
        __main__.run()
    except SystemExit as exit:
        os._exit(exit.code if isinstance(exit.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
