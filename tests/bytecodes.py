"""Bytecodes and calls of Python, by function: what a step costs the interpreter, without a clock."""

from __future__ import annotations

import linecache
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

MARKS = "marks of times"
"""In place of a function: what tells `ddpexp.distributed.times` of a phase."""


class Count(NamedTuple):
    """What some code has executed, by file and function."""

    codes: Counter[str]
    calls: Counter[str]

    @property
    def total(self) -> int:
        """Bytecodes and calls, without those of marks."""
        return sum(counts.total() - counts[MARKS] for counts in self)

    def table(self, steps: int) -> str:
        """Return the numbers of a step by function, the largest first."""
        rows = (f"{n / steps:8.1f} {self.calls[name] / steps:6.2f} {name}" for name, n in self.codes.most_common())
        return f"{self.codes.total() / steps:8.1f} {self.calls.total() / steps:6.2f}\n" + "\n".join(rows)


@cache
def _calls_mark(code: CodeType, line: int) -> bool:
    return re.search(r"times\.(begin|end_step)\(", linecache.getline(code.co_filename, line)) is not None


def count(function: Callable[[], Any], is_counted: Callable[[], bool] = lambda: True) -> Count:
    """Call a function and count what this thread executes while `is_counted` says so."""
    found = Count(Counter(), Counter())

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        place = code.co_filename.split("site-packages/")[-1].rsplit("/ddpexp/", 1)[-1]
        is_mark = place == "distributed/times.py"
        name = MARKS if is_mark else f"{place} {getattr(code, 'co_qualname', code.co_name)}"
        found.calls[name] += is_counted()
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def execute(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode" and is_counted():
                found.codes[MARKS if _calls_mark(code, frame.f_lineno or 0) else name] += 1
            return execute

        return execute

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function()
    finally:
        sys.settrace(before)
    return found
