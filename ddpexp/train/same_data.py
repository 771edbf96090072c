"""Whether the data of a start is that of the steps before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpexp.checkpoint.format import Checkpoint
from ddpexp.data import fingerprint
from ddpexp.data.datasets import Splits
from ddpexp.data.order import TrainingOrder
from ddpexp.errors import RefusedError
from ddpexp.system.files import relative
from ddpexp.train.build import RunContext


def inputs_of(context: RunContext, splits: Splits, order: TrainingOrder | None) -> dict[str, Any]:
    """Return what identifies the configuration and code, as the command recorded them, and the data of this start.

    `order` is that of the training set, where it is not its own.
    """
    recorded = context.run.read(context.run.manifest).get("inputs")
    prepared = context.prepared
    identified = prepared is not None and any(key in prepared for key in fingerprint.IDENTITY)
    return {
        **(recorded if isinstance(recorded, dict) else {}),
        "data": fingerprint.fingerprint(splits, identified, context.experiment.data.num_workers, order),
    }


def check_same_data(
    context: RunContext, newest: Checkpoint, now: Mapping[str, Any], steps_per_epoch: int
) -> dict[str, Any]:
    """Compare the data with that of the steps so far, as the checkpoint recorded it. Ranks: rank zero.

    Returns the data as later checkpoints record it, and its changes so far.

    Raises:
        RefusedError: the data has changed and run.allow_changes does not list it.
    """
    inputs = newest.manifest.get("inputs")
    inputs = inputs if isinstance(inputs, Mapping) else {}
    before, history = inputs.get("data"), inputs.get("data_changes") or []
    changes = fingerprint.differences(before, now) if isinstance(before, Mapping) else []
    if not changes:
        return {"data": fingerprint.carried_over(before, now), **({"data_changes": history} if history else {})}
    change = f"since step {newest.step} the data has changed: {', '.join(changes)}"
    if "data" not in context.experiment.run.allow_changes:
        raise RefusedError(
            f"{relative(context.run.path)}: {change}, so the steps to come would see other samples than the steps so "
            "far",
            suggestion="Make the same data available, type run.allow_changes=[data] to resume with the new data, or "
            "start a "
            "new run with another run.dir.",
        )
    context.log.info(f"{change} (run.allow_changes=[data]): {steps_per_epoch:,} steps an epoch from here on")
    return {"data_changes": [*history, change]}
