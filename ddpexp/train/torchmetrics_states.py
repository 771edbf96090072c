"""Metrics of torchmetrics: the state that each batch adds, and the value of the states of all batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ddpexp.compat.torchmetrics import accepted, defaults_of, prepare_compute, reduction_of
from ddpexp.errors import DdpexpError
from ddpexp.task import MetricUpdate
from ddpexp.train.batch_states import Kind, States
from ddpexp.train.metrics import MetricError
from ddpexp.train.task_checks import is_torchmetrics, shown

_KINDS: Mapping[str, Kind] = {
    "dim_zero_sum": "sum", "dim_zero_mean": "sum", "dim_zero_max": "max", "dim_zero_min": "min", "dim_zero_cat": "list",
}  # fmt: skip


class MetricStates:
    """A metric of torchmetrics in one evaluation: states of single batches, to be reduced in the order of the batches.

    Works on a copy of the metric. How states are reduced is what the metric has said with `add_state`; nothing of
    torchmetrics communicates.
    """

    def __init__(self, name: str, update: MetricUpdate, device: torch.device) -> None:
        """Copy the metric of the entry `name` and check that its states can be reduced.

        Raises:
            DdpexpError: it is no metric, or one of its states cannot be reduced.
        """
        self._name = name
        if not is_torchmetrics(update.metric):
            raise DdpexpError(
                f"metric {name!r}: ddpexp.metric_update takes a torchmetrics.Metric or MetricCollection first, not "
                f"{shown(update.metric)}."
            )
        self._metric = deepcopy(update.metric).to(device)
        kind = sys.modules["torchmetrics"].Metric
        self._parts: dict[str, Any] = {  # of a collection or a wrapper several
            path: part for path, part in self._metric.named_modules() if isinstance(part, kind)
        }
        self._kinds = {
            f"{path}.{state}": self._kind(part, state)
            for path, part in self._parts.items()
            for state in defaults_of(part)
        }
        if not self._kinds:
            raise self._unmergeable(self._metric, "it has none that `add_state` has declared")
        self._is_checked = all(part.full_state_update is False for part in self._parts.values())

    def _kind(self, part: Any, state: str) -> Kind:
        function, default = reduction_of(part, state), defaults_of(part)[state]
        name = getattr(function, "__name__", "a function")
        of_torchmetrics = str(getattr(function, "__module__", "")).startswith("torchmetrics.")
        if isinstance(default, list) and (function is None or (of_torchmetrics and name == "dim_zero_cat")):
            return "list"
        if isinstance(default, list) or not of_torchmetrics or name not in _KINDS:
            reduction = "None" if function is None else name
            raise self._unmergeable(part, f"its state `{state}` has dist_reduce_fx={reduction}")
        if default.is_complex():
            raise self._unmergeable(part, f"its state `{state}` is complex")
        return _KINDS[name]

    def _unmergeable(self, part: Any, reason: str) -> DdpexpError:
        return DdpexpError(
            f"metric {self._name!r}: the states of {type(part).__name__} cannot be merged, because {reason}. Only "
            "states that are summed, averaged, compared or concatenated give the same value at every number "
            "of workers",
            suggestion="Return the sums that it needs, and compute it in the task's finish.",
        )

    def of_batch(self, update: MetricUpdate) -> States:
        """Return the states that a batch alone gives.

        Raises:
            DdpexpError: the metric does not accept the batch, or an update depends on the batches before it.
        """
        self._reset()
        states = self._updated(update)
        if not self._is_checked:
            self._is_checked = True
            self._check_additive(states, self._updated(update))
        return states

    def _reset(self) -> None:
        for part in self._parts.values():
            part.reset()

    def _updated(self, update: MetricUpdate) -> States:
        """Update once more and return the states."""
        members = [self._metric]
        if isinstance(self._metric, torch.nn.ModuleDict):  # a collection
            members = list(self._metric.values(copy_state=False))  # type: ignore[call-arg]
        for member in members:
            keywords = accepted(member, update.keywords) if member is not self._metric else update.keywords
            try:
                member.update(*update.arguments, **keywords)
            except Exception as error:
                raise DdpexpError(
                    f"metric {self._name!r}: {type(member).__name__}.update raised {type(error).__name__}: {error}"
                ) from error
        return {key: (kind, self._value(key, kind)) for key, kind in self._kinds.items()}

    def _value(self, key: str, kind: Kind) -> Tensor | list[Tensor]:
        path, _, state = key.rpartition(".")
        value = getattr(self._parts[path], state)
        if kind != "list":
            return value.detach().clone()  # type: ignore[no-any-return]
        items = list(value) if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, Tensor) for item in items):
            raise self._unmergeable(self._parts[path], f"its state `{state}` holds more than tensors")
        return [item.detach() for item in items]

    def _check_additive(self, once: States, twice: States) -> None:
        """Compare a batch taken twice with its state merged twice: an update may depend on the batches before it."""
        for key, (kind, value) in once.items():
            path, _, state = key.rpartition(".")
            part, other = self._parts[path], twice[key][1]
            if not isinstance(value, Tensor) or not isinstance(other, Tensor):
                same = len(other) == 2 * len(value)
            else:
                doubled = value * 2 if kind == "sum" and not _is_mean(part, state) else value
                same = torch.allclose(doubled.double(), other.double(), rtol=1e-3, equal_nan=True)
            if not same:
                raise self._unmergeable(part, f"an update of its state `{state}` depends on the batches before")

    def compute(self, merged: Mapping[str, Tensor | list[Tensor]], num_batches: int) -> Any:
        """Return the value of the merged states, on the host. Ranks: any; must not communicate.

        Raises:
            MetricError: the metric cannot be computed.
        """
        self._metric.to("cpu")
        self._reset()
        for key in self._kinds:
            path, _, state = key.rpartition(".")
            part = self._parts[path]
            setattr(part, state, self._merged(part, state, merged[key], num_batches))
        for part in self._parts.values():
            prepare_compute(part, num_batches)
        try:
            return self._metric.compute()
        except Exception as error:
            raise MetricError(
                f"metric {self._name!r}: {type(self._metric).__name__}.compute raised {type(error).__name__}: {error}"
            ) from error

    def _merged(self, part: Any, state: str, value: Tensor | list[Tensor], num_batches: int) -> Any:
        if not isinstance(value, Tensor):
            return value if isinstance(defaults_of(part)[state], list) else torch.cat(value)
        return value / num_batches if _is_mean(part, state) else value


def values_of(name: str, value: Any) -> dict[str, float]:
    """Return the numbers in what a metric has computed: its own, or those of a mapping as `name/key`."""
    if isinstance(value, Mapping):
        return {
            inner: number for key, item in value.items() for inner, number in values_of(f"{name}/{key}", item).items()
        }
    return {name: float(value)} if isinstance(value, Tensor) and value.numel() == 1 else {}


def _is_mean(part: Any, state: str) -> bool:
    return getattr(reduction_of(part, state), "__name__", "") == "dim_zero_mean"
