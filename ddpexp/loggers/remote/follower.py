"""The side of rank zero: a process for each remote logger, which follows the run's files and ends with the run."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddpexp.loggers.remote.feed import FOLDER
from ddpexp.loggers.remote.media import MediaFile
from ddpexp.system.files import open_to_append, typed
from ddpexp.system.programs import python

ENTRY = "ddpexp.run.sync:follow"
_UNDONE_SECONDS = 2.0  # the longest wait at the end of a run that is not done: a failure must be reported at once
_POLL_SECONDS = 0.02


class Followers(MediaFile):
    """Write media.jsonl for remote loggers, and keep a process for each of them.

    A process starts with the first record, costs a system call per record, and never outlives this process.
    """

    def __init__(self, run_dir: Path, end_seconds: Mapping[str, float], log: logging.Logger) -> None:
        """`end_seconds` is how long the end of the run waits for each logger, by the key below `logger`."""
        super().__init__(run_dir)
        self._run_dir = run_dir
        self._end_seconds = end_seconds
        self._log = log
        self._followers: list[_Follower] | None = None
        self._done = False

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Start the processes at the first record; pass their reports on."""
        for follower in self._started():
            follower.relay()

    def done(self) -> None:
        """Have the remote runs end as done."""
        self._done = True

    def close(self) -> None:
        """Wait a bounded time until everything is sent, and end the processes."""
        super().close()
        followers, begin = self._started(), time.monotonic()
        for follower in followers:
            follower.ask_to_end(self._done)
        for follower in followers:
            limit = self._end_seconds[follower.name]
            follower.end(begin + (limit if self._done else min(limit, _UNDONE_SECONDS)))
            if follower.left:
                why = "" if not self._done or follower.has_reported else f" within {limit:g} s"
                self._log.warning(
                    "logger.%s has not got everything%s. To send the rest: python -m ddpexp sync %s",
                    follower.name, why, typed(self._run_dir),
                )  # fmt: skip

    def _started(self) -> list[_Follower]:
        if self._followers is None:
            self._followers = [_Follower(self._run_dir, name, self._log) for name in self._end_seconds]
        return self._followers


class _Follower:
    """The process of one remote logger."""

    def __init__(self, run_dir: Path, name: str, log: logging.Logger) -> None:
        self.name, self._log = name, log
        self.left, self.has_reported = True, False
        self._buffer = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._reports, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reports, False)
        try:
            (run_dir / FOLDER).mkdir(exist_ok=True)
            with open_to_append(run_dir / FOLDER / f"{name}.log") as output:
                self._process = subprocess.Popen(
                    python(ENTRY, os.getpid(), writing, str(run_dir.resolve()), name),
                    stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[writing],
                )  # fmt: skip
        except OSError as error:
            log.warning("logger.%s: its process cannot be started: %s", name, error)
        finally:
            os.close(writing)

    def relay(self) -> None:
        """Log the reports of the process; never wait."""
        if self._process is None:
            return
        try:
            data = os.read(self._reports, 1 << 16)
        except BlockingIOError:
            return
        if not data and self._process.poll() is not None:
            if self.left:
                self._report(
                    f"ended unexpectedly with exit code {self._process.returncode}: see {FOLDER}/{self.name}.log"
                )
            self._process = None
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "report" in message:
                self._report(message["report"])
            else:
                self.left = bool(message["left"])

    def ask_to_end(self, done: bool) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended
                self._process.stdin.write(json.dumps({"done": done}).encode() + b"\n")
                self._process.stdin.flush()

    def end(self, deadline: float) -> None:
        """Wait until the process has ended, and end it at the deadline."""
        process = self._process
        while self._process is not None and time.monotonic() < deadline:
            self.relay()
            time.sleep(_POLL_SECONDS)
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        self._process = None
        os.close(self._reports)

    def _report(self, text: str) -> None:
        self.has_reported = True
        self._log.warning("logger.%s %s", self.name, text)
