"""Trials of a recipe for `ddpexp check`: each looks at one property, on copies, and returns a problem or None."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.check.attributes import place_of
from ddpexp.check.subject import SEED, Subject, are_close, loss_of_batch
from ddpexp.data.base import IndexData
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.samples import tensors_of
from ddpexp.data.streams import Batches, Stream
from ddpexp.errors import DdpexpError
from ddpexp.system.text import first_few
from ddpexp.train.losses import PREFIX, are_named, losses_of, tensor_counts
from ddpexp.train.task_checks import line_of, mean_for_a_sum, named, split_batch
from ddpexp.train.task_step import function_of, global_loss_of


def different_samples(train: Batches, evals: Mapping[str, EvalBatches]) -> str | None:
    """Return the problem of a data set that returns different samples at the same index."""

    def from_the_beginning() -> Any:
        return next(replace(train, num_workers=0).steps(0, 1))

    readers: dict[str, tuple[Any, Callable[[], Any]]] = {"train": (train.data, from_the_beginning)}
    for name, batches in evals.items():
        readers[name] = (batches.data, batches.first)
    for name, (data, read) in readers.items():
        if not _same(read(), read()):
            function = named(_function_of(data))
            return (
                f"the set `{name}` returns different samples at the same index: {function}. A resumed run and one with "
                "another number of workers would train on other data. Take random numbers from torch, whose generators "
                "are seeded for each micro-batch."
            )
    return None


def _function_of(data: IndexData | Stream) -> Any:
    """Return the function of a recipe that makes the samples of a set."""
    if isinstance(data, Stream):
        return data.open
    whole = data.origin([0])[0]
    names = ("__getitems__", "__getitem__") if whole.is_loaded else ("fetch",)
    return next(found for name in names if (found := getattr(whole.returned, name, None)))


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


def loss_of(subject: Subject, batch: Any, trains: bool = True, host_seed: int = SEED) -> float:
    """Return the loss of a batch in training or evaluation; of a task's own train_step, the total of its losses."""
    copy = subject.copied(trains)
    if trains and copy.is_manual:
        return sum(loss for loss, _ in copy.train_step(batch, host_seed).losses)
    with torch.set_grad_enabled(trains):
        return float(_number(loss_of_batch(copy.step(batch, host_seed))))


def draws_on_host(subject: Subject, batch: Any) -> bool:
    """Return whether the training loss depends on the random numbers of Python or numpy."""
    one, other = (loss_of(subject, batch, host_seed=seed) for seed in (SEED, SEED + 1))
    return not _equal(one, other, subject)


def wrong_sums(subject: Subject, batch: Any) -> list[str]:
    """Return the problems of a loss or a metric that is not additive over the samples of a batch, in evaluation.

    Raises:
        DdpexpError: it cannot be told, as none has a problem and some depend on random numbers.
    """
    if not subject.has_step or global_loss_of(subject.task) is not None:
        return []
    problem = mean_for_a_sum(
        subject.task, subject.model, subject.modules, batch, subject.precision, subject.device, subject.current
    )
    problems = [problem] if problem is not None else []
    parts = split_batch(batch, 3)
    if parts is None:
        return problems
    with torch.no_grad():
        whole, *others = ([*_sums(subject.copied(trains=False).step(one))] for one in (batch, *parts))
        redrawn = [*_sums(subject.copied(trains=False).step(batch, seed=SEED + 1))]
    by_name = [{name: (total, count) for name, total, count in sums} for sums in (whole, *others)]
    drawn = [
        name
        for (name, *one), (_, *other) in zip(whole, redrawn, strict=True)
        if not _additive((one[0], one[1]), (other[0], other[1]), subject.tolerance)
    ]
    step = function_of(subject.task)
    for name, (total, count) in by_name[0].items():
        unclear = name in drawn or not all(name in sums for sums in by_name[1:])
        if unclear or (name == "loss" and problems):
            continue
        added, counted = (sum(sums[name][place] for sums in by_name[1:]) for place in (0, 1))
        if _additive((total, count), (added, counted), subject.tolerance):
            continue
        short = name.removeprefix(PREFIX)
        what = "the loss" if name == "loss" else f"the {'metric' if short == name else 'loss'} {short!r}"
        problems.append(
            f"{named(step)} returns {what}{line_of(step, repr(short)) or line_of(step, chr(34) + short + chr(34))}, "
            f"but it must be a sum over samples: {_shown(total)} over {_shown(count)} for a batch, and together "
            f"{_shown(added)} over {_shown(counted)} for its two parts. An evaluation would depend on the batch size "
            "and on the number of workers: return sums and counts over the samples."
        )
    if drawn and not problems:
        raise DdpexpError(f"random numbers of an evaluation are in {first_few(drawn)}")
    return problems


