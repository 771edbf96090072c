"""Collectives that a recipe's code calls where they would mix up the ranks, or change the loss with their number."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpexp.compat.process_groups import FUNCTIONAL, functional_collectives_told
from ddpexp.errors import DdpexpError
from ddpexp.strategy.replica import Models
from ddpexp.system.user_code import place_in_code
from ddpexp.train.metrics import MetricError
from ddpexp.train.task_step import global_loss_of

OnCall = Callable[[str, Sequence[Any]], None]
"""What is told of a collective before it is called: its name, and the arguments of the process group's method."""

_COLLECTIVE = re.compile(r"_?(all|barrier|broadcast|gather|monitored_barrier|recv|reduce|scatter|send)\w*")
"""The methods of a process group by which ranks communicate, under the names that any version of torch gives them."""

_NO_GROUP = "Default process group has not been initialized"  # torch's words at one worker
_GLOBAL_LOSS = "A loss over the global batch has the functions embed and loss in place of step: docs/tasks.md."
_DIFFERENTIABLE = "torch.distributed.nn.functional"
_COLLECTIVES = {"ddpexp.distributed.world", "torch.distributed.distributed_c10d", _DIFFERENTIABLE, FUNCTIONAL}
# Between the code that wants a collective and the process group; wrappers of the standard library come, too.
_BETWEEN = {
    *_COLLECTIVES, __name__, "ddpexp.compat.process_groups", "torch.autograd.function",
    "torch.distributed.c10d_logger", "typing_extensions",
}  # fmt: skip

_NEVER = {  # functions of a task that must not communicate
    "embed": "`loss` gets what it returns on all workers",
    "loss": "it gets the rows of all workers already",
    "counts": "what it returns is added up over all workers anyway",
    "finish": "rank zero alone calls it, with the sums of all workers",
    "on_eval": "rank zero alone calls it",
}


class CollectiveGuard:
    """Calls `on_call`, which may raise an error, before Python code calls a collective.

    Only then can an error be raised before any rank waits. It wraps the methods of torch's class, since a recipe may
    have imported any function of torch.distributed by its name; the reduction of gradients does not pass through
    Python.
    """

    _only: CollectiveGuard | None = None

    def __init__(self) -> None:
        """Tell nobody yet."""
        self.on_call: OnCall | None = None

    @classmethod
    def installed(cls) -> CollectiveGuard:
        """Return the guard of this process, which is installed by the first call."""
        if cls._only is None:
            cls._only = guard = cls()
            for name in filter(_COLLECTIVE.fullmatch, dir(dist.ProcessGroup)):
                method = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, guard._guarded(name.strip("_"), method))
        return cls._only

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            if self.on_call is not None:
                self.on_call(name, arguments[1:])
            return method(*arguments, **named)

        return call


def refuse_in_callback(name: str, arguments: Sequence[Any]) -> None:
    """Refuse a collective that a callback calls.

    Raises:
        DdpexpError: always.
    """
    raise DdpexpError(
        f"it calls the collective {name}, which the other ranks do not call: ranks would wait for one another or mix "
        "up their collectives. A callback must not communicate unless its class sets communicates = True and every "
        "rank calls it"
    )


