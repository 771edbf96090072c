"""Trials of a recipe for `ddpexp check`: each looks at one property, on copies, and returns a problem or None."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.data.batches import EvalBatches
from ddpexp.data.samples import origin, tensors_of
from ddpexp.data.streams import Batches
from ddpexp.distributed.rng import seed_everything
from ddpexp.errors import DdpexpError
from ddpexp.strategy.replica import Models
from ddpexp.system.text import first_few
from ddpexp.task import HasTrainStep, Task
from ddpexp.train.attributes import place_of
from ddpexp.train.precision import Precision
from ddpexp.train.task_checks import line_of, mean_for_a_sum, named, split_batch

_SEED = 1  # of every trial


@dataclass(frozen=True)
class Subject:
    """What the trials look at."""

    task: Task
    model: Any  # without a strategy around it: a module, or several by name
    modules: Models
    precision: Precision
    device: torch.device
    world: Any = None  # that a train_step sees
    is_copy: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """Return the function of the task that trains."""
        return self.task.train_step if isinstance(self.task, HasTrainStep) else self.task.step

    @property
    def is_manual(self) -> bool:
        """Return whether the task trains by itself, so that its `step` is only evaluated."""
        return isinstance(self.task, HasTrainStep)

    def copied(self, trains: bool) -> Subject:
        """Return a copy in training or evaluation mode; the subject itself where it cannot be copied."""
        is_copy = True
        try:
            task, model = deepcopy((self.task, self.model))
        except Exception:  # whatever an object of the user raises
            task, model, is_copy = self.task, self.model, False
        modules: Models = {"model": model} if isinstance(model, nn.Module) else dict(model)
        for module in modules.values():
            module.train(trains and not self.is_manual)
        return replace(self, task=task, model=model, modules=modules, is_copy=is_copy)

    def step(self, batch: Any, host_seed: int = _SEED) -> Any:
        """Return the sums of a batch; torch's random numbers are the same each time.

        `host_seed` seeds Python's and numpy's.
        """
        self._seed(host_seed)
        with self.precision.autocast():
            return self.task.step(self.model, batch)

    def train_step(self, batch: Any, host_seed: int = _SEED) -> list[tuple[float, float]]:
        """Return the losses and counts that a task's own train_step gives update.backward for a batch."""
        assert isinstance(self.task, HasTrainStep)
        if not self.is_copy:  # a train_step may change what it trains
            raise DdpexpError("the task or the model cannot be copied")
        self._seed(host_seed)
        update: Any = _Update(self)
        self.task.train_step(update, [batch])
        losses: list[tuple[float, float]] = update.losses
        return losses

    def _seed(self, host_seed: int) -> None:
        seed_everything(host_seed)
        torch.manual_seed(_SEED)

    @property
    def tolerance(self) -> float:
        """Return the relative difference that rounding may make."""
        return 2e-2 if self.precision.lowers else 1e-3


class _Update:
    """An optimizer step that records the losses and changes no weights."""

    step, num_steps = 0, 2

    def __init__(self, subject: Subject) -> None:
        self.models, self.world, self._precision = subject.model, subject.world, subject.precision
        self.losses: list[tuple[float, float]] = []

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch."""
        return self._precision.autocast()

    def backward(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Record a loss and its count."""
        self.losses.append((float(loss_sum.detach()), float(count)))

    def apply(self, *names: str) -> bool:
        """Leave the weights as they are."""
        return True


def different_samples(train: Batches, evals: Mapping[str, EvalBatches]) -> str | None:
    """Return the problem of a data set that returns different samples at the same index."""

    def from_the_beginning() -> Any:
        return next(replace(train, num_workers=0).steps(0, 1))

    readers: dict[str, tuple[Any, Callable[[], Any]]] = {"train": (train.data, from_the_beginning)}
    for name, batches in evals.items():
        readers[name] = (batches.data, batches.first)
    for name, (data, read) in readers.items():
        if not _same(read(), read()):
            whole = origin(data, [0])[0]
            function = next(
                (
                    found
                    for key in ("gather", "__getitems__", "__getitem__", "open")
                    if (found := getattr(whole, key, None))
                ),
                whole,
            )
            return (
                f"the set `{name}` returns different samples at the same index: {named(function)}. A resumed run and "
                "one with another number of workers would train on other data. Take random numbers from torch, whose "
                "generators are seeded for each micro-batch."
            )
    return None


