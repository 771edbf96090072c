"""Whether a task keeps its contract: looked at once, where it is first seen, and named with its file and line."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from numbers import Integral, Real
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddpexp.compat.autograd import version
from ddpexp.errors import DdpexpError
from ddpexp.task import MetricUpdate, Task
from ddpexp.train.losses import PREFIX, are_named, losses_of
from ddpexp.train.precision import Precision
from ddpexp.train.run import TrainingRun
from ddpexp.train.task_step import CurrentProgress, function_of, global_loss_of, step_of
from ddpexp.train.undo import Undo

SUMS = "(loss_sum, count, {name: (sum, count)})"


def named(function: Callable[..., Any]) -> str:
    """Return a function's name, and its file and line where it has any."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def check_sums(found: Any, step: Callable[..., Any], trains: bool, evaluates: bool = False) -> None:
    """Look at what a task's function has returned; the loop goes back from the loss if it `trains`.

    Metrics that are no pairs of scalars are for a step that `evaluates`.

    Raises:
        DdpexpError: it is not what the contract says.
    """
    problem = _problem(found, trains, evaluates)
    if problem is not None:
        raise DdpexpError(f"returned {problem}", place=named(step))


def check_loss(loss: Any, count: Any, step: Callable[..., Any]) -> None:
    """Look at a loss that a task's own train_step goes back from, and at its count.

    Raises:
        DdpexpError: the loss is not a scalar that depends on the parameters, or the count is not a number.
    """
    problem = _problem_of_loss(loss, trains=True) or _problem_of_count(count)
    if problem is not None:
        raise DdpexpError(f"gave micro_batch.backward {problem}", place=named(step))


def _problem(found: Any, trains: bool, evaluates: bool) -> str | None:
    if are_named(found) and (trains or evaluates):
        losses, metrics = found
        problem = _problem_of_losses(losses, trains)
    elif isinstance(found, tuple | list) and len(found) == 3:
        loss, count, metrics = found
        problem = _problem_of_loss(loss, trains) or _problem_of_count(count)
    else:
        return (
            f"{shown(found)}, where the loop expects {SUMS}: the loss summed over the batch, what it is to be "
            f"divided by (mostly the number of samples), and the metrics, {{}} for none."
        )
    if problem is not None:
        return problem
    if not isinstance(metrics, Mapping):
        return f"{shown(metrics)} as the metrics, where {{name: (sum, count)}} belongs, {{}} for none."
    for name, pair in metrics.items():
        if not isinstance(name, str) or name == "loss":
            return (
                f"a metric named {name!r}: a name must be a text, and `loss` is the name of the loss itself. Give it "
                "another "
                "one."
            )
        problem = None if evaluates and _is_for_evaluation(pair) else _problem_of_pair(name, pair)
        if problem is not None:
            hint = "Arrays and metrics of torchmetrics are for evaluation: return them if not model.training."
            return f"{problem} {hint}" if not evaluates and _is_for_evaluation(pair) else problem
    return None


def _problem_of_losses(losses: Mapping[Any, Any], trains: bool) -> str | None:
    """Return the problem of several losses by name."""
    if not losses:
        return "no loss, where {name: (sum, count)} belongs."
    for name, loss in losses.items():
        if not isinstance(name, str) or not name:
            return f"a loss named {name!r}: a name must be a text."
        if not isinstance(loss, tuple | list) or len(loss) not in (2, 3):
            return (
                f"{shown(loss)} as the loss {name!r}, where (sum, count) or (sum, count, weight) belongs: its sum over "
                "the batch, and the count that the sum over the global batch is divided by."
            )
        wrong = _problem_of_loss(loss[0], trains=False) or _problem_of_count(loss[1])
        if wrong is None and len(loss) == 3 and not is_number(loss[2]):
            wrong = f"{shown(loss[2])} as the weight, where one number belongs."
        if wrong is not None:
            return f"for the loss {name!r} {wrong}"
    if trains and not any(loss[0].requires_grad for loss in losses.values()):
        return _problem_of_loss(next(iter(losses.values()))[0], trains)
    return None


def _problem_of_pair(name: str, pair: Any) -> str | None:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return (
            f"{shown(pair)} as the metric {name!r}, where a pair belongs: its sum over the batch, and the count "
            "that the sum is divided by when it is recorded."
        )
    wrong = next((part for part in pair if not is_number(part)), None)
    if wrong is not None:
        return f"{shown(wrong)} in the pair of the metric {name!r}, where one number belongs: add it up over the batch."
    return None


