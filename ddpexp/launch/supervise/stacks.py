"""Where a process is, by the stacks that faulthandler has written and by the tracebacks of errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen|/ddpexp/system/fault_injection\.py$")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*most recent call first")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?),? in (.*)$')
_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Frame:
    """One call."""

    file: str
    line: str
    function: str

    @property
    def is_ours(self) -> bool:
        """Tell whether it is code of ddpexp."""
        return self.file.startswith(f"{_PACKAGE}/")

    def __str__(self) -> str:
        return f"in {self.function} ({self.file}:{self.line})"


Stack = Sequence[Frame]
"""From the innermost call outward."""


def threads(text: str) -> list[Stack]:
    """Return the stacks in what faulthandler has written, that of the main thread last."""
    found: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif found and (frame := _FRAME.match(line)):
            found[-1].append(Frame(frame[1], frame[2], frame[3]))
    return [stack for stack in found if stack]


def raised(traceback: str) -> Stack:
    """Return the stack of the first error in a traceback of Python, which is the cause of the others."""
    frames: list[Frame] = []
    for line in traceback.splitlines():
        if frame := _FRAME.match(line):
            frames.append(Frame(frame[1], frame[2], frame[3]))
        elif frames and not line.startswith(" "):
            break
    return frames[::-1]


def is_stack(line: str) -> bool:
    """Tell whether a line is faulthandler's."""
    return not line.strip() or bool(_THREAD.match(line) or _FRAME.match(line)) or line == "  ..."


def shown(stack: Stack) -> Frame:
    """Return the innermost call that is no library's: what somebody wants to know."""
    return next((frame for frame in stack if not _LIBRARY.search(frame.file)), stack[0])
