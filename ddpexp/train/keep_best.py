"""The metrics of trainer.keep_best and of callbacks: whether the evaluations have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ddpexp.config.build import nearest
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.settings.metrics import check_is_evaluated, check_not_test


class UnknownMetricError(DdpexpError):
    """The metric is not one of the evaluation's."""

    def __init__(self, message: str, override: str) -> None:
        """`override` chooses a metric that exists."""
        super().__init__(message)
        self.args = (message, override)
        self.override = override


def check_set(keep_best: str | None, sets: Iterable[str]) -> None:
    """Check that there is an evaluation set of the metric's name.

    Raises:
        RefusedError: there is none.
    """
    if keep_best is None:
        return
    mode, _, name = keep_best.partition(":")
    chosen, _, metric = name.partition("/")
    known = list(sets)
    if chosen in known:
        return
    if not known:
        raise RefusedError(
            "needs evaluations, and the data has no evaluation set. data.validation_fraction=0.1 holds one "
            "out, named validation",
            key="trainer.keep_best",
            value=keep_best,
        )
    meant = nearest(chosen, known) or known[0]
    full = "accuracy" if metric == "acc" else metric  # the metrics are known once something is evaluated
    raise RefusedError(
        f"names the evaluation set {chosen}, but the data has only {', '.join(known)}",
        key="trainer.keep_best",
        value=keep_best,
        suggestion=f"Did you mean trainer.keep_best={mode}:{meant}/{full}?",
    )


def unknown_metric(keep_best: str, metrics: Iterable[str]) -> UnknownMetricError:
    """Return the error for a metric that is not among the evaluation's `metrics`."""
    mode, _, name = keep_best.partition(":")
    known = list(metrics)
    meant = nearest(name, known)
    losses = [metric for metric in known if metric.endswith("/loss")]
    override = f"trainer.keep_best={f'{mode}:{meant}' if meant else f'min:{losses[0]}'}"
    return UnknownMetricError(
        f"trainer.keep_best={keep_best} names no metric of the evaluation: it has {', '.join(known)}.", override
    )


def with_value(keep_best: str, value: float, best: Sequence[float], count: int) -> list[float] | None:
    """Return the best `count` values with this one among them, the best first; None if it is not better than the last.

    An equal value is not better.
    """
    if math.isnan(value):
        return None
    best = best[:count]
    place = sum(not (value > other if keep_best.startswith("max:") else value < other) for other in best)
    return [*best[:place], value, *best[place:]][:count] if place < count else None


def check_monitor(key: str, metric: str, sets: Iterable[str], eval_every: int | str) -> None:
    """Check that a run evaluates the set of a metric that a callback reads; `key` names the metric.

    Raises:
        RefusedError: it does not, or only at the end.
    """
    check_not_test(key, metric, metric)
    available = list(sets)
    chosen, _, name = metric.partition("/")
    check_is_evaluated(key, metric, eval_every)
    if not available:
        raise RefusedError(
            "needs evaluations, and the data has no evaluation set. data.validation_fraction=0.1 holds one "
            "out, named validation",
            key=key,
            value=metric,
        )
    if not name:
        raise RefusedError(
            key=key, value=metric, suggestion=f"Use a metric of an evaluation set, such as {available[0]}/loss."
        )
    if chosen not in available:
        meant = nearest(chosen, available) or available[0]
        raise RefusedError(
            f"names the evaluation set {chosen}, but the data has only {', '.join(available)}",
            key=key,
            value=metric,
            suggestion=f"Did you mean {key}={meant}/{name}?",
        )


def unknown_monitor(key: str, metric: str, metrics: Iterable[str]) -> RefusedError:
    """Return the error for a metric that a callback reads and that is not among the evaluation's `metrics`."""
    available = list(metrics)
    meant = nearest(metric, available) or available[0]
    return RefusedError(
        f"names no metric of the evaluation: it has {', '.join(available)}",
        key=key,
        value=metric,
        suggestion=f"Did you mean {key}={meant}?",
    )
