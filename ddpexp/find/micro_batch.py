"""Which micro-batches are tried, and what the trials say: pure, and free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MOST_PASSES = 32  # of a step that is tried first: with many more it would take minutes


@dataclass(frozen=True)
class Tried:
    """What a trial of a micro-batch has shown, or what those of smaller ones have predicted."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    outcome: Literal["fits", "out of memory", "too large", "fails"]  # too large: it was not tried
    peak_bytes: int | None = None  # of the fullest rank; of one that is too large, as predicted
    samples_per_second: float | None = None
    why: str = ""  # it fails

    @property
    def fits(self) -> bool:
        """Return whether it has trained within the memory."""
        return self.outcome == "fits"


def divisors(number: int) -> list[int]:
    """Return the numbers that divide another one, in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def next_size(sizes: Sequence[int], tried: Sequence[Tried]) -> int | None:
    """Return the size to try next, of `sizes` in ascending order; None where the answer is known.

    Sizes are about doubled until one does not fit, and halved until one does; then what is between is bisected. One
    that fails below those that fit, such as a single sample where the model has BatchNorm, says nothing of larger ones.
    """
    largest = max((one.micro_batch_size for one in tried if one.fits), default=None)
    failed = [one.micro_batch_size for one in tried if not one.fits and one.micro_batch_size > (largest or 0)]
    if not tried:
        return next(size for size in sizes if sizes[-1] // size <= _MOST_PASSES)
    if largest is None:
        if all(one.outcome == "fails" for one in tried):
            return next((size for size in sizes if size > max(failed)), None)
        known = {one.micro_batch_size for one in tried}
        below = [size for size in sizes if size < min(failed) and size not in known]
        return next((size for size in reversed(below) if 2 * size <= min(failed)), None)
    if not failed:
        above = [size for size in sizes if size > largest]
        return next((size for size in above if size >= 2 * largest), above[-1] if above else None)
    between = [size for size in sizes if largest < size < min(failed)]
    return between[len(between) // 2] if between else None


def predicted_bytes(tried: Sequence[Tried], size: int) -> int | None:
    """Return what the fullest rank would hold, as far as memory grows as between the last two sizes that fit.

    None where fewer have been tried.
    """
    peaks = sorted((one.micro_batch_size, one.peak_bytes) for one in tried if one.fits and one.peak_bytes is not None)
    if len(peaks) < 2 or size < peaks[-1][0]:
        return None
    (less, before), (more, peak) = peaks[-2:]
    return peak + max(0, peak - before) * (size - more) // (more - less)


def largest(tried: Sequence[Tried]) -> Tried | None:
    """Return the largest micro-batch that fits."""
    return max((one for one in tried if one.fits), key=lambda one: one.micro_batch_size, default=None)


def fastest(tried: Sequence[Tried]) -> Tried | None:
    """Return the micro-batch with the most samples a second."""
    return max((one for one in tried if one.fits), key=lambda one: one.samples_per_second or 0.0, default=None)
