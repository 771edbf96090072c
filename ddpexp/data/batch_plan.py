"""How the global batch is split into micro-batches over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpexp.errors import RefusedError


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of a step: global batch = micro-batch x gradient accumulation steps x data size."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    data_size: int  # ranks that compute different micro-batches

    def formula(self) -> str:
        """Return how the global batch is made up, such as `micro-batch 16 x 2 accumulation steps x 4 ranks`."""
        steps, ranks = counted(self.gradient_accumulation_steps, "accumulation step"), counted(self.data_size, "rank")
        return f"micro-batch {self.micro_batch_size:,} x {steps} x {ranks}"


def plan_batches(global_batch_size: int, micro_batch_size: int | Literal["auto"], data_size: int) -> BatchPlan:
    """Split the global batch into micro-batches over `data_size` workers, those that compute different micro-batches.

    Raises:
        RefusedError: it does not split evenly; names the nearest batch size or the world sizes that do.
    """
    total, micro = global_batch_size, micro_batch_size
    override = f"trainer.global_batch_size={total}"
    if total < 1 or (micro != "auto" and micro < 1):
        raise RefusedError(f"{override} trainer.micro_batch_size={micro}: use 1 or more.")
    if micro == "auto":
        if total % data_size:
            fits = _round_up(total, data_size)
            raise RefusedError(
                f"{override} does not split over {data_size} workers. Use a multiple of {data_size}, for example "
                f"trainer.global_batch_size={fits}."
            )
        return BatchPlan(total, total // data_size, 1, data_size)
    one_pass = micro * data_size
    if total % one_pass:
        sizes = [size for size in range(1, 65) if total % (micro * size) == 0]
        also = f" Or use {_either(sizes)} worker{'s' if sizes != [1] else ''}." if sizes and total % micro == 0 else ""
        raise RefusedError(
            f"{override} does not split over {data_size} workers with trainer.micro_batch_size={micro} ({one_pass} a "
            f"pass). Use a multiple of {one_pass}, for example "
            f"trainer.global_batch_size={_round_up(total, one_pass)}.{also}"
        )
    return BatchPlan(total, micro, total // one_pass, data_size)


def counted(number: int, thing: str) -> str:
    """Return a number with its unit, such as `1 step` or `1,024 steps`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def epochs_text(epochs: float, steps_per_epoch: int) -> str:
    """Return the length of a run, such as `1 epoch of 6 steps`."""
    number = f"{epochs:.3g}"
    return f"{number} {'epoch' if number == '1' else 'epochs'} of {counted(steps_per_epoch, 'step')}"


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)


def _either(sizes: list[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
