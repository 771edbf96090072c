"""torch.compile in a worker: the processes that it may start, and what it has compiled."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpexp.compat.compiler import metrics, on_compiled

_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_COMPILE_ID = re.compile(r"(\d+)/(\d+)$")  # the number of a piece of code, and how often it was compiled before


def limit_processes(environ: MutableMapping[str, str], cores: int, workers: int) -> None:
    """Let the workers of a machine share its cores for compilation, unless the user has set a number.

    Left alone, each worker starts a process for every core, at most 32. Before torch's compiler is imported.
    """
    environ.setdefault(_THREADS, str(max(1, cores // workers)))


@dataclass(frozen=True)
class Recompilation:
    """Why a piece of code was compiled again."""

    name: str  # of the function
    file: str
    line: int
    reason: str


class Compilations:
    """What this process has compiled so far."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._ids: list[str] = []

    @classmethod
    def watched(cls) -> Compilations:
        """Import the compiler, and count from now on what it compiles."""
        compilations = cls()
        on_compiled(compilations.note)
        return compilations

    def note(self, arguments: Any) -> None:
        """Note a compilation; called by torch with `torch._dynamo.callback.CallbackArgs`."""
        if arguments.callback_trigger.name == "DYNAMO":
            self._ids.append(str(arguments.compile_id))

    def summary(self) -> str:
        """Return what was compiled, in a line."""
        return describe(self._ids, recompilations())


def recompilations() -> list[Recompilation]:
    """Return the reasons for compiling again that torch still remembers, oldest first."""
    return [
        Recompilation(one.co_name or "?", one.co_filename or "?", one.co_firstlineno or 0, one.recompile_reason)
        for one in metrics()
        if one.recompile_reason
    ]


def describe(ids: Sequence[str], reasons: Sequence[Recompilation]) -> str:
    """Return a line about compilations with these ids, of which the later ones of the same code need a reason."""
    again = sum(match is not None and int(match[2]) > 0 for match in map(_COMPILE_ID.search, ids))
    text = f"torch.compile: {len(ids) - again} compiled, {again} compiled again"
    if not again or not reasons:
        return text
    last = reasons[-1]
    return f"{text}, the last one {last.name} ({Path(last.file).name}:{last.line}): {' '.join(last.reason.split())}"
