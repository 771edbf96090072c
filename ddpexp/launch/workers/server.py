"""The fork server: a process with everything imported that forks workers on request.

It is a separate interpreter with one inherited socket. Requests and exit reports are packets of JSON, with descriptors
attached; the first descriptor of a request to start a process is a file with what to call, and with which environment.
It knows nothing of jobs.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from ddpexp.launch.workers.control import SIGNALS
from ddpexp.launch.workers.cuda_guard import CudaGuard
from ddpexp.system.forks import fork, redirect_output
from ddpexp.system.limits import EXIT_NO_MEMORY, reason_with_limit
from ddpexp.system.memory_file import memory_file, read_memory_file
from ddpexp.system.process import die_with_parent
from ddpexp.system.programs import python

_PACKET = 1 << 20
_MOST_DESCRIPTORS = 8
# Terminals and schedulers send these to every process of a job: the command handles them, and ends the workers and
# this process. The command starts this process with all of them blocked, since an interpreter that is starting would
# end with a traceback.
_HANDLED_BY_COMMAND = (signal.SIGTERM, signal.SIGHUP)
# Ignored here, and by a worker until it has installed its handlers.
_IGNORED_AT_START = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def main(fd: int, parent: int, start_method: str, preload: Sequence[str]) -> None:
    """Serve until the socket closes.

    `start_method` is forkserver (fork with everything loaded) or spawn (a new interpreter).
    """
    die_with_parent(parent)
    for signum in _IGNORED_AT_START:
        signal.signal(signum, signal.SIG_IGN)
    for signum in _HANDLED_BY_COMMAND:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP, for the workers too
            signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # What is imported here may ask `torch.cuda.is_available()`, which would initialise CUDA: torch asks NVML instead.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    guard = CudaGuard()
    try:
        _serve(socket.socket(fileno=fd), start_method, _import(preload, guard), guard)
    except MemoryError:  # the command reports it
        os._exit(EXIT_NO_MEMORY)


def _serve(channel: socket.socket, start_method: str, failed: dict[str, str], guard: CudaGuard) -> None:
    _send(channel, {"kind": "ready", "failed": failed, "pid": os.getpid()})
    children: set[int] = set()
    signals, wakeup = socket.socketpair()  # Python writes the number of each signal, that of a child's end too
    for end in (signals, wakeup):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    private = (channel, signals, wakeup)
    while True:
        _reap(channel, children)
        if not _wait_readable(channel, signals):
            continue
        try:
            data, fds, _flags, _address = socket.recv_fds(channel, _PACKET, _MOST_DESCRIPTORS)
        except ConnectionResetError:
            return  # the command closed its end before it had read everything
        if not data:
            return  # the command closed its end
        request = json.loads(data)
        if request["op"] == "kill":
            for pid in children - {request["spared"]}:
                os.kill(pid, request["signal"])
        elif request["op"] == "load":
            _import(request["names"], guard)  # a module that cannot be imported fails again where it is used
        else:
            described, *fds = fds
            request |= read_memory_file(described)
            try:
                pid = _start(request, fds, private, start_method, guard)
            except OSError as error:  # process limit reached: the command reports it, and ends the others
                text = f"the process of rank {request['rank']} could not be started: {reason_with_limit(error)}"
                _send(
                    channel, {"kind": "failed", "rank": request["rank"], "error": type(error).__name__, "message": text}
                )
            else:
                children.add(pid)
                _send(channel, {"kind": "started", "rank": request["rank"], "pid": pid})
            for number in fds:
                os.close(number)


def _import(names: Sequence[str], guard: CudaGuard) -> dict[str, str]:
    """Import modules with the garbage collector disabled, which would take a fifth of the time; return the failures."""
    failed: dict[str, str] = {}
    gc.disable()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
        guard.imported(name)
    gc.freeze()  # workers neither traverse these objects nor copy their pages
    return failed


def _wait_readable(channel: socket.socket, signals: socket.socket) -> bool:
    """Wait for a request or a child's end; return True for a request."""
    ready, _, _ = select.select([channel, signals], [], [])
    if signals in ready:
        signals.recv(4096)
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


def _start(
    request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket], start_method: str, guard: CudaGuard
) -> int:
    """Start a worker, or a server for another command, and return its process id.

    A worker that uses CUDA becomes a new interpreter where a fork of this process could not use CUDA.
    """
    if request["op"] == "clone":
        return _clone(request, fds, private, guard)
    if start_method != "forkserver":
        return _exec(request, fds, private)
    warning = guard.warning(request["rank"]) if request["uses_cuda"] else None
    if warning is None:
        return _fork(request, fds, private)
    os.write(fds[0], f"ddpexp: warning: {warning}\n".encode())
    return _exec(request, fds, private)


def _fork(request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket]) -> int:
    def work() -> int:
        for number in (signal.SIGCHLD, *_HANDLED_BY_COMMAND):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        _setup_child(request, fds, private)
        gc.enable()
        sys.argv = [request["entry"], *request["arguments"]]
        return call(request["entry"], request["arguments"])

    return fork(work)


def _clone(request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket], guard: CudaGuard) -> int:
    """Fork a server for another command, which it serves through the first descriptor."""

    def work() -> int:
        os.setpgid(0, 0)
        for channel in private:
            channel.close()
        os.environ.update(request["environ"])
        _serve(socket.socket(fileno=fds[0]), "forkserver", {}, guard)
        return 0

    return fork(work)


def _exec(request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket]) -> int:
    server = os.getpid()

    def work() -> int:
        _setup_child(request, fds, private)
        with memory_file(request["arguments"]) as arguments:
            os.set_inheritable(arguments, True)
            argv = python("ddpexp.launch.workers.server:call_read", server, request["entry"], arguments)
            os.execv(argv[0], argv)

    return fork(work)


def _setup_child(request: dict[str, Any], fds: Sequence[int], private: Sequence[socket.socket]) -> None:
    """Set up a new worker's environment, output (the first descriptor) and channels, and close the server's own."""
    for channel in private:
        channel.close()
    # A new session: the terminal's signals do not reach it, and Linux's scheduler gives each session a fair share of
    # the cores (autogroup), which made small steps 2 to 8 % faster.
    os.setsid()
    os.environ.update(request["environ"])
    log, *others = (fcntl.fcntl(number, fcntl.F_DUPFD, 3) for number in fds)  # inheritable, and clear of 0 to 2
    for number in fds:
        os.close(number)
    os.environ.update({name: str(number) for name, number in zip(request["descriptors"], others, strict=True)})
    redirect_output(log)


def call_under(parent: int, entry: str, arguments: Sequence[str]) -> int:
    """Entry point of a new interpreter: like `call`, and die with the parent."""
    die_with_parent(parent)
    return call(entry, arguments)


def call_read(parent: int, entry: str, arguments: int) -> int:
    """Entry point of a new interpreter: like `call_under`, with arguments from a file of `memory_file`."""
    return call_under(parent, entry, read_memory_file(arguments))


def call(entry: str, arguments: Sequence[str]) -> int:
    """Call `module:function` with the arguments and return its exit code.

    From here on SIGQUIT dumps the stacks of all threads.
    """
    faulthandler.register(signal.SIGQUIT)
    module, function = entry.split(":")
    return int(getattr(importlib.import_module(module), function)(*arguments))
