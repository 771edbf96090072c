"""Trials of a task's own `train_step` for `ddpexp check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import cycle, islice
from typing import Any

from ddpexp.check.subject import Subject, are_close
from ddpexp.check.trials import without_gradient
from ddpexp.task import HasTrainStep
from ddpexp.train.task_checks import line_of, named, split_batch

_STEPS = 16  # of trials in which some network may step more rarely


def means_in_train_step(subject: Subject, batch: Any) -> tuple[str | None, bool]:
    """Compare the losses that a train_step gives micro_batch.backward for a batch with those for its halves.

    Returns the problem of a mean where a sum belongs, and whether all losses are known to be sums.
    """
    halves = split_batch(batch, 2)
    if halves is None or not isinstance(subject.task, HasTrainStep):
        return None, False
    seen = [subject.copied(trains=True, is_calm=True).train_step(part).losses for part in (batch, *halves)]
    if not seen[0] or len({len(losses) for losses in seen}) > 1:
        return None, False
    are_sums = True
    for (whole, count), (first, num_first), (second, num_second) in zip(*seen, strict=True):
        counts = count == num_first + num_second and min(num_first, num_second) > 0
        if counts and are_close(whole, first + second, subject.tolerance):
            continue
        are_sums = False
        if counts and are_close(whole, (first * num_first + second * num_second) / count, subject.tolerance):
            function = subject.task.train_step
            return (
                f"{named(function)} seems to give backward{line_of(function, '.backward(')} the mean of a loss, "
                f"not its sum: {whole:.4g} over a count of {count:g}, and {first:.4g} and {second:.4g} over its "
                f"halves. backward divides by the count itself, so the gradient is {count:g} times too small: "
                'give it the sum (reduction="sum"), or the mean times the count.'
            ), False
    return None, are_sums


def uneven_calls(subject: Subject, batches: Sequence[Any]) -> str | None:
    """Return the problem of a train_step whose calls in which workers meet depend on the batch."""
    seen = [subject.copied(trains=True).train_step(batch).calls for batch in batches]
    other = next((calls for calls in seen if calls != seen[0]), None)
    if other is None:
        return None
    one, two = Counter(seen[0]), Counter(other)
    call = next((call for call in {**one, **two} if one[call] != two[call]), None)
    differs = (
        f"calls {call} {one[call]} times for one batch and {two[call]} times for another"
        if call is not None
        else f"calls {', '.join(seen[0])} for one batch and {', '.join(other)} for another"
    )
    return (
        f"{named(subject.function)} {differs}, in the same step: workers, each with other batches, would wait for one "
        "another. Make the same calls on every worker: decide with update.step, or with update.world.sum."
    )


def never_trained(subject: Subject, batches: Sequence[Any], trained: Collection[str]) -> tuple[list[str], str]:
    """Return which of the `trained` parameters get no gradient in several steps, and where the first one is made."""
    missing, place = list(trained), ""
    for step, batch in enumerate(islice(cycle(batches), _STEPS)):
        copy = subject.copied(trains=True)
        copy.train_step(batch, step=step)
        missing, place = without_gradient(copy, missing)
        if not missing:
            break
    return missing, place