def _is_for_evaluation(entry: Any) -> bool:
    """Return whether a metric is one that only an evaluation can have: see `ddpexp.task.Task.step`."""
    if isinstance(entry, tuple | list):
        return len(entry) == 2 and all(is_number(part) or _is_array(part) for part in entry)
    if isinstance(entry, Tensor):
        return not entry.is_floating_point() and not entry.is_complex()
    return isinstance(entry, MetricUpdate | Integral) or (isinstance(entry, np.ndarray) and entry.dtype.kind in "biu")


def _is_array(value: Any) -> bool:
    return (isinstance(value, Tensor) and not value.is_complex()) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    )


def _problem_of_loss(loss: Any, trains: bool) -> str | None:
    if not isinstance(loss, Tensor):
        return f"{shown(loss)} as the loss, where a tensor of one number belongs: the loss summed over the batch."
    if loss.dim():
        return (
            f"{shown(loss)} as the loss, where one number belongs: add it up over the batch, for example by loss.sum()."
        )
    if trains and not loss.requires_grad:
        return (
            "a loss that does not require a gradient, so nothing can be learned from it: return it as it was "
            "computed from the model's parameters, without detach() or torch.no_grad()."
        )
    return None


def _problem_of_count(count: Any) -> str | None:
    if is_number(count):
        return None
    return f"{shown(count)} as the count, where one number belongs: what the loss of this batch is to be divided by."


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor of one."""
    return not value.dim() if isinstance(value, Tensor) else isinstance(value, Real)


def is_torchmetrics(value: Any) -> bool:
    """Return whether a value is a metric, or a collection of metrics, of torchmetrics; does not import it."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric | torchmetrics.MetricCollection)


def shown(value: Any) -> str:
    """Describe a value in a few words, such as `a tensor of shape (3,)`."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.dim() else "a single tensor"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def mean_for_a_sum(
    task: Task,
    model: Any,
    modules: Mapping[str, nn.Module],
    batch: Any,
    precision: Precision,
    device: torch.device,
    current: CurrentProgress,
) -> str | None:
    """Return a warning if a task seems to return the mean of the loss where its sum belongs, otherwise None.

    The loss of a batch is compared with those of its halves, in evaluation mode, of the bare `model`. Nothing is
    changed:
    buffers and random numbers are put back, and what the task sets in itself is set in a copy. None too where that
    cannot be decided: a batch that cannot be cut, a loss that is no sum, a count that does not follow the batch, a step
    that fails, a task that holds more than plain values (a file, a metric, a network).
    The model must not communicate: the step may fail on one rank alone.
    """
    halves = split_batch(batch, 2)
    if halves is None or not holds_plain_values(task) or global_loss_of(task) is not None:
        return None
    try:
        with unnoticed(modules, device), torch.no_grad(), precision.autocast():
            # Each on its own: a task may count its calls.
            seen = [losses_of(step_of(deepcopy(task), current)(model, one)) for one in (batch, *halves)]
            numbers = {name: [(float(losses[name][0]), float(losses[name][1])) for losses in seen] for name in seen[0]}
    except Exception:  # whatever it is, training continues without it
        return None
    problems = (_mean_problem(named(function_of(task)), name, pairs, precision) for name, pairs in numbers.items())
    return next(filter(None, problems), None)


def _mean_problem(source: str, name: str, pairs: Sequence[tuple[float, float]], precision: Precision) -> str | None:
    """Return the warning for a loss, given its sum and count for a batch and for both halves."""
    (whole, count), (first, num_first), (second, num_second) = pairs
    if count != num_first + num_second or min(num_first, num_second) <= 0 or not math.isfinite(whole):
        return None
    mean = (first * num_first + second * num_second) / count
    tolerance = 0.02 if precision.lowers else 0.001
    if abs(whole - mean) > tolerance * abs(whole) or abs(whole - first - second) <= 0.25 * abs(whole):
        return None
    loss = "the loss" if name == "loss" else f"the loss {name.removeprefix(PREFIX)!r}"
    return (
        f"{source} seems to return the mean of {loss}, not its sum: {whole:.4g} over a count of "
        f"{count:g}, and {first:.4g} and {second:.4g} over its halves. The loop divides by the count itself, so the "
        f"gradient is {count:g} times "
        f'too small: return the sum (reduction="sum"), or the mean times the count.'
    )


def warn_of_a_mean(run: TrainingRun, batch: Any) -> None:
    """Warn of a task that seems to return a mean instead of a sum. Ranks: all; rank zero warns."""
    strategy, device = run.strategy, run.world.device
    warning = mean_for_a_sum(run.task, strategy.eval_model, strategy.modules, batch, run.precision, device, run.current)
    if warning is not None and run.world.is_rank_zero:
        logging.getLogger("ddpexp").warning(warning)


def gradients_of(parameters: Iterable[Tensor]) -> list[tuple[Tensor, int] | None]:
    """Return the gradients with their versions, by which a change can be detected."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if gradient is None else (gradient, version(gradient)) for gradient in gradients]


