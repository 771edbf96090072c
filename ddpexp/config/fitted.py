"""The micro-batch of `trainer.micro_batch_size=fit`, free of torch.

The first start of a run finds it, and its manifest keeps it: another micro-batch has other sums, and a model may depend
on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddpexp.config.schema import Experiment

KEY = "trainer.micro_batch_size"
FIT = "fit"


def recorded(manifest: Mapping[str, Any] | None) -> int | None:
    """Return the micro-batch that a manifest keeps; None if there is none."""
    resolved = (manifest or {}).get("resolved")
    size = resolved.get(KEY) if isinstance(resolved, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def resolved(experiment: Experiment, manifest: Mapping[str, Any] | None) -> Experiment:
    """Return an experiment with the micro-batch that its manifest keeps in the place of `fit`."""
    size = recorded(manifest)
    if experiment.trainer.micro_batch_size != FIT or size is None:
        return experiment
    return with_size(experiment, size)


def with_size(experiment: Experiment, size: int) -> Experiment:
    """Return an experiment with another micro-batch."""
    return replace(experiment, trainer=replace(experiment.trainer, micro_batch_size=size))
