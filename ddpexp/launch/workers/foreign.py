"""Run an external launcher program (srun, torchrun's agent) as a child that ends with this command."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ddpexp.errors import StoppedError
from ddpexp.system import programs

_MORE_SECONDS = 5.0  # for the program itself to end, once its workers have


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    grace_seconds: float,
    forwarded: Sequence[int] = (),
    stop_signal: int = signal.SIGTERM,
    ended: Callable[[], bool] = lambda: False,
    lost: Callable[[], bool] = lambda: False,
) -> int:
    """Run the program to its end and return its exit code, 128 + n after a signal.

    `ended` returns whether to stop it early, and `lost` whether to kill it because it would wait forever. Signals in
    `forwarded` are passed on to the program. On a stop signal the program gets `stop_signal`, on which it stops its
    workers, and `grace_seconds` for that.

    Raises:
        StoppedError: a signal to this process ended the program, after the grace period for its workers.
    """
    program = programs.python("ddpexp.system.programs:become", os.getpid(), list(argv))
    program_environ = programs.environ_of_others(environ)
    # A new session: Ctrl-C reaches only this command, which passes it on.
    with (
        subprocess.Popen(program, env=program_environ, start_new_session=True) as process,
        _forwarding(process, forwarded),
    ):
        try:
            while True:
                try:
                    code = process.wait(timeout=0.1)
                    return code if code >= 0 else 128 - code
                except subprocess.TimeoutExpired:
                    if ended():
                        _end(process, grace_seconds, stop_signal)
                    elif lost():
                        process.kill()
        except StoppedError:
            _end(process, grace_seconds, stop_signal)
            raise


@contextmanager
def _forwarding(process: subprocess.Popen[bytes], numbers: Sequence[int]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda number, _frame: process.send_signal(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], grace_seconds: float, stop_signal: int) -> None:
    for number in (stop_signal, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(timeout=grace_seconds + _MORE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