def different_losses(subject: Subject, batch: Any) -> str | None:
    """Return the problem of a step that depends on more than weights, batch and seed."""
    losses = [loss_of(subject, batch) for _ in range(2)]
    if _equal(losses[0], losses[1], subject):
        return None
    return (
        f"{named(subject.function)} gives the loss {losses[0]:.6g}, then {losses[1]:.6g}, for the same batch, weights "
        "and random seed: the forward pass depends on something else, such as the time, a global variable or a "
        "generator of its own, so no run can be repeated."
    )


def loss_of(subject: Subject, batch: Any, trains: bool = True, host_seed: int = _SEED) -> float:
    """Return the loss of a batch in training or evaluation; of a task's own train_step, the total of its losses."""
    copy = subject.copied(trains)
    if trains and copy.is_manual:
        return sum(loss for loss, _ in copy.train_step(batch, host_seed))
    with torch.set_grad_enabled(trains):
        return float(_number(copy.step(batch, host_seed)[0]))


def draws_on_host(subject: Subject, batch: Any) -> bool:
    """Return whether the training loss depends on the random numbers of Python or numpy."""
    one, other = (loss_of(subject, batch, host_seed=seed) for seed in (_SEED, _SEED + 1))
    return not _equal(one, other, subject)


def means_in_train_step(subject: Subject, batch: Any) -> tuple[str | None, bool]:
    """Compare the losses that a train_step gives update.backward for a batch with those for its halves.

    Returns the problem of a mean where a sum belongs, and whether all losses are known to be sums.
    """
    halves = split_batch(batch, 2)
    if halves is None or not isinstance(subject.task, HasTrainStep):
        return None, False
    seen = [subject.copied(trains=True).train_step(part) for part in (batch, *halves)]
    if not seen[0] or len({len(losses) for losses in seen}) > 1:
        return None, False
    are_sums = True
    for (whole, count), (first, num_first), (second, num_second) in zip(*seen, strict=True):
        counts = count == num_first + num_second and min(num_first, num_second) > 0
        if counts and _close(whole, first + second, subject.tolerance):
            continue
        are_sums = False
        if counts and _close(whole, (first * num_first + second * num_second) / count, subject.tolerance):
            function = subject.task.train_step
            return (
                f"{named(function)} seems to give update.backward{line_of(function, '.backward(')} the mean of a loss, "
                f"not its sum: {whole:.4g} over a count of {count:g}, and {first:.4g} and {second:.4g} over its "
                f"halves. update.backward divides by the count itself, so the gradient is {count:g} times too small: "
                'give it the sum (reduction="sum"), or the mean times the count.'
            ), False
    return None, are_sums


def wrong_sums(subject: Subject, batch: Any) -> list[str]:
    """Return the problems of a loss or a metric that is not additive over the samples of a batch."""
    problem = mean_for_a_sum(subject.task, subject.model, subject.modules, batch, subject.precision, subject.device)
    problems = [problem] if problem is not None else []
    parts = split_batch(batch, 3)
    if parts is None:
        return problems
    with torch.no_grad():
        whole, *others = ([*_sums(subject.copied(trains=False).step(one))] for one in (batch, *parts))
    by_name = [{name: (total, count) for name, total, count in sums} for sums in (whole, *others)]
    step = subject.task.step
    for name, (total, count) in by_name[0].items():
        if not all(name in sums for sums in by_name[1:]) or (name == "loss" and problems):
            continue
        added, counted = (sum(sums[name][place] for sums in by_name[1:]) for place in (0, 1))
        if _additive((total, count), (added, counted), subject.tolerance):
            continue
        what = "the loss" if name == "loss" else f"the metric {name!r}"
        problems.append(
            f"{named(step)} returns {what}{line_of(step, repr(name)) or line_of(step, chr(34) + name + chr(34))}, "
            f"which is not a sum over samples: {_shown(total)} over {_shown(count)} for a batch, and together "
            f"{_shown(added)} over {_shown(counted)} for its two parts. An evaluation would depend on the batch size "
            "and on the number of workers: return sums and counts over the samples."
        )
    return problems


