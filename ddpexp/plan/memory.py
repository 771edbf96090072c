"""Estimates of memory and disk space: memory of a rank, size of a checkpoint. Pure, and free of torch."""

from __future__ import annotations

import math

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.estimator import Estimator, Facts, MemoryItem

AVERAGE = "average of the weights"


def parts(facts: Facts, trainer: Trainer, estimator: Estimator, layout: Layout) -> list[MemoryItem]:
    """Return what one rank holds at the end of a forward pass, and while gradients are reduced."""
    saved = sum(checkpoint_files(facts, trainer).values())
    facts = facts.of_a_rank()
    weights = facts.parameters_bytes // estimator.weights_share(layout)
    estimates = [*estimator.memory(facts, trainer, layout), MemoryItem("buffers", facts.buffers_bytes)]
    if trainer.averages or facts.averaged_by is not None:
        by = facts.averaged_by or ("trainer.swa_start" if trainer.swa_start is not None else "trainer.ema_decay")
        estimates.append(MemoryItem(AVERAGE, weights, by))
    if trainer.precision != "fp32":
        halves = sum(2 * parameter.num_elements for parameter in facts.parameters)
        estimates.append(MemoryItem(f"copies in {trainer.precision}", halves, "of the weights during a pass, at most"))
    copied = trainer.param_dtype == "bf16" and trainer.master_weights
    if copied and not estimator.options.makes_copies(layout.world_size):
        halves = sum(2 * parameter.num_elements for parameter in facts.parameters)
        estimates.append(MemoryItem("copies in bf16", halves, "of the weights during a pass"))
    estimates.append(MemoryItem("activations", facts.activations_bytes, facts.notes.get("activations", "")))
    estimates.append(MemoryItem("temporary", facts.temporary_bytes, "in backward: gradients of activations"))
    estimates.append(MemoryItem("batch", facts.batch_bytes))
    if layout.device == "cuda":
        estimates.append(MemoryItem("samples", facts.device_data_bytes, "data.on_device"))
    estimates.append(MemoryItem("data", facts.data_bytes, facts.notes.get("data", ""), on_host=True))
    estimates.append(
        MemoryItem(
            "checkpoint", -(-saved // layout.world_size), "the copy of its share, while one is written", on_host=True
        )
    )
    return [part for part in estimates if part.num_bytes != 0 or part.name == "gradients"]


def checkpoint_files(facts: Facts, trainer: Trainer) -> dict[str, int]:
    """Return how much each file of a checkpoint takes, without its header. Units: bytes."""
    files = {f"{name}.safetensors": size for name, size in facts.state_bytes.items()}
    if trainer.averages or facts.averaged_by is not None:
        files |= {f"{name}.ema.safetensors": size for name, size in facts.state_bytes.items()}
    return files | {"state.optimizers.safetensors": facts.optimizer_bytes}


def checkpoints_at_once(trainer: Trainer, num_checkpoints: int, num_steps: int) -> int:
    """Return how many checkpoints are on the disk at most.

    The oldest goes when the newest is complete, the best ones and those of trainer.keep_every stay.
    """
    kept = num_checkpoints if trainer.keep_last is None else trainer.keep_last + 1
    best = trainer.keep_best_k if trainer.keep_best is not None else 0
    return min(num_checkpoints, kept + best + (num_steps // trainer.keep_every if trainer.keep_every else 0))


def num_checkpoints(trainer: Trainer, num_steps: int, steps_per_epoch: int) -> int:
    """Return how many checkpoints a run makes: one at each multiple of either period, and one at its end."""
    every = steps_per_epoch if trainer.checkpoint_every == "epoch" else trainer.checkpoint_every
    periods = [period for period in (every, trainer.keep_every) if period]
    both = num_steps // math.lcm(*periods) if len(periods) > 1 else 0
    at_end = all(num_steps % period for period in periods)
    return sum(num_steps // period for period in periods) - both + at_end
