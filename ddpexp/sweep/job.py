"""A job of a sweep: an experiment that runs in a separate process, as if started by its own command."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ddpexp.config.registry import key_of, path_of
from ddpexp.config.schema import Experiment
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome as command
from ddpexp.run.directory import RunDir
from ddpexp.run.training import Training
from ddpexp.system.forks import fork, redirect_output
from ddpexp.system.streams import MaskedText

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


@dataclass(frozen=True)
class Planned:
    """A job that is composed and checked."""

    number: int
    name: str  # of its directory
    overrides: tuple[str, ...]  # those in which the jobs differ
    arguments: tuple[str, ...]  # all overrides
    experiment: Experiment
    text: str  # config.yaml
    run: RunDir
    workers: int | None  # on this machine, each of which takes a slot; None: it takes all slots
    on_gpus: bool = False
    submits: bool = False  # its launcher hands it to a scheduler
    is_stored: bool = False  # see `Training`

    @property
    def modules(self) -> set[str]:
        """Return the modules of ddpexp and torch that its workers import in addition to those of every worker.

        The user's own modules are left out, because they may keep state.
        """
        experiment = self.experiment
        targets = [node.target for node in (experiment.task, experiment.model, experiment.optimizer)]
        for where, target in (("data", experiment.data.target), ("data.prepare", experiment.data.prepare)):
            key = key_of(where, target)
            targets.append(path_of(where, key) if key is not None else target or "")
        modules = {target.rpartition(".")[0] for target in targets if target.startswith(("ddpexp.", "torch."))}
        logs = (
            ("ddpexp.loggers.tensorboard", "tensorboard.plugins.hparams.summary")
            if any(key_of(f"logger.{name}", node.target) == "tensorboard" for name, node in experiment.logger.items())
            else ()
        )
        return {*modules, *logs, type(experiment.launcher).__module__}

    def training(self, options: Sequence[str]) -> Training:
        """Return what its launcher runs.

        `options` are those of the sweep's command line that say where configs are.
        """
        command = ["ddpexp", *options, *self.arguments, f"run.dir={self.run.path}"]
        return Training(
            self.experiment, self.text, self.arguments, command, keeps_refused=True, is_stored=self.is_stored
        )


@dataclass(frozen=True)
class Started:
    """The process that runs a job."""

    pid: int
    handle: int  # readable when it has ended

    def send(self, number: int) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):  # it has ended just now
            signal.pidfd_send_signal(self.handle, number)

    def wait(self) -> int:
        """Return its exit code once it has ended, -n after signal n."""
        os.close(self.handle)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start(
    job: Planned, options: Sequence[str], server: Server | None, environ: Mapping[str, str], log: Path
) -> Started:
    """Start the process of a job: a fork of this one, which has everything imported and no torch.

    `server` forks it a server of its own, for a launcher that can use one; what it prints goes to `log`.

    Raises: OSError.
    """
    channel = None
    if server is not None:
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.clone(theirs.fileno(), environ)
        theirs.close()
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the new process handles them itself
    try:
        pid = fork(lambda: _run_in_fork(job, options, channel, environ, log))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        if channel is not None:
            channel.close()
    try:
        return Started(pid, os.pidfd_open(pid))
    except OSError:
        os.kill(pid, signal.SIGKILL)  # nobody would learn of its end
        os.waitpid(pid, 0)
        raise


def _run_in_fork(
    job: Planned, options: Sequence[str], channel: socket.socket | None, environ: Mapping[str, str], log: Path
) -> int:
    """Run in the new process: away from the terminal, with an environment of its own."""
    os.setsid()
    kept = channel.fileno() if channel is not None else 2
    os.closerange(3, kept)  # the sweep's lock, its server, its terminal
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX") if kept < 3 else 1 << 16)
    redirect_output(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644))
    sys.stdout, sys.stderr = _text(1), _text(2)
    os.environ.update(environ)
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.SIG_DFL)
    command.stop_on_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    code = command.exit_code_of(lambda: _run(job, options, channel))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk is full
            stream.flush()
    return code


def _text(number: int) -> TextIO:
    file = open(number, "wb", closefd=False)  # noqa: SIM115
    return MaskedText(file, "utf-8", "replace", line_buffering=True)


def _run(job: Planned, options: Sequence[str], channel: socket.socket | None) -> int:
    server = Server.of(channel) if channel is not None else None
    try:
        return command.launch(job.experiment.launcher, job.training(options).job, server)
    finally:
        command.ignore_signals()  # it has ended
        if server is not None:
            server.close()
