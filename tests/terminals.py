"""A command on a pseudo-terminal of its own, as a user has one: the session's terminal, in its foreground."""

from __future__ import annotations

import os
import re
import select
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.conftest import PATIENCE

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Session:
    """A running command, what its terminal shows, and what is typed."""

    def __init__(self, command: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> None:
        self.terminal, theirs = os.openpty()
        self.theirs = theirs  # kept open, so that the mode can be read when the command has ended
        self.shown = ""
        self._read_to = 0
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], cwd=cwd, env={**environ, "TERM": "xterm"},
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        if self.terminal >= 0:
            os.close(self.terminal)
        os.close(self.theirs)

    def close_window(self) -> None:
        """Close the terminal, which sends SIGHUP to the command."""
        os.close(self.terminal)
        self.terminal = -1

    def expect(self, text: str) -> str:
        """Wait until the terminal shows the text after what was expected before; return all in between."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.shown.find(text, self._read_to)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.shown}"
            if not self._read(0.1):
                assert self.process.poll() is None or self._read(0.5), f"ended without {text!r}:\n{self.shown}"
        between, self._read_to = self.shown[self._read_to : found], found + len(text)
        return between

    def type(self, text: str) -> None:
        """Type a line, or where it has an end a key."""
        os.write(self.terminal, text.encode())

    def at(self, prompt: str, *lines: str) -> None:
        """Type each line at its own prompt."""
        for line in lines:
            self.expect(prompt)
            self.type(f"{line}\n")

    def end(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{self.shown}"
            self._read(0.1)
        while self._read(0.05):
            pass
        return self.process.returncode

    def is_sane(self) -> bool:
        """Return whether the terminal echoes, edits lines, and has its usual keys."""
        mode = termios.tcgetattr(self.theirs)
        usual = termios.ECHO | termios.ICANON | termios.ISIG
        return bool(mode[3] & usual == usual) and mode[6][termios.VSUSP] == b"\x1a"

    def _read(self, seconds: float) -> bool:
        if self.terminal < 0:
            time.sleep(seconds)
            return False
        if not select.select([self.terminal], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.terminal, 1 << 16)
        except OSError:
            return False
        self.shown += _ESCAPES.sub("", data.decode(errors="replace"))
        return bool(data)
