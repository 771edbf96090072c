"""Functions that torch compiles as one graph, for trainer.compile_step."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ddpexp.compat.compiler import failures, why
from ddpexp.errors import RefusedError
from ddpexp.train.compilations import recompilations

KEY = "trainer.compile_step"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def whole_graph(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function as one graph for each shape of its inputs, compiled when it is called.

    After `ddpexp.compat.compiler.prepare_steps`. Not with shapes as variables: then the kernels of a step would depend
    on the steps before it, so that a resumed run would have other bits. Random numbers are drawn by torch's own
    operators, as without compilation.

    The function raises RefusedError if it is not one graph.
    """
    graph = torch.compile(function, fullgraph=True, options={"fallback_random": True})

    def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return graph(*arguments, **named)
        except failures() as error:
            raise _refused(error) from None

    return call


def _refused(error: Exception) -> RefusedError:
    failure = why(error)
    if failure.reason:
        where = "finds no step" if failure.place is None else "is in no step"
        return RefusedError(
            f"{where} of which torch makes one graph: {failure.reason}",
            key=KEY,
            value=True,
            suggestion="Change that line, or use trainer.compile=true trainer.compile_step=false.",
            place=failure.place,
        )
    last = " ".join(recompilations()[-1].reason.split()) if recompilations() else "torch does not tell why"
    return RefusedError(
        f"compiles the step again whenever its shapes or settings change, and that was too often: {last}",
        key=KEY,
        value=True,
        suggestion="Give all batches the same shape, or use trainer.compile_step=false.",
    )