def check_unchanged(
    before: Sequence[tuple[Tensor, int] | None], parameters: Iterable[Tensor], step: Callable[..., Any]
) -> None:
    """Check that a task's step has left the gradients alone.

    Raises:
        DdpexpError: it has run a backward pass itself.
    """
    for old, new in zip(before, gradients_of(parameters), strict=True):
        if old is not new and (old is None or new is None or old[0] is not new[0] or old[1] != new[1]):
            raise DdpexpError(
                f"runs the backward pass itself{line_of(step, '.backward(')}, and the loop runs it too, with the loss "
                "that is returned: gradients would be added twice",
                suggestion="Return the loss without calling backward(). A task that needs several backward "
                "passes has a train_step: see ddpexp.task.HasTrainStep.",
                place=named(step),
            )


def own_backward(step: Callable[..., Any]) -> DdpexpError:
    """Return the error for a train_step whose gradients are not of `micro_batch.backward`."""
    return DdpexpError(
        f"calls update.apply with gradients of a backward pass of its own{line_of(step, '.backward(')}: they are not "
        "divided by the count over the global batch",
        suggestion="Call micro_batch.backward(loss_sum, count) in place of loss.backward().",
        place=named(step),
    )


def line_of(function: Callable[..., Any], text: str) -> str:
    """Return the line of a function that has a text, such as ` in line 12`; empty where none is found."""
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
    number = next((first + index for index, line in enumerate(lines) if text in line.partition("#")[0]), None)
    return "" if number is None else f" in line {number}"


def holds_plain_values(task: Task) -> bool:
    """Return whether a copy of a task shares nothing with it that could change."""
    return _is_plain(vars(task) if isinstance(getattr(task, "__dict__", None), dict) else None)


def _is_plain(value: Any) -> bool:
    """Return whether a copy of a value shares nothing with it that could change."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, nn.Module):
        return type(value).__module__ == "torch.nn.modules.loss" or is_torchmetrics(value)
    return isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype | FunctionType | type)


@contextmanager
def unnoticed(modules: Mapping[str, nn.Module], device: torch.device) -> Iterator[None]:
    """Switch to evaluation for a while, and leave buffers, modes and all random numbers as they were."""
    undo = Undo(modules)
    undo.take()
    modes = [(module, module.training) for root in modules.values() for module in root.modules()]
    try:
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
            for root in modules.values():
                root.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        undo.restore()


def split_batch(batch: Any, num_parts: int) -> tuple[Any, Any] | None:
    """Split a nest of tensors in two by their first dimension, the first with 1 / num_parts of the samples.

    None where they share none of at least two.
    """
    sizes: set[int] = set()
    if not _collect(batch, sizes) or len(sizes) != 1 or (size := sizes.pop()) < 2:
        return None
    first = max(1, size // num_parts)
    return _cut(batch, slice(0, first)), _cut(batch, slice(first, size))


def _collect(batch: Any, sizes: set[int]) -> bool:
    """Collect the first dimensions; return whether everything is a tensor that has one."""
    if isinstance(batch, Tensor):
        sizes.update(batch.shape[:1])
        return batch.dim() > 0
    values = batch.values() if isinstance(batch, Mapping) else batch
    return isinstance(batch, Mapping | tuple | list) and all(_collect(value, sizes) for value in values)


def _cut(batch: Any, part: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[part]
    if isinstance(batch, Mapping):
        return {key: _cut(value, part) for key, value in batch.items()}
    values = [_cut(value, part) for value in batch]
    return type(batch)(*values) if isinstance(batch, tuple) and type(batch) is not tuple else type(batch)(values)


def check_names(chosen: Sequence[str], applied: Sequence[str], optimizers: Mapping[str, Any]) -> None:
    """Check the names that a task's `train_step` passes to `apply`, after those of earlier calls.

    Raises:
        DdpexpError: there is no such optimizer, or it has used these gradients.
    """
    unknown = [name for name in chosen if name not in optimizers]
    if unknown:
        raise DdpexpError(
            f"the task's train_step calls update.apply({', '.join(map(repr, chosen))}), but the task has no optimizer "
            f"{unknown[0]!r}: its optimizers are {', '.join(map(repr, optimizers))}."
        )
    seen = [*applied, *chosen]
    again = [name for number, name in enumerate(seen) if name in seen[:number]]
    if again:
        raise DdpexpError(
            f"the task's train_step calls update.apply for the optimizer {again[0]!r} twice with the same "
            "gradients, which would take the step twice",
            suggestion="Go through a micro-batch in between, or call it once.",
        )
