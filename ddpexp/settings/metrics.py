"""Rules for keys that choose by a metric."""

from __future__ import annotations

from ddpexp.errors import RefusedError

TIMES = "times/"
"""The metrics that say where the time of a step goes begin with it. Units: seconds a step."""

STEP_PARTS = ("data", "forward", "backward", "waiting", "communication", "optimizer", "other")
"""Of these the time of a step consists, each behind `TIMES`; records, evaluations and checkpoints are between steps."""

MEMORY = "memory/"
"""The metrics of memory begin with it. Units: GiB."""

GPU = "gpu/"
"""The metrics of how busy GPUs are begin with it."""

MEASURED = (TIMES, MEMORY, GPU)
"""Metrics that begin with these say how the training runs: they are no results of it."""

TEST_SET = "test"
"""The evaluation set that is evaluated at the end only, and by which nothing is chosen."""


def check_not_test(key: str, value: str, metric: str) -> None:
    """Check that a key that chooses by a metric does not choose by the test set.

    Raises:
        RefusedError: it does.
    """
    if metric.partition("/")[0] == TEST_SET:
        raise RefusedError(
            f"chooses by the set `{TEST_SET}`, which is for the final result only and is evaluated once, at the end of "
            "a run",
            key=key,
            value=value,
            suggestion="Choose by another set; data.validation_fraction=0.1 holds one out, named validation.",
        )


def check_is_evaluated(key: str, value: str, eval_every: int | str) -> None:
    """Check that a metric that something follows is ever evaluated.

    Raises:
        RefusedError: `trainer.eval_every` is 0.
    """
    if eval_every == 0:
        raise RefusedError(
            "needs evaluations, and trainer.eval_every=0 makes none",
            key=key,
            value=value,
            suggestion="Use trainer.eval_every=epoch.",
        )
