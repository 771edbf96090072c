"""Parse the stacks that faulthandler has written, and Python's tracebacks, to tell where a process is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen|/ddpexp/system/fault_injection\.py$")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*most recent call first")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?),? in (.*)$')
_NATIVE_FRAME = re.compile(
    r"frame #\d+: .*\(0x[0-9a-f]+ in .*\)$|<omitting python frames>$|Exception raised from .* at "
)
_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Frame:
    """One call."""

    file: str
    line: str
    function: str

    @property
    def is_ours(self) -> bool:
        """Return whether it is code of ddpexp."""
        return self.file.startswith(f"{_PACKAGE}/")

    def __str__(self) -> str:
        return f"in {self.function} ({self.file}:{self.line})"


Stack = Sequence[Frame]
"""From the innermost call outward."""


def threads(text: str) -> list[Stack]:
    """Return the stacks in faulthandler's output, that of the main thread last."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (frame := _FRAME.match(line)):
            stacks[-1].append(Frame(frame[1], frame[2], frame[3]))
    return [stack for stack in stacks if stack]


def raised(traceback: str) -> Stack:
    """Return the stack of the first exception in a Python traceback, which is the cause of the others."""
    frames: list[Frame] = []
    for line in traceback.splitlines():
        if frame := _FRAME.match(line):
            frames.append(Frame(frame[1], frame[2], frame[3]))
        elif frames and not line.startswith(" "):
            break
    return frames[::-1]


def is_native_frame(line: str) -> bool:
    """Return whether a line is a frame of an error of torch's C++, which has dozens. Source: c10/util/Backtrace.cpp."""
    return _NATIVE_FRAME.match(line) is not None


def is_stack(line: str) -> bool:
    """Return whether a line is part of faulthandler's output."""
    return not line.strip() or bool(_THREAD.match(line) or _FRAME.match(line)) or line == "  ..."


def shown(stack: Stack) -> Frame:
    """Return the innermost call outside of libraries, for messages."""
    return next((frame for frame in stack if not _LIBRARY.search(frame.file)), stack[0])
