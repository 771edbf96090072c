from __future__ import annotations

import torch
import torchmetrics
from torchmetrics.aggregation import MeanMetric, SumMetric

from ddpexp.compat.torchmetrics import accepted, defaults_of, prepare_compute, reduction_of


def test_the_declared_states_of_a_metric() -> None:
    metric = SumMetric()
    assert {name: float(value) for name, value in defaults_of(metric).items()} == {"sum_value": 0.0}  # type: ignore[arg-type]
    reduction = reduction_of(metric, "sum_value")
    assert reduction is not None
    assert (reduction.__module__, reduction.__name__) == ("torchmetrics.utilities.data", "dim_zero_sum")


def test_keywords_that_a_metric_of_a_collection_takes() -> None:
    assert accepted(MeanMetric(), {"weight": 1, "other": 2}) == {"weight": 1}


def test_states_are_computed_as_they_are() -> None:
    metric: torchmetrics.Metric = SumMetric()
    metric.update(1.0)
    assert float(metric.compute()) == 1
    metric.sum_value = torch.tensor(5.0)
    prepare_compute(metric, 3)
    assert (float(metric.compute()), metric.update_count) == (5, 3)  # without a warning, and not the cached value
