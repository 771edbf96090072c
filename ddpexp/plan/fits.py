"""Whether a plan fits into the memory of a worker."""

from __future__ import annotations

from typing import Literal

from ddpexp.errors import RefusedError
from ddpexp.plan.outcome import Outcome
from ddpexp.system.text import distinct_size_texts

Verdict = Literal["fits", "tight", "too large"]

_UNCERTAIN = 0.1  # of what is predicted
_GB = 1_000_000_000
# Python, torch and its libraries; on a GPU CUDA's context and NCCL's buffers.
_UNCOUNTED_BYTES = {"cpu": 300_000_000, "cuda": 1_000_000_000}


def verdict(outcome: Outcome, memory_gb: float) -> Verdict:
    """Return whether a rank fits; `tight` is within what a plan does not count, or may be wrong by."""
    most, memory = outcome.most_bytes(), memory_gb * _GB
    uncertain = _UNCERTAIN * most + _UNCOUNTED_BYTES[outcome.assumed.layout.device]
    if most > memory:
        return "too large"
    return "tight" if most + uncertain > memory else "fits"


def check_fits(outcome: Outcome, memory_gb: float) -> None:
    """Check that a rank fits into its memory.

    Raises:
        RefusedError: it does not; names what takes less.
    """
    if verdict(outcome, memory_gb) != "too large":
        return
    most, memory = distinct_size_texts(outcome.most_bytes(), round(memory_gb * _GB))
    raise RefusedError(
        f"a rank needs {most}, more than --memory_gb={memory_gb:g} ({memory}): {cure(outcome, memory_gb)}",
        suggestion="plan --strategies compares them.",
    )


def cure(outcome: Outcome, memory_gb: float) -> str:
    """Return what takes less memory than the plan, as overrides."""
    experiment, layout = outcome.experiment, outcome.assumed.layout
    sharded = outcome.estimator.weights_share(layout) > 1
    whole = max(outcome.moments().values(), default=0) > memory_gb * _GB
    cures = []
    if not sharded:
        cures.append("strategy=fsdp" if layout.world_size > 1 else "strategy=fsdp with more workers")
        cures.append("strategy.shard_optimizer=true")
    elif whole:
        cures.append("strategy.init=replay strategy.gather_in_evaluation=false")
    if not experiment.trainer.activation_checkpointing:
        cures.append("trainer.activation_checkpointing=[CLASS]")
    if outcome.batch.micro_batch_size > 1:
        cures.append(f"trainer.micro_batch_size={max(1, outcome.batch.micro_batch_size // 2)}")
    if sharded:
        cures.append("more workers")
    return "try " + " or ".join([", ".join(cures[:-1]), cures[-1]] if len(cures) > 1 else cures)
