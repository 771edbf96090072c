"""How the global batch is split into micro-batches over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpexp.errors import RefusedError
from ddpexp.system.text import counted

_MOST_TIMES = 16  # a batch this many times as large as the one in the configuration is no advice
_MOST_LISTED = 8


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of a step: global batch = micro-batch x gradient accumulation steps x data size."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    data_size: int  # ranks that compute different micro-batches

    def formula(self, batch_tokens: int | None = None) -> str:
        """Return how the global batch is made up, such as `micro-batch 16 x 2 accumulation steps x 4 ranks`.

        A micro-batch has 16 samples then, or at most `batch_tokens` tokens.
        """
        steps, ranks = counted(self.gradient_accumulation_steps, "accumulation step"), counted(self.data_size, "rank")
        size = f"{self.micro_batch_size:,}" if batch_tokens is None else f"of {batch_tokens:,} tokens"
        return f"micro-batch {size} x {steps} x {ranks}"


def plan_batches(global_batch_size: int, micro_batch_size: int | Literal["auto", "fit"], data_size: int) -> BatchPlan:
    """Split the global batch into micro-batches over `data_size` workers, those that compute different micro-batches.

    One that is `fit` and not found yet is planned as `auto`, the largest that it can be.

    Raises:
        RefusedError: it does not split evenly; names the nearest batch size or the world sizes that do.
    """
    total, micro = global_batch_size, micro_batch_size
    key = "trainer.global_batch_size"
    if isinstance(micro, str):
        if total % data_size:
            fits = _round_up(total, data_size)
            raise RefusedError(
                f"does not split over {data_size} workers",
                key=key,
                value=total,
                suggestion=f"Use a multiple of {data_size}, for example {key}={fits}.",
            )
        return BatchPlan(total, total // data_size, 1, data_size)
    one_pass = micro * data_size
    if total % one_pass:
        sizes = [size for size in range(1, 65) if total % (micro * size) == 0]
        also = f" Or use {_either(sizes)} worker{'s' if sizes != [1] else ''}." if sizes and total % micro == 0 else ""
        raise RefusedError(
            f"does not split over {data_size} workers with trainer.micro_batch_size={micro} ({one_pass} a pass)",
            key=key,
            value=total,
            suggestion=f"Use a multiple of {one_pass}, for example {key}={_round_up(total, one_pass)}.{also}",
        )
    return BatchPlan(total, micro, total // one_pass, data_size)


def check_range(
    global_batch_size: int, micro_batch_size: int | Literal["auto", "fit"], data_sizes: Mapping[int, int], nodes: str
) -> None:
    """Check that the global batch splits over each number of machines in a range, such as `nodes` 1:4.

    `data_sizes` maps each number of machines, in ascending order, to its data size.

    Raises:
        RefusedError: it does not; names all numbers for which it does not, and a batch that splits over every one.
    """
    total, micro = global_batch_size, 1 if isinstance(micro_batch_size, str) else micro_batch_size
    if total < 1 or micro < 1:
        return  # `plan_batches` reports it
    failing = [number for number, size in data_sizes.items() if total % (size * micro)]
    if not failing:
        return
    multiple = math.lcm(*(size * micro for size in data_sizes.values()))
    passes = "" if isinstance(micro_batch_size, str) else f" with trainer.micro_batch_size={micro}"
    remedies = []
    if multiple <= _MOST_TIMES * total:
        remedies.append(
            f"Use a multiple of {multiple}, which splits over every number of machines in the range, for example "
            f"trainer.global_batch_size={_round_up(total, multiple)}."
        )
    first, *_ = data_sizes
    if failing[0] > first:
        narrower = f"{first}:{failing[0] - 1}" if failing[0] - 1 > first else str(first)
        remedies.append(f"{'Or use' if remedies else 'Use'} a smaller range, such as trainer.nodes={narrower}.")
    elif not remedies:
        remedies.append("Use a smaller range of trainer.nodes.")
    raise RefusedError(
        f"does not split over {_listed([data_sizes[number] for number in failing])} workers{passes}, with "
        f"{_listed(failing)} of trainer.nodes={nodes}",
        key="trainer.global_batch_size",
        value=total,
        suggestion=" ".join(remedies),
    )


def epochs_text(epochs: float, steps_per_epoch: int) -> str:
    """Return the length of a run, such as `1 epoch of 6 steps`."""
    number = f"{epochs:.3g}"
    return f"{number} {'epoch' if number == '1' else 'epochs'} of {counted(steps_per_epoch, 'step')}"


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers in a sentence, such as `3, 5 and 7 more`."""
    shown, more = list(map(str, numbers[:_MOST_LISTED])), len(numbers) - _MOST_LISTED
    shown += [f"{more} more"] if more > 0 else []
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _either(sizes: list[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
