"""Run another launcher's program (srun, torchrun) under this command, and end it with this command."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ddpexp.errors import StoppedError
from ddpexp.system import programs

_MORE_SECONDS = 5.0  # for the program to end, when its workers have


def run(
    words: Sequence[str],
    environ: Mapping[str, str],
    grace_seconds: float,
    passes: Sequence[int] = (),
    asks_with: int = signal.SIGTERM,
    ended: Callable[[], bool] = lambda: False,
    lost: Callable[[], bool] = lambda: False,
) -> int:
    """Run the program to its end and return its exit code, 128 + n after a signal.

    `ended` may ask to stop it before, and `lost` to kill it, for it would wait for ever. Signals in `passes` are the
    program's. A stop signal ends it: `asks_with` is what makes the program have its workers stop, and they have
    `grace_seconds` for that.

    Raises:
        StoppedError: a signal to this process ended the program, which got the time to end its workers.
    """
    program, its = (
        programs.python("ddpexp.system.programs:become", os.getpid(), list(words)),
        programs.environ_of_others(environ),
    )
    # A session of its own: Ctrl-C reaches this command alone, which passes it on.
    with subprocess.Popen(program, env=its, start_new_session=True) as process, _passing(process, passes):
        try:
            while True:
                try:
                    code = process.wait(timeout=0.1)
                    return code if code >= 0 else 128 - code
                except subprocess.TimeoutExpired:
                    if ended():
                        _end(process, grace_seconds, asks_with)
                    elif lost():
                        process.kill()
        except StoppedError:
            _end(process, grace_seconds, asks_with)
            raise


@contextmanager
def _passing(process: subprocess.Popen[bytes], numbers: Sequence[int]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda got, _frame: process.send_signal(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], grace_seconds: float, asks_with: int) -> None:
    for number in (asks_with, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(timeout=grace_seconds + _MORE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
