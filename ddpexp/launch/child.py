"""Run another launcher's program (srun, torchrun) under this command, and end it with this command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from ddpexp.errors import StoppedError

# The program dies with this command, whatever happens to that.
_EXEC = (
    "import sys; sys.path[:] = filter(None, sys.path); import json, os; parent, path, words = json.loads(sys.argv[1]); "
    "sys.path[:] = path; from ddpexp.launch.process import die_with_parent; die_with_parent(parent); os.execvp(words[0], words)"
)
_GRACE_SECONDS = 30.0


def run(words: Sequence[str], environ: Mapping[str, str], ended: Callable[[], bool] = lambda: False) -> int:
    """Run the program to its end and return its exit code, 128 + n after a signal; `ended` may ask to stop it before.

    Raises:
        StoppedError: a signal to this process ended the program, which got the time to end its workers.
    """
    described = json.dumps([os.getpid(), sys.path, list(words)])
    program = [sys.executable, "-c", _EXEC, described]
    # A session of its own: Ctrl-C reaches this command alone, which passes it on.
    with subprocess.Popen(program, env=dict(environ), start_new_session=True) as process:
        try:
            while True:
                try:
                    code = process.wait(timeout=0.1)
                    return code if code >= 0 else 128 - code
                except subprocess.TimeoutExpired:
                    if ended():
                        _end(process)
        except StoppedError:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(timeout=_GRACE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
