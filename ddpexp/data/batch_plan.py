"""How the global batch is cut into micro-batches over the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpexp.errors import RefusedError


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch is cut: global = micro x accumulation x world."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int


def plan_batches(global_batch_size: int, micro_batch_size: int | Literal["auto"], world_size: int) -> BatchPlan:
    """Cut the global batch into micro-batches over `world_size` workers.

    Raises:
        RefusedError: it does not split evenly, with the nearest batch or the world sizes that do.
    """
    total, micro = global_batch_size, micro_batch_size
    asked = f"trainer.global_batch_size={total}"
    if total < 1 or (micro != "auto" and micro < 1):
        raise RefusedError(f"{asked} trainer.micro_batch_size={micro}: use 1 or more.")
    if micro == "auto":
        if total % world_size:
            fits = _round_up(total, world_size)
            raise RefusedError(
                f"{asked} does not split over {world_size} workers. "
                f"Use a multiple of {world_size}, for example trainer.global_batch_size={fits}."
            )
        return BatchPlan(total, total // world_size, 1, world_size)
    one_pass = micro * world_size
    if total % one_pass:
        sizes = [size for size in range(1, 65) if total % (micro * size) == 0]
        also = f" Or use {_either(sizes)} workers." if sizes and total % micro == 0 else ""
        raise RefusedError(
            f"{asked} does not split over {world_size} workers with trainer.micro_batch_size={micro} ({one_pass} a "
            "pass). "
            f"Use a multiple of {one_pass}, for example trainer.global_batch_size={_round_up(total, one_pass)}.{also}"
        )
    return BatchPlan(total, micro, total // one_pass, world_size)


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)


def _either(sizes: list[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
