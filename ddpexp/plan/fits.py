"""Whether a plan fits into the memory of a worker, and what else fits where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ddpexp.errors import RefusedError
from ddpexp.plan.outcome import Outcome
from ddpexp.strategy.estimator import Facts
from ddpexp.system.text import distinct_size_texts, size_text

Verdict = Literal["fits", "tight", "too large"]

_UNCERTAIN = 0.1  # of what is predicted
_GB = 1_000_000_000
_MICRO = "trainer.micro_batch_size="
_AGAIN = "trainer.activation_checkpointing="
_SENTENCES: Mapping[Verdict, str] = {"fits": "What fits: {}.", "tight": "What is tight: {}."}
_NAMED = 3  # remedies in a message
# Python, torch and its libraries; on a GPU CUDA's context and NCCL's buffers.
_UNCOUNTED_BYTES = {"cpu": 300_000_000, "cuda": 1_000_000_000}


def verdict(outcome: Outcome, memory_gb: float) -> Verdict:
    """Return whether a rank fits; `tight` is within what a plan does not count, or may be wrong by."""
    most, memory = outcome.most_bytes(), memory_gb * _GB
    uncertain = _UNCERTAIN * most + _UNCOUNTED_BYTES[outcome.assumed.layout.device]
    if most > memory:
        return "too large"
    return "tight" if most + uncertain > memory else "fits"


def is_mostly_activations(outcome: Outcome) -> bool:
    """Return whether a rank holds more for the samples of a micro-batch than for the model."""
    return 2 * _of_samples(outcome.facts) > outcome.most_bytes()


def remedies(outcome: Outcome, memory_gb: float) -> list[list[tuple[str, ...]]]:
    """Return overrides with which a rank may take less, in groups: first those that change what takes most.

    Whether it does is for a plan of each to say.
    """
    smaller: list[tuple[str, ...]] = [(f"trainer.micro_batch_size={size}",) for size in _smaller(outcome, memory_gb)]
    classes = getattr(outcome.experiment.strategy, "blocks", None) or ()
    if classes and not outcome.experiment.trainer.activation_checkpointing:
        smaller.append((f"{_AGAIN}[{','.join(classes)}]",))
    sharded: list[tuple[str, ...]] = []
    if outcome.estimator.weights_share(outcome.assumed.layout) > 1:
        sharded = [("strategy.init=replay", "strategy.gather_in_evaluation=false")] if outcome.moments() else []
    elif outcome.assumed.layout.world_size > 1:
        sharded = [("strategy=ddp", "strategy.shard_optimizer=true"), ("strategy=fsdp",)]
        sharded.append((*sharded[-1], "strategy.init=replay", "strategy.gather_in_evaluation=false"))
    return [smaller, sharded] if is_mostly_activations(outcome) else [sharded, smaller]


def smaller_too(remedy: Sequence[str], outcome: Outcome, memory_gb: float) -> list[tuple[str, ...]]:
    """Return a remedy whose plan is too large with smaller micro-batches."""
    if any(word.startswith(_MICRO) for word in remedy):
        return []
    return [(*remedy, f"{_MICRO}{size}") for size in _smaller(outcome, memory_gb)]


def with_remedy(run: Sequence[str], remedy: Sequence[str]) -> list[str]:
    """Return the overrides of a run with those of a remedy in their place."""
    keys = {word.partition("=")[0] for word in remedy}
    old = ("strategy.",) if "strategy" in keys else ()
    return [word for word in run if word.partition("=")[0] not in keys and not word.startswith(old)] + [*remedy]


def does_not_fit(outcome: Outcome, memory_gb: float, tried: Sequence[tuple[Sequence[str], Outcome]]) -> RefusedError:
    """Return the error of a plan that is too large; `tried` are remedies with their plans, of which what fits is named.

    Each is named by what its own plan says.
    """
    most, memory = distinct_size_texts(outcome.most_bytes(), round(memory_gb * _GB))
    reason = f"a rank needs {most}, more than --memory_gb={memory_gb:g} ({memory})"
    if samples := _of_samples(outcome.facts):
        reason += f", {size_text(samples)} of it for the samples of a micro-batch of {outcome.batch.micro_batch_size:,}"
    if outcome.facts.activations_bytes is None:
        reason += " beside activations of unknown size"
    by_verdict: dict[Verdict, dict[tuple[str, ...], str]] = {}
    for words, planned in tried:
        text = f"{' '.join(words)} ({size_text(planned.most_bytes())})"
        others = tuple(word for word in words if not word.startswith(_MICRO))  # of several sizes the largest is named
        by_verdict.setdefault(verdict(planned, memory_gb), {}).setdefault(others, text)
    again, are_layers_known = "", any(word.startswith(_AGAIN) for words, _ in tried for word in words)
    if is_mostly_activations(outcome) and not (outcome.experiment.trainer.activation_checkpointing or are_layers_known):
        again = f" {_AGAIN}[CLASS], the class of a layer, takes less too."
    for found, sentence in _SENTENCES.items():
        if named := list(by_verdict.get(found, {}).values()):
            return RefusedError(f"{reason}.", suggestion=sentence.format(", or ".join(named[:_NAMED])) + again)
    least = min(tried, key=lambda one: one[1].most_bytes(), default=None)
    tightest = f" {' '.join(least[0])} takes least ({size_text(least[1].most_bytes())})." if least is not None else ""
    return RefusedError(f"{reason}.", suggestion=f"Use more workers, or more memory.{tightest}{again}")


def _smaller(outcome: Outcome, memory_gb: float) -> list[int]:
    """Return sizes of micro-batches that may fit, largest first, as far as memory grows with their samples."""
    batch = outcome.batch
    if not _of_samples(outcome.facts) or outcome.experiment.data.batch_tokens is not None:
        return []
    whole = batch.global_batch_size // batch.data_size
    sizes = [size for size in range(batch.micro_batch_size - 1, 0, -1) if whole % size == 0]
    fitting = [size for size in sizes if verdict(_scaled(outcome, size), memory_gb) == "fits"]
    return (fitting or sizes[-1:])[:2]


def _scaled(outcome: Outcome, size: int) -> Outcome:
    """Return an estimate of the plan with another micro-batch."""
    facts, batch = outcome.facts, outcome.batch

    def of_samples(num_bytes: int | None) -> int:
        return (num_bytes or 0) * size // batch.micro_batch_size

    passes = batch.global_batch_size // (size * batch.data_size)
    scaled = replace(
        facts,
        activations_bytes=of_samples(facts.activations_bytes),
        recomputed_bytes=of_samples(facts.recomputed_bytes),
        temporary_bytes=of_samples(facts.temporary_bytes),
        batch_bytes=of_samples(facts.batch_bytes),
        num_passes=passes,
    )
    return replace(
        outcome, facts=scaled, batch=replace(batch, micro_batch_size=size, gradient_accumulation_steps=passes)
    )


def _of_samples(facts: Facts) -> int:
    """Return what grows with the micro-batch."""
    return (facts.activations_bytes or 0) + facts.temporary_bytes + (facts.batch_bytes or 0)
