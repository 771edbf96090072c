"""Which checkpoints of a run have the best values of a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpexp.checkpoint.format import Checkpoint


def best_checkpoints(complete: Sequence[Checkpoint], keep_best: str, count: int = 1) -> list[Checkpoint]:
    """Return the best checkpoints by `max:` or `min:` and a metric, the best first; of equal ones the earliest first.

    A checkpoint also holds the metrics of an evaluation before its step: of several with the same evaluation only the
    earliest counts. `complete` are a run's checkpoints, in any order.
    """
    mode, _, name = keep_best.partition(":")
    by_evaluation: dict[int, Checkpoint] = {}
    for checkpoint in sorted(complete, key=lambda checkpoint: checkpoint.step):
        value = checkpoint.metrics.get(name)
        if value is not None and not math.isnan(float(value)):
            by_evaluation.setdefault(checkpoint.manifest.get("evaluated_at", checkpoint.step), checkpoint)
    sign = -1 if mode == "max" else 1
    return sorted(by_evaluation.values(), key=lambda found: (sign * float(found.metrics[name]), found.step))[:count]
