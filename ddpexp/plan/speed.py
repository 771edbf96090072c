"""How long a step takes at any number of workers: formulas, and what they are fitted to. Pure, and free of torch and clocks.

A step is `passes` forward and backward passes, the sum of the gradients, and the update:

    step = crowd * (passes * pass + update) + reduction - what of the reduction hides behind the last backward pass

`crowd` is how much longer a worker computes beside the others of its machine: where they have more threads than there are cores
they take turns, and beside busy cores the caches and the memory are slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_BACKWARD = 2 / 3  # of a pass: it computes two products where forward computes one. Source: Kaplan et al., 2020, section 2.1
_CHUNKED, _GATHERED, _SLOT = 1 << 20, 128 << 10, 1 << 20  # of ddpexp.strategy.reduce, which a test holds these to
_MOST_CROWDED = 2.0  # of two workers with cores of their own: more is the noise of the measurement

Way = Literal["none", "shared_memory", "in_rank_order", "backend"]


@dataclass(frozen=True)
class Place:
    """Where the workers are, and how they reduce."""

    world_size: int
    workers: int  # of a machine
    threads: int
    cores: int  # of a machine; 0: the workers compute on devices of their own
    way: Way
    by_nccl: bool = False


@dataclass(frozen=True)
class Costs:
    """What things cost on some machines. Units: milliseconds alone on the machine, microseconds, gigabits a second."""

    pass_ms: float
    update_ms: float = 0.0
    alpha_us: float | None = None
    bandwidth_gbps: float | None = None
    slower: float = 1.0  # a worker with cores of its own, beside others


@dataclass(frozen=True)
class Step:
    """The time of a step. Units: milliseconds."""

    compute_ms: float
    update_ms: float
    reduction_ms: float
    hidden_ms: float  # of the reduction

    @property
    def total_ms(self) -> float:
        """Return the time from one step to the next."""
        return self.compute_ms + self.update_ms + self.reduction_ms - self.hidden_ms


def predict(costs: Costs, passes: int, sizes: Sequence[int], place: Place) -> Step:
    """Return the time of a step. `sizes` are those of the buckets, those first that are ready first. Units: bytes."""
    stretch = crowd(costs, place)
    compute, update = stretch * passes * costs.pass_ms, stretch * costs.update_ms
    if place.way == "none":
        return Step(compute, update, 0.0, 0.0)
    assert costs.alpha_us is not None
    assert costs.bandwidth_gbps is not None
    alpha, per_byte = costs.alpha_us / 1e3, 8 / (costs.bandwidth_gbps * 1e6)  # milliseconds
    if place.way == "shared_memory":  # the sum comes when all buckets are there: nothing of it is hidden
        turned, moved = through_memory(sum(sizes), place.world_size)
        return Step(compute, update, turns(place) * (turned * alpha + moved * per_byte), 0.0)
    times = [through_backend(size, place, alpha, per_byte) for size in sizes]
    hidden = min(sum(times[:-1]), stretch * costs.pass_ms * _BACKWARD)  # the last bucket is ready when backward is done
    return Step(compute, update, sum(times), hidden)


def turns(place: Place) -> float:
    """Return how many workers take turns on a core."""
    return max(1.0, place.workers * place.threads / place.cores) if place.cores else 1.0


def crowd(costs: Costs, place: Place) -> float:
    """Return how much longer a worker computes than alone on its machine."""
    return turns(place) * (costs.slower if place.workers > 1 and place.cores else 1.0)


def through_memory(num_bytes: int, world_size: int) -> tuple[int, float]:
    """Return how often a rank turns to a slot of the shared memory, and how many bytes it reads and writes there.

    It writes its gradients into its own slot and, when all have met, reads all n: (n + 1) times. Where that is much it sums a
    chunk of all slots, writes it back, meets the others again and takes their n - 1 chunks: (2 n + 1) times, but three times the
    gradients, however many ranks there are. What a slot does not hold goes in further rounds.
    Source: `ddpexp.strategy.reduce.ThroughSharedMemory`.
    """
    rounds = max(1, -(-num_bytes // _SLOT))
    if (world_size - 2) * min(num_bytes, _SLOT) >= _CHUNKED:
        return rounds * (2 * world_size + 1), 3.0 * num_bytes
    return rounds * (world_size + 1), (world_size + 1.0) * num_bytes


def through_backend(num_bytes: int, place: Place, alpha: float, per_byte: float) -> float:
    """Return the time of one bucket's reduction, in the unit of `alpha` and of `per_byte`.

    Ring: 2 (n - 1) alpha + 2 (n - 1) / n bytes. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005; NVIDIA/nccl-tests, doc/PERFORMANCE.md. Gloo has that alone.
    Double binary tree: 2 log2(n) alpha + 2 bytes; NCCL takes what is faster. Source: Sanders, Speck and Traeff, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan", 2009; NVIDIA's announcement of NCCL 2.4.
    In the order of the ranks: a small bucket is gathered whole, (n - 1) (alpha + bytes); a large one goes as a ring's two halves.
    """
    n = place.world_size
    ring = 2 * (n - 1) * alpha + 2 * (n - 1) / n * num_bytes * per_byte
    if place.way == "in_rank_order" and (n - 2) * num_bytes < _GATHERED:
        return (n - 1) * (alpha + num_bytes * per_byte)
    if not place.by_nccl:
        return ring
    return min(ring, 2 * math.ceil(math.log2(n)) * alpha + 2 * num_bytes * per_byte)


@dataclass(frozen=True)
class Measured:
    """The time of a step with one pass and with two, with one worker and with two. Units: milliseconds."""

    alone: float
    alone_twice: float
    both: float | None = None
    both_twice: float | None = None


def fit_compute(own: Measured) -> tuple[float, float, float, float]:
    """Return pass, update, how much slower two workers compute than one, and their reduction, such that `both` is met.

    Two workers compute longer than one by the same factor in each pass, and reduce once a step:
    both = slower * alone + reduction, both_twice = slower * alone_twice + reduction.
    """
    each = max(0.0, min(own.alone_twice - own.alone, own.alone))
    update = own.alone - each
    if own.both is None or own.both_twice is None:
        return each, update, 1.0, 0.0
    more = own.alone_twice - own.alone
    slower = (own.both_twice - own.both) / more if more > 0 else 1.0
    slower = max(1.0, min(slower, _MOST_CROWDED, max(1.0, own.both / own.alone)))
    return each, update, slower, max(0.0, own.both - slower * own.alone)


def fit_reduction(reduction_ms: float, num_bytes: int, small: tuple[float, int] | None, place: Place) -> tuple[float, float]:
    """Return alpha in microseconds and the bandwidth in gigabits a second, from what two workers took to sum their gradients.

    `small` is the time and the size of other, smaller gradients, for two sizes tell latency from bandwidth; without them all is
    latency. The larger one is met whatever the noise of the smaller. `place` is that of the two workers.
    """
    turned, moved = _work(num_bytes, place)
    alpha, per_byte = reduction_ms / turned, 0.0
    if small is not None:
        small_ms, small_bytes = small
        small_turned, small_moved = _work(small_bytes, place)
        per_byte = (small_turned * reduction_ms - turned * small_ms) / (small_turned * moved - turned * small_moved)
        per_byte = max(0.0, min(per_byte, reduction_ms / moved))
        alpha = (reduction_ms - per_byte * moved) / turned
    return max(alpha * 1e3, _LEAST), min(_MOST, 8 / (per_byte * 1e6)) if per_byte else _MOST


_LEAST, _MOST = 1e-3, 1e6  # microseconds and gigabits a second: what could not be measured costs almost nothing


def _work(num_bytes: int, place: Place) -> tuple[float, float]:
    """Return how often two workers pay alpha, and for how many bytes."""
    if place.way == "shared_memory":
        return through_memory(num_bytes, place.world_size)
    return through_backend(0, place, 1.0, 0.0), through_backend(num_bytes, place, 0.0, 1.0)