class TaskCollectives:
    """The collectives that a task's functions call: refused, or reported where they only make the loss depend on ranks.

    A `train_step` may call them. What a model's wrapper or layers of torch call, such as FSDP and SyncBatchNorm, is
    their own affair.
    """

    def __init__(
        self,
        task: Any,
        modules: Models,
        micro_batch_sizes: tuple[int, int] = (1, 1),
        report: Callable[[str], None] = print,
    ) -> None:
        """Look at the task once.

        In training, `micro_batch_sizes` are that of the run, and that with which a rank has one micro-batch; `report`
        gets one sentence if the numbers depend on how many workers there are.
        """
        names = ["step", *_NEVER] if global_loss_of(task) is not None else ["step", "counts", "finish", "on_eval"]
        self._functions: dict[CodeType, tuple[str, str]] = {}  # their names, short and in full
        for name in names:
            function: Any = inspect.unwrap(getattr(task, name, print))
            if (code := getattr(function, "__code__", None)) is not None:
                self._functions[code] = name, function.__qualname__
        self._modules = modules
        self._micro_batch_size, self._whole = micro_batch_sizes
        self._report = report
        self._is_reported = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the collectives inside of the block."""
        guard = CollectiveGuard.installed()
        before, guard.on_call = guard.on_call, self._called
        try:
            with functional_collectives_told(lambda name: self._called(name, ())):
                yield
        finally:
            guard.on_call = before

    def _called(self, name: str, arguments: Sequence[Any]) -> None:
        """Judge a collective by who calls it. Ranks: all alike, unless the task's function is for rank zero.

        Raises:
            DdpexpError: it must not be called there; in an evaluation a MetricError, before which a run is saved.
        """
        frame = inspect.currentframe()
        typed, has_gradient = name, False
        while frame is not None and _is_between(module := _module_of(frame)):
            has_gradient |= module == _DIFFERENTIABLE or (module == FUNCTIONAL and torch.is_grad_enabled())
            typed = frame.f_code.co_name if module in _COLLECTIVES else typed
            frame = frame.f_back
        if name.endswith("barrier") or frame is None or _module_of(frame).partition(".")[0] in ("ddpexp", "torch"):
            return
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        caller: FrameType | None = frame
        while caller is not None and caller.f_code not in self._functions:
            caller = caller.f_back
        if caller is None:
            return
        short, full = self._functions[caller.f_code]
        call = f"{full} ({place})"
        what = f"calls the collective {typed}"
        if short in _NEVER:
            raise DdpexpError(
                f"{what} and must not communicate: {_NEVER[short]}",
                suggestion="A train_step can, by update.world: docs/tasks.md.",
                place=call,
            )
        if not any(module.training for module in self._modules.values()):
            raise MetricError(
                f"{what} in an evaluation, in which workers have differently many batches of "
                "different sizes: they would wait for one another, and the metrics depend on their number",
                suggestion=f"Call it only if model.training. {_GLOBAL_LOSS}",
                place=call,
            )
        divides, is_sum = self._micro_batch_size != self._whole, not has_gradient and _is_plain_sum(name, arguments)
        if divides and not is_sum:
            raise DdpexpError(
                f"{what} for one of several micro-batches of a worker: the loss would depend on "
                "how micro-batches and workers divide the global batch",
                suggestion=f"{_GLOBAL_LOSS} With trainer.micro_batch_size={self._whole} a worker has one micro-batch: "
                "then the call is possible, and the loss depends on the number of workers alone.",
                place=call,
            )
        if (is_sum and not divides) or self._is_reported:  # a sum is that of the global batch
            return
        self._is_reported = True
        of = " over the micro-batches that the workers have at the same time" if is_sum else ""
        self._report(f"{call} {what}{of}: what it makes of the result depends on the number of workers. {_GLOBAL_LOSS}")


@contextmanager
def explained() -> Iterator[None]:
    """Explain the error of a collective that is called at one worker, where there is no process group.

    Raises:
        DdpexpError: in its place.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if _NO_GROUP not in str(error):
            raise
        raise DdpexpError(
            f"{_NO_GROUP}: one worker has none, and torch.distributed cannot be used",
            suggestion="In a train_step use update.world: its gather, sum, max and broadcast work with any number of "
            f"workers. {_GLOBAL_LOSS} Anything else is right behind `if torch.distributed.is_initialized():`.",
            place=place_in_code(error),
        ) from error


def _is_plain_sum(name: str, arguments: Sequence[Any]) -> bool:
    """Return whether a collective is a reduction without a gradient, such as for a buffer that all ranks have alike."""
    if not name.startswith(("all_reduce", "allreduce", "reduce")) or name.startswith("reduce_scatter"):
        return False
    tensors = arguments[0] if arguments and isinstance(arguments[0], list | tuple) else arguments
    return not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _is_between(module: str) -> bool:
    return module in _BETWEEN or module.partition(".")[0] in sys.stdlib_module_names


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