def changing_names(subject: Subject, batches: Sequence[Any], where: str) -> str | None:
    """Return the problem of a step whose metrics have other names in another batch."""
    found: list[list[str]] = []
    with torch.no_grad():
        found = [sorted(subject.copied(trains=where == "train").step(batch)[2]) for batch in batches]
    other = next((names for names in found if names != found[0]), None)
    if other is None:
        return None
    return (
        f"{named(subject.task.step)} returns the metrics {first_few(found[0]) or 'none'} for one batch of `{where}` "
        f"and {first_few(other) or 'none'} for another: return the same names for every batch, with a count of 0 where "
        "there is nothing to count."
    )


def unused_parameters(subject: Subject, batch: Any) -> tuple[list[str], str]:
    """Return the parameters that get no gradient from a batch, and where the first one is made."""
    copy = subject.copied(trains=True)
    loss = copy.step(batch)[0]
    if subject.is_manual or not isinstance(loss, Tensor) or not loss.requires_grad:
        return [], ""
    loss.backward()  # type: ignore[no-untyped-call]
    several = len(copy.modules) > 1
    names, place = [], ""
    for model, root in copy.modules.items():
        for path, module in root.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and parameter.grad is None:
                    names.append(".".join(filter(None, [model if several else "", path, name])))
                    place = place or _made_in(root, names[-1].split(".")[several:])
    return names, place


def _made_in(root: nn.Module, path: Sequence[str]) -> str:
    """Return the file and line of `__init__` that makes a part of a model."""
    owner: Any = root
    place = ""
    for name in path:
        if type(owner).__module__.partition(".")[0] != "torch":
            function = type(owner).__init__
            code = getattr(function, "__code__", None)
            if code is not None:
                line = line_of(function, f"self.{name}").rpartition(" ")[2]
                place = f"{code.co_filename}:{line or code.co_firstlineno}"
        owner = getattr(owner, name, None)
    return place or place_of(root, path[0])


def _sums(returned: Any) -> list[tuple[str, Any, Any]]:
    """Return the name, sum and count of the loss and of each metric; a single array of numbers has the count 0."""
    loss, count, metrics = returned
    pairs = {name: (value, 0) if isinstance(value, Tensor) else value for name, value in metrics.items()}
    pairs["loss"] = (loss, count)
    return [(name, *map(_number, pair)) for name, pair in pairs.items() if isinstance(pair, tuple | list)]


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().double().cpu() if value.dim() else float(value.detach())
    return float(value)


def _additive(whole: tuple[Any, Any], parts: tuple[Any, Any], tolerance: float) -> bool:
    """Return whether sums and counts of the parts give those of the whole, or at least the same mean."""
    if any(isinstance(value, Tensor) for value in (*whole, *parts)):
        return all(
            torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=1e-6)
            for a, b in zip(whole, parts, strict=True)
        )
    if not all(map(math.isfinite, (*whole, *parts))):
        return True
    if _close(whole[0], parts[0], tolerance) and _close(whole[1], parts[1], tolerance):
        return True
    return bool(whole[1] and parts[1]) and _close(whole[0] / whole[1], parts[0] / parts[1], tolerance)


def _close(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-6)


def _equal(one: float, other: float, subject: Subject) -> bool:
    """Return whether two losses are the same: on GPUs, whose sums have no order, within rounding."""
    if math.isnan(one) and math.isnan(other):
        return True
    return one == other if subject.device.type == "cpu" else _close(one, other, subject.tolerance)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else f"an array of {value.numel():,}"


def _same(one: Any, other: Any) -> bool:
    first, second = list(tensors_of(one)), list(tensors_of(other))
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num() if a.is_floating_point() else a,
                                           b.nan_to_num() if b.is_floating_point() else b)
        for a, b in zip(first, second, strict=True)
    )  # fmt: skip


def place_in_code(error: BaseException) -> str:
    """Return the file and line of the user's code where an error was raised, in brackets; empty where there is none."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("ddpexp", "torch", "") and inspect.iscode(code):
            place = f" ({code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place
