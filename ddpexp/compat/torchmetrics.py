"""The states of a metric of torchmetrics, which nothing here imports.

Private: `Metric._defaults`, `_reductions`, `_update_count`, `_computed`, `_to_sync` and `_filter_kwargs`;
torchmetrics 1.8 and 1.9.
Why: `Metric.add_state` is public, and nothing public returns what it was called with. `Metric.metric_state` has values.
When it goes: refuse `ddpexp.metric_update`, and let users reduce sums of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def defaults_of(metric: Any) -> Mapping[str, Tensor | list[Tensor]]:
    """Return the states that a metric has declared, by name, with their values before any update."""
    defaults: Mapping[str, Tensor | list[Tensor]] = metric._defaults
    return defaults


def reduction_of(metric: Any, state: str) -> Callable[..., Any] | None:
    """Return the function that merges the values of a state, such as `torchmetrics.utilities.dim_zero_sum`."""
    reduction: Callable[..., Any] | None = metric._reductions[state]
    return reduction


def accepted(metric: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return which of the keywords that a collection is given the `update` of one of its metrics takes."""
    taken: Mapping[str, Any] = metric._filter_kwargs(**keywords)
    return taken


def prepare_compute(metric: Any, num_updates: int) -> None:
    """Have `compute` use the states as they are: as after some updates, without a cached value and communication."""
    metric._update_count = num_updates
    metric._computed = None
    metric._to_sync = False
