"""Check what a recipe's own classes and functions give before anything is trained with it.

Every refusal names the function with its file and line, and what belongs in the place of what it gave.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.utils.data import DataLoader

from ddpexp.config.build import did_you_mean
from ddpexp.data.adapters import adapted
from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.data.streams import Stream
from ddpexp.errors import RefusedError, subject
from ddpexp.loggers.base import Logger, Truncatable
from ddpexp.strategy.options import Options
from ddpexp.task import HasEmbed, HasTrainStep
from ddpexp.train.callbacks.base import Callback
from ddpexp.train.task_checks import SUMS, named, shown

_LOGGER_METHODS: Mapping[str, Sequence[str]] = {  # of ddpexp.loggers.base.Logger, with their arguments
    "scalars": ("step", "epoch", "values"),
    "text": ("name", "text"),
    "image": ("name", "pixels", "step"),
    "histogram": ("name", "values", "step"),
    "hyperparameters": ("values",),
    "done": (),
    "close": (),
}

_CALLBACK_METHODS: Mapping[str, Sequence[str]] = {  # of ddpexp.train.callbacks.base.Callback, with their arguments
    "on_start": ("run",),
    "on_gradients": ("run",),
    "on_step": ("run",),
    "on_evaluated": ("run", "metrics"),
    "on_end": ("run",),
    "state_dict": (),
    "load_state_dict": ("state",),
}


@runtime_checkable
class _HasStep(Protocol):
    def step(self, model: Any, batch: Any) -> Any: ...


def check_splits(splits: Any, target: str) -> Splits:
    """Return what a data function has returned, once its sets can be read by index.

    Raises:
        RefusedError: it is no `Splits`, or one of its sets is not a map-style data set with samples.
    """
    if not isinstance(splits, Splits):
        raise _refused_data(
            target,
            f"must return ddpexp.data.datasets.Splits, not {type(splits).__name__}",
            'Return Splits(train=..., evals={"eval": ...}), or evals={} without an evaluation set.',
        )
    if not isinstance(splits.evals, Mapping):
        raise _refused_data(
            target,
            f"gave {shown(splits.evals)} as evals, where a mapping of names to data sets belongs: "
            'Splits(train, {"eval": ...}), {} for none',
        )
    found = {name: _adapted(part, name, target) for name, part in {"train": splits.train, **splits.evals}.items()}
    return replace(splits, train=found["train"], evals={name: found[name] for name in splits.evals})


def _adapted(part: Any, name: str, target: str) -> IndexData | Stream:
    if isinstance(part, DataLoader):
        raise _refused_data(target, f"`{name}` is a DataLoader", "Return its data set; ddpexp makes the batches.")
    found = adapted(part)
    if found is None:
        kind = type(part).__name__
        hint = ""
        if isinstance(part, Iterable):
            hint = (
                "An iterable of unknown length is given as ddpexp.data.streams.Stream(open), where open(index, count) "
                "returns its index-th of `count` parts."
            )
        elif hasattr(part, "__len__"):
            hint = f"One that makes batches inherits from ddpexp.data.base.IndexData: class {kind}(IndexData)."
        reason = f"`{name}` is a {kind}: a data set needs __len__ and __getitem__ (map-style)"
        raise _refused_data(target, reason, hint)
    if isinstance(found, IndexData) and (lacks := found.lacks):
        raise _refused_data(target, f"`{name}` is {type(part).__name__}, an IndexData without {lacks}", "Add it.")
    if not isinstance(found, Stream) and len(found) == 0:
        raise _refused_data(target, f"returned no samples for `{name}`")
    return found


def _refused_data(target: str, reason: str, suggestion: str = "") -> RefusedError:
    return RefusedError(reason, key="data._target_", value=target, suggestion=suggestion)


def check_takes_directory(function: Callable[..., Any], keys: Iterable[str], named_by: str) -> None:
    """Check that a logger's class takes the run directory before the keys of its section.

    Raises:
        RefusedError: it takes the keys alone; with the definition that takes both.
    """
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(keys))
    except (TypeError, ValueError):
        return  # building it reports what is wrong with the keys
    try:
        signature.bind("", **dict.fromkeys(keys))
    except TypeError:
        raise RefusedError(
            "A logger gets the run directory as its first argument, before its keys",
            suggestion=f"Write def __init__({', '.join(['self', 'run_dir', *keys])}).",
            **subject(named_by),
        ) from None


def check_logger(logger: Any, named_by: str) -> Logger:
    """Return what a logger's class has made, once it has every method that a run calls.

    Raises:
        RefusedError: it lacks one, or one cannot be called as a run calls it.
    """
    for method, arguments in _LOGGER_METHODS.items():
        if not callable(getattr(logger, method, None)):
            raise RefusedError(
                f"The class {type(logger).__name__} lacks the method {method}, which every logger has",
                suggestion="Derive it from ddpexp.loggers.base.Logger, and define what it records.",
                **subject(named_by),
            )
        check_signature(getattr(logger, method), method, arguments)
    if isinstance(logger, Truncatable):
        check_signature(logger.truncate, "truncate", ("position", "step"))
    checked: Logger = logger
    return checked


def check_callback(callback: Any, named_by: str) -> Callback:
    """Return what a callback's class has made, once each of its methods is one that a run calls.

    Raises:
        RefusedError: it is no callback, one of its methods would never be called, or cannot be called as a run does.
    """
    kind = type(callback)
    if not isinstance(callback, Callback):
        raise RefusedError(
            f"The class {kind.__name__} is not a callback",
            suggestion="Derive it from ddpexp.Callback.",
            **subject(named_by),
        )
    if callback.rank_zero_only and callback.communicates:
        raise RefusedError(
            f"The callback {kind.__name__} sets rank_zero_only and communicates, so rank zero would wait for the other "
            "ranks forever",
            suggestion="Leave one of them out.",
            **subject(named_by),
        )
    for name in dir(kind):
        if name.startswith("on_") and not hasattr(Callback, name):
            meant = did_you_mean(name, _CALLBACK_METHODS)
            raise RefusedError(f"A run never calls {kind.__name__}.{name}", suggestion=meant, **subject(named_by))
    saves, loads = (getattr(kind, name) is not getattr(Callback, name) for name in ("state_dict", "load_state_dict"))
    if saves is not loads:
        there, missing = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        raise RefusedError(
            f"The callback {kind.__name__} has {there} but not {missing}, so a resumed run would lose its state",
            suggestion=f"Write def {missing}({', '.join(['self', *_CALLBACK_METHODS[missing]])}), or leave "
            f"{there} out.",
            **subject(named_by),
        )
    for name, arguments in _CALLBACK_METHODS.items():
        check_signature(getattr(callback, name), name, arguments)
    return callback


def check_model(model: Any, target: str, trains: bool) -> Any:
    """Return what a model function has returned, once it is a module or a mapping of them.

    Raises:
        RefusedError: it is something else, or it is to be trained and all of its parameters are frozen.
    """
    modules = list(model.values()) if isinstance(model, Mapping) else [model]
    wrong = [module for module in modules if not isinstance(module, nn.Module)]
    if wrong or not modules:
        within = " in a mapping" if isinstance(model, Mapping) and wrong else ""
        raise RefusedError(
            f"returned {shown(wrong[0] if wrong else model)}{within}, where a torch.nn.Module, or a mapping "
            "of them, belongs",
            key="model._target_",
            value=target,
        )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    if trains and parameters and not any(parameter.requires_grad for parameter in parameters):
        raise RefusedError(
            "returned a model of which no parameter requires a gradient, so there is nothing to train",
            key="model._target_",
            value=target,
            suggestion="Keep requires_grad=True for the parameters to train.",
        )
    return model


def check_task(task: Any, target: str, evaluates: bool) -> None:
    """Check that a task has the methods that the loop calls, with their arguments.

    `evaluates`: whether there are evaluations, which call `step` also where training does not.

    Raises:
        RefusedError: with the method as it is written.
    """
    flops = getattr(task, "flops_per_sample", None)
    if flops is not None and not (isinstance(flops, int | float) and 0 < flops < math.inf):
        raise RefusedError(
            f"gave a task whose flops_per_sample is {shown(flops)}, where a number above 0 belongs",
            key="task._target_",
            value=target,
            suggestion="Leave it out, and they are counted where they can be.",
        )
    if isinstance(task, HasTrainStep):
        check_signature(task.train_step, "train_step", ("update", "batches"))
    if isinstance(task, _HasStep):
        check_signature(task.step, "step", ("model", "batch"))
    elif isinstance(task, HasEmbed):
        check_signature(task.embed, "embed", ("model", "batch"))
        check_signature(task.loss, "loss", ("model", "embeddings"))
    elif not isinstance(task, HasTrainStep):
        made = "None" if task is None else f"a {_located(type(task))}"
        raise RefusedError(
            f"gave {made} without the method step(self, model, batch), which returns {SUMS}",
            key="task._target_",
            value=target,
            suggestion="See ddpexp.task.Task.",
        )
    elif evaluates:
        raise RefusedError(
            f"gave a {_located(type(task))} with a train_step and without the method step(self, model, "
            "batch), which evaluations call",
            key="task._target_",
            value=target,
            suggestion="Add it, or set trainer.eval_every=0.",
        )


def check_train_step(task: Any, strategy: Options) -> None:
    """Check that the strategy supports a task that does a step itself, or whose loss is over the global batch.

    Raises:
        RefusedError: it does not.
    """
    if strategy.supports_train_step:
        return
    if isinstance(task, HasTrainStep):
        raise RefusedError(
            "does not support a task with a train_step, which decides by itself when gradients are computed and used",
            key="strategy",
            value=strategy.kind,
            suggestion="Use strategy=ddp, or a task that has only the method step.",
        )
    if not isinstance(task, _HasStep):
        raise RefusedError(
            "does not support a task with embed and loss in place of step, whose loss is over the global batch: no "
            "worker sees all of it",
            key="strategy",
            value=strategy.kind,
            suggestion="Use strategy=ddp or strategy=fsdp.",
        )


def check_signature(method: Callable[..., Any], name: str, arguments: Sequence[str]) -> None:
    """Check that a method can be called with these arguments, by position.

    Raises:
        RefusedError: it cannot; with the definition that can.
    """
    try:
        signature = inspect.signature(method)
        signature.bind(*arguments, **({"progress": None} if "progress" in signature.parameters else {}))
    except TypeError:
        raise RefusedError(
            f"cannot be called with ({', '.join(arguments)})",
            suggestion=f"Write def {name}({', '.join(['self', *arguments])}).",
            place=named(method),
        ) from None
    except ValueError:
        return  # a builtin without a signature


def check_optimizers(optimizers: Any, make: Callable[..., Any]) -> Any:
    """Return what a task's `optimizers` has returned, once it is a mapping.

    Raises:
        RefusedError: it is a list, or a single optimizer, or an optimizer has no learning rate.
    """
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise RefusedError(
            f"returned {shown(optimizers)}, where a mapping of names to optimizers belongs, such as "
            '{"name": optimizer}',
            place=named(make),
        )
    for name, optimizer in optimizers.items():
        if not all("lr" in group for group in optimizer.param_groups):
            raise RefusedError(
                f"returned the optimizer {name!r} ({type(optimizer).__qualname__}), whose parameter groups lack 'lr', "
                "which the schedule multiplies",
                suggestion='Give the defaults of the class one: super().__init__(parameters, {"lr": 1.0, ...}).',
                place=named(make),
            )
    return optimizers


def _located(kind: type) -> str:
    """Return a class's name, and its file and line where its source is there."""
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return kind.__qualname__
    return f"{kind.__qualname__} ({file}:{line})"
