"""The process that draws a sweep's plot: the plotting library is large, and has exit handlers of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from ddpexp.sweep.record import Goal
from ddpexp.system.programs import python
from ddpexp.system.terminal import print_message

_TIMEOUT_SECONDS = 120.0


class Drawing:
    """A process that imports what draws, and draws when `finish` asks it to."""

    def __init__(self, paths: Iterable[Path], goal: Goal, folder: Path, niceness: int = 0) -> None:
        """Start the process; `folder` gets the plot of the sweeps and runs in `paths`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        try:
            self._process = subprocess.Popen(
                python(
                    "ddpexp.sweep.picture:draw_later", [*map(str, paths)], goal.metric, goal.mode, str(folder), niceness
                ),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # no more processes
            self._problem = str(error)

    def finish(self) -> bool:
        """Have the plot drawn; report why if there is none."""
        if self._process is not None:
            try:
                _, stderr = self._process.communicate(timeout=_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self._problem = f"drawing took more than {_TIMEOUT_SECONDS:g} s"
            else:
                if self._process.returncode:
                    lines = stderr.decode(errors="replace").strip().splitlines()
                    self._problem = lines[-1] if lines else f"drawing ended with {self._process.returncode}"
        self.close()
        if self._problem:
            print_message(f"ddpexp: sweep.png is left out: {self._problem}")
        return not self._problem

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
