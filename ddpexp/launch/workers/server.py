"""The fork server: a process with everything imported that forks workers on request.

It runs as an interpreter of its own with one inherited socket; requests come and exits go as packets of JSON,
descriptors ride along. It knows no job: what to call, where and with which environment is in each request.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from ddpexp.launch.workers.control import SIGNALS
from ddpexp.system.limits import said_with_limit
from ddpexp.system.process import die_with_parent
from ddpexp.system.programs import python

_PACKET = 1 << 20
# A terminal and schedulers send them to every process of a job at once: the command hears them, and ends the workers
# and this process. The command starts this process with all of them blocked, for Python would end with a traceback
# while it starts.
_OF_THE_COMMAND = (signal.SIGTERM, signal.SIGHUP)
# These mean nothing here, nor to a worker before it has made ready for them.
_NOT_YET = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def main(fd: int, parent: int, start_method: str, preload: Sequence[str]) -> None:
    """Serve until the socket closes.

    `start_method` is forkserver (fork with everything loaded) or spawn (a new interpreter).
    """
    die_with_parent(parent)
    for signum in _NOT_YET:
        signal.signal(signum, signal.SIG_IGN)
    for signum in _OF_THE_COMMAND:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP, for the workers too
            signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _serve(socket.socket(fileno=fd), start_method, _import(preload))


def _serve(channel: socket.socket, start_method: str, failed: dict[str, str]) -> None:
    _send(channel, {"kind": "ready", "failed": failed, "pid": os.getpid()})
    wake, children = _watch_children()
    while True:
        _reap(channel, children)
        if not _wait_readable(channel, wake):
            continue
        try:
            data, fds, _flags, _address = socket.recv_fds(channel, _PACKET, 8)
        except ConnectionResetError:
            return  # the command closed its end before it had read all that was sent
        if not data:
            return  # the command closed its end
        request = json.loads(data)
        if request["op"] == "kill":
            for pid in children - {request["spared"]}:
                os.kill(pid, request["signal"])
        elif request["op"] == "load":
            _import(request["names"])  # what cannot be imported fails again where it is used
        else:
            start = {"clone": _clone}.get(request["op"], _fork if start_method == "forkserver" else _exec)
            try:
                pid = start(request, fds, (channel, wake))
            except OSError as error:  # no more processes: the command says so, and ends those that there are
                text = f"the process of rank {request['rank']} could not be started: {said_with_limit(error)}"
                _send(
                    channel, {"kind": "failed", "rank": request["rank"], "error": type(error).__name__, "message": text}
                )
            else:
                children.add(pid)
                _send(channel, {"kind": "started", "rank": request["rank"], "pid": pid})
            for number in fds:
                os.close(number)


def _import(names: Sequence[str]) -> dict[str, str]:
    """Import without the garbage collector, which would walk the growing heap again and again (a fifth of the time)."""
    failed: dict[str, str] = {}
    gc.disable()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    gc.freeze()  # what is loaded now lives for ever: workers neither walk it nor copy its pages
    return failed


def _watch_children() -> tuple[socket.socket, set[int]]:
    wake, ring = socket.socketpair()
    wake.setblocking(False)
    ring.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ring.detach(), warn_on_full_buffer=False)
    return wake, set()


def _wait_readable(channel: socket.socket, wake: socket.socket) -> bool:
    """Sleep until a request or a child's end; True for a request."""
    ready, _, _ = select.select([channel, wake], [], [])
    if wake in ready:
        wake.recv(4096)
    return channel in ready


def _reap(channel: socket.socket, children: set[int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            _send(channel, {"kind": "exit", "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    try:
        channel.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)  # the command is gone, and the workers die with us


def _forked() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at a fork. Those that linear algebra libraries start on import are fork-safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork(request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket]) -> int:
    server = os.getpid()
    pid = _forked()
    if pid:
        return pid
    code = 1
    try:
        os.close(signal.set_wakeup_fd(-1))
        for number in (signal.SIGCHLD, *_OF_THE_COMMAND):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        die_with_parent(server)
        _settle(request, fds, private)
        gc.enable()
        sys.argv = [request["entry"], *request["arguments"]]
        code = call(request["entry"], request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _clone(request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket]) -> int:
    """Fork a server of its own for another command, which is served through the first descriptor."""
    server = os.getpid()
    pid = _forked()
    if pid:
        return pid
    try:
        os.close(signal.set_wakeup_fd(-1))
        die_with_parent(server)
        os.setpgid(0, 0)
        for one in private:
            one.close()
        os.environ.update(request["environ"])
        _serve(socket.socket(fileno=fds[0]), "forkserver", {})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _exec(request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _settle(request, fds, private)
        words = python("ddpexp.launch.workers.server:call_under", server, request["entry"], request["arguments"])
        os.execv(words[0], words)
    finally:
        os._exit(127)


def _settle(request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket]) -> None:
    """Give a new worker its folder, environment, output (the first descriptor) and channels.

    Take the server's own away.
    """
    for channel in private:
        channel.close()
    # A session of its own: the terminal's signals pass it by, and Linux's scheduler gives each session its fair share
    # of the cores (autogroup), which made small steps 2 to 8 % faster.
    os.setsid()
    os.environ.update(request["environ"])
    for name, number in zip(request["descriptors"], fds[1:], strict=True):
        kept = os.dup(number)
        os.set_inheritable(kept, True)
        os.environ[name] = str(kept)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (fds[0], 1), (fds[0], 2)):
        os.dup2(source, target)
    os.close(nothing)


def call_under(parent: int, entry: str, arguments: Sequence[str]) -> int:
    """Be a new interpreter: like `call`, and end with the parent."""
    die_with_parent(parent)
    return call(entry, arguments)


def call(entry: str, arguments: Sequence[str]) -> int:
    """Call `module:function` with the arguments and return its exit code.

    From here on SIGQUIT shows where the process is.
    """
    faulthandler.register(signal.SIGQUIT)
    module, function = entry.split(":")
    return int(getattr(importlib.import_module(module), function)(*arguments))
