"""torch's compiler. Every function but `end_processes` imports it.

Private: `torch._dynamo` and `torch._inductor`; torch 2.10 to 2.13.
Why: `torch.compiler` is public and has no hook for compilations, no reasons for recompilations, no folder of the files
that are kept, and no end of the processes that compile.
When it goes: see each function.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch


def on_compiled(note: Callable[[Any], None]) -> None:
    """Have `note` called after each compilation, with `torch._dynamo.callback.CallbackArgs`.

    Private: `torch._dynamo.callback.callback_handler`; torch 2.10 to 2.13.
    Why: torch announces compilations nowhere else.
    When it goes: leave out the line of a run's report that counts compilations.
    """
    from torch._dynamo.callback import callback_handler

    callback_handler.register_end_callback(note)


def metrics() -> Iterable[Any]:
    """Return what torch remembers of compilations, oldest first: `torch._dynamo.utils.CompilationMetrics`.

    Private: `torch._dynamo.utils.get_compilation_metrics`; torch 2.10 to 2.13.
    Why: the reason for a recompilation is written to torch's log alone, and only if TORCH_LOGS asks for it.
    When it goes: leave out the reason.
    """
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def cache_folder() -> Path:
    """Return the folder of the files that the compiler keeps between runs.

    Private: `torch._inductor.codecache.cache_dir`; torch 2.10 to 2.13.
    Why: TORCHINDUCTOR_CACHE_DIR is public, and its default is not.
    When it goes: set TORCHINDUCTOR_CACHE_DIR before the compiler is imported.
    """
    import torch._inductor.codecache as codecache

    return Path(codecache.cache_dir())  # type: ignore[attr-defined]


def leave_graphs_whole() -> None:
    """Have the compiler not cut graphs at the ends of DDP's buckets.

    Private: `torch._dynamo.config.optimize_ddp`; torch 2.10 to 2.13.
    Why: `torch.compiler.config` does not have it.
    When it goes: `torch.compile` cuts blocks in two: slower, with the same results.
    """
    torch._dynamo.config.optimize_ddp = False


def prepare_steps() -> bool:
    """Have the compiler trace `torch.autograd.grad`, and shapes as constants; return whether this torch can.

    Private: `torch._dynamo.config.trace_autograd_ops` and `automatic_dynamic_shapes`; torch 2.13.
    Why: `torch.compiler.config` does not have them. `torch.compile(dynamic=False)` sets the second one anew in each
    call, which takes 5 microseconds.
    When it goes: return True if a graph with `torch.autograd.grad` compiles without it, and pass `dynamic=False`.
    """
    config: Any = torch._dynamo.config
    if getattr(config, "trace_autograd_ops", None) is None:
        return False
    config.trace_autograd_ops = True
    config.automatic_dynamic_shapes = False
    return True


@dataclass(frozen=True)
class Failure:
    """Why the compiler could not make one graph of a function."""

    reason: str  # torch's, without a full stop; empty: it was compiled too often
    place: str | None  # file:line of the code that it is about


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of functions that are not one graph.

    Private: `torch._dynamo.exc.TorchDynamoException` and `FailOnRecompileLimitHit`; torch 2.10 to 2.13.
    Why: torch documents no exception of its compiler.
    When it goes: return `(RuntimeError,)`.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def why(error: Exception) -> Failure:
    """Return the reason of one of the `failures`.

    Private: `real_stack` and `inner_exception` of torch's exceptions, and the form of their texts; torch 2.10 to 2.13.
    Why: torch's text has ten lines and more, of advice to its developers.
    When it goes: the reason is the first line of the text, without a place.
    """
    frames: Iterable[FrameSummary] = getattr(error, "real_stack", None) or ()
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename]
    place = next((f"{frame.filename}:{frame.lineno}" for frame in reversed(own)), None)
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return Failure("", place)
    inner = getattr(error, "inner_exception", error)  # of a backend, such as one without a C++ compiler
    text = str(error).strip() if inner is error else f"{type(inner).__name__}: {inner}"
    for pattern, sentence in _SENTENCES.items():
        if (found := re.search(pattern, text, re.MULTILINE)) is not None:
            return Failure(sentence.format(found[1].strip().rstrip(".")), place)
    return Failure(text, place)


_SENTENCES = {  # by what the text of an error has: the first of these
    r"^\s*Developer debug context: raised exception (.+)$": "it raises {}",
    r"^\s*Explanation: (.+)$": "{}",
    r"\A(.*)$": "{}",
}


def end_processes() -> None:
    """End the processes that compile, if there are any.

    Private: `torch._inductor.async_compile.shutdown_compile_workers`; torch 2.10 to 2.13.
    Why: torch ends them when its process exits, for which it waits a second.
    When it goes: nothing fails.
    """
    pools = sys.modules.get("torch._inductor.async_compile")
    if pools is not None:
        with suppress(Exception):  # the work is done; the processes also end when this one does
            pools.shutdown_compile_workers()