def wrong_counts(subject: Subject, batches: Sequence[Any]) -> str | None:
    """Return the problem of a task whose `counts` are not the counts of its losses."""
    task: Any = subject.task
    counts, step = named(task.counts), named(function_of(task))
    for batch in batches:
        returned = subject.copied(trains=True).step(batch)
        losses = returned[0] if are_named(returned) else {}
        used = {name: float(count) for name, count in tensor_counts(losses).items()}
        given = {name: float(count) for name, count in task.counts(batch).items()}
        alike = {name for name in used.keys() & given if are_close(used[name], given[name], subject.tolerance)}
        wrong = next((name for name in {**used, **given} if name not in alike), None)
        if wrong is not None:
            return (
                f"{counts} gives {_shown_count(given, wrong)} for the loss {wrong!r}, and {step} "
                f"{_shown_count(used, wrong)} for the same batch: the loss is divided by the first, and recorded with "
                "the second. Return the same from both, for every loss whose count is a tensor."
            )
    return None


def _shown_count(counts: Mapping[str, float], name: str) -> str:
    return f"the count {counts[name]:g}" if name in counts else "no tensor as a count"


def changing_names(subject: Subject, batches: Sequence[Any], where: str) -> str | None:
    """Return the problem of a step whose metrics have other names in another batch."""
    found: list[list[str]] = []
    with torch.no_grad():
        returned = [subject.copied(trains=where == "train").step(batch) for batch in batches]
        found = [sorted([*(losses_of(sums) if are_named(sums) else ()), *sums[-1]]) for sums in returned]
    other = next((names for names in found if names != found[0]), None)
    if other is None:
        return None
    return (
        f"{named(function_of(subject.task))} returns the metrics {first_few(found[0]) or 'none'} for one batch of "
        f"`{where}` and {first_few(other) or 'none'} for another: return the same names for every batch, with a count "
        "of 0 where there is nothing to count."
    )


def unused_parameters(subject: Subject, batch: Any) -> tuple[list[str], str]:
    """Return the parameters that get no gradient from a batch, and where the first one is made."""
    copy = subject.copied(trains=True)
    loss = loss_of_batch(copy.step(batch))
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return [], ""
    loss.backward()  # type: ignore[no-untyped-call]
    return without_gradient(copy)


def without_gradient(copy: Subject, among: Collection[str] | None = None) -> tuple[list[str], str]:
    """Return the parameters of a copy that have no gradient, and where the first one is made; `among` some by name."""
    several = len(copy.modules) > 1
    names, place = [], ""
    for model, root in copy.modules.items():
        for path, module in root.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                shown = ".".join(filter(None, [model if several else "", path, name]))
                if parameter.requires_grad and parameter.grad is None and (among is None or shown in among):
                    names.append(shown)
                    place = place or _made_in(root, shown.split(".")[several:])
    return names, place


def last_batches(subject: Subject, train: Batches, evals: Mapping[str, EvalBatches]) -> str | None:
    """Return the problem of the last batches of an epoch or of an evaluation set, where the first ones have none.

    Raises: what the task raises for them.
    """
    if isinstance(train, TrainBatches) and train.steps_per_epoch > 1:
        alone = replace(train, num_workers=0)
        first, last = (next(iter(alone.steps(step, step + 1))) for step in (0, train.steps_per_epoch - 1))
        for batch in last:
            loss_of(subject, batch)
        if not subject.is_manual and not _uneven_counts(subject, first) and (problem := _uneven_counts(subject, last)):
            return f"{problem} in the last step of an epoch: a number must be the same for every micro-batch of a step."
        if not subject.is_manual and (problem := changing_names(subject, [first[0], last[-1]], "train")):
            return problem
    for name, batches in evals.items() if subject.has_step else ():
        whole = replace(batches, num_workers=0, limit=None)
        final = next(iter(replace(whole, rank=whole.num_batches - 1, world_size=whole.num_batches)))
        if problem := changing_names(subject, [whole.first(), final], name):
            return problem
    return None


def _uneven_counts(subject: Subject, batches: Sequence[Any]) -> str | None:
    losses = [losses_of(subject.copied(trains=True).step(batch)) for batch in batches]
    for name, (_, count) in losses[0].items():
        counts = [others[name][1] for others in losses if name in others]
        other = next((other for other in counts if other != count), None)
        if other is not None and not isinstance(count, Tensor):
            return f"{named(function_of(subject.task))} returns the counts {count} and {other}"
    return None


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
    pairs = {name: (value, 0) if isinstance(value, Tensor) else value for name, value in returned[-1].items()}
    pairs |= losses_of(returned)
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
    if not all(map(math.isfinite, whole)):
        return True
    if not all(map(math.isfinite, parts)):  # no number that is added to it makes the whole finite
        return False
    if are_close(whole[0], parts[0], tolerance) and are_close(whole[1], parts[1], tolerance):
        return True
    return bool(whole[1] and parts[1]) and are_close(whole[0] / whole[1], parts[0] / parts[1], tolerance)


def _equal(one: float, other: float, subject: Subject) -> bool:
    """Return whether two losses are the same: on GPUs, whose sums have no order, within rounding."""
    if math.isnan(one) and math.isnan(other):
        return True
    return one == other if subject.device.type == "cpu" else are_close(one, other, subject.tolerance)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else f"an array of {value.numel():,}"


def _same(one: Any, other: Any) -> bool:
    first, second = list(tensors_of(one)), list(tensors_of(other))
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num() if a.is_floating_point() else a,
                                           b.nan_to_num() if b.is_floating_point() else b)
        for a, b in zip(first, second, strict=True)
    )  # fmt: skip
