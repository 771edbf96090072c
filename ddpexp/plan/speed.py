"""The step time at any number of workers: formulas, and fitting them to measurements.

Pure, and free of torch and clocks.

A step is `passes` forward and backward passes, the sum of the gradients, and the update:

    step = crowd * (passes * pass + update) + reduction - what of the reduction hides behind the last backward pass

Through shared memory the reduction is computing too: it is crowded as well, and nothing of it hides. `crowd` is how
much longer a worker computes beside the others of its machine: where they have more threads than there are cores they
take turns, and beside busy cores the caches and the memory are slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

_BACKWARD = (
    2 / 3
)  # of a pass: it computes two products where forward computes one. Source: Kaplan et al., 2020, section 2.1
_CHUNKED, _GATHERED, _SLOT = 1 << 20, 128 << 10, 1 << 20  # of ddpexp.strategy.comm.reduce, which a test holds these to
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
        meetings, moved = through_memory(sum(sizes), place.world_size)
        return Step(compute, update, stretch * (meetings * alpha + moved * per_byte), 0.0)
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
    """Return how often the ranks meet, and how many bytes each reads and writes.

    A rank writes its gradients into its slot and, when all have met, reads all n slots: n + 1 times the gradients.
    Where that is much it sums a chunk of all slots, writes it back, and after a second meeting takes the chunks of the
    others: three times the gradients, however many ranks there are. What a slot does not hold goes in further rounds.
    Source: `ddpexp.strategy.comm.reduce.SharedMemoryReducer`.
    """
    rounds = max(1, -(-num_bytes // _SLOT))
    if (world_size - 2) * min(num_bytes, _SLOT) >= _CHUNKED:
        return 2 * rounds, 3.0 * num_bytes
    return rounds, (world_size + 1.0) * num_bytes


def through_backend(num_bytes: int, place: Place, alpha: float, per_byte: float) -> float:
    """Return the time of one bucket's reduction, in the unit of `alpha` and of `per_byte`.

    Ring: 2 (n - 1) alpha + 2 (n - 1) / n bytes. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
    communication operations in MPICH", 2005; NVIDIA/nccl-tests, doc/PERFORMANCE.md. Gloo has that alone. Double binary
    tree: 2 log2(n) alpha + 2 bytes; NCCL takes what is faster. Source: Sanders, Speck and Traeff, "Two-tree algorithms
    for full bandwidth broadcast, reduction and scan", 2009; NVIDIA's announcement of NCCL 2.4. In the order of the
    ranks: a small bucket is gathered whole, (n - 1) (alpha + bytes); a large one goes as a ring's two halves.
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
    """The time of a step. None: not measured. Units: milliseconds."""

    alone: float  # one worker, one pass
    alone_twice: float | None = None  # one worker, two passes
    beside: float | None = None  # one worker, beside another run that computes the same
    both: float | None = None  # two workers, one pass
    crowded: float | None = None  # two workers that take turns on fewer cores
    crowded_turns: float = 1.0  # how many on a core


def fit(measured: Measured, small: Measured | None, num_bytes: int, small_bytes: int, place: Place) -> Costs:
    """Return the costs that the measured steps tell; without two workers nothing of the reduction.

    `small` are steps of a model with fewer gradients: two sizes tell latency from bandwidth, without them all is
    latency.
    """
    alone, twice = measured.alone, measured.alone_twice
    each = alone if twice is None else max(0.0, min(twice - alone, alone))
    slower = 1.0 if measured.beside is None else max(1.0, min(measured.beside / alone, _MOST_CROWDED))
    costs = Costs(each, alone - each, slower=slower)
    if measured.both is None:
        return costs
    pair = replace(place, world_size=2, way=place.way if place.way == "shared_memory" else "backend")
    times = [(_reduction(measured, slower, pair), num_bytes)]
    if small is not None:
        times.append((_reduction(small, slower, pair), small_bytes))
    alpha, bandwidth = fit_reduction(times, pair)
    return replace(costs, alpha_us=alpha, bandwidth_gbps=bandwidth)


def _reduction(measured: Measured, slower: float, pair: Place) -> float:
    """Return what two workers take longer than one, in the unit in which `predict` stretches it."""
    assert measured.both is not None
    if pair.way != "shared_memory":
        return max(0.0, measured.both - slower * measured.alone)
    if measured.crowded is not None:
        return max(0.0, measured.crowded / measured.crowded_turns - measured.alone)
    return max(0.0, measured.both / slower - measured.alone)


def fit_reduction(times: Sequence[tuple[float, int]], pair: Place) -> tuple[float, float]:
    """Return alpha in microseconds and the bandwidth in gigabits a second.

    From what two workers took to sum so many bytes.

    The first is met whatever the noise of the second, of a smaller size. Units: milliseconds, bytes.
    """
    (reduction, num_bytes), *smaller = times
    often, moved = _work(num_bytes, pair)
    alpha, per_byte = reduction / often, 0.0
    for small, small_bytes in smaller:
        small_often, small_moved = _work(small_bytes, pair)
        per_byte = (small_often * reduction - often * small) / (small_often * moved - often * small_moved)
        per_byte = max(0.0, min(per_byte, reduction / moved))
        alpha = (reduction - per_byte * moved) / often
    return max(alpha * 1e3, _LEAST), min(_MOST, 8 / (per_byte * 1e6)) if per_byte else _MOST


_LEAST, _MOST = 1e-3, 1e6  # microseconds and gigabits a second: what could not be measured costs almost nothing


def _work(num_bytes: int, pair: Place) -> tuple[float, float]:
    """Return how often two workers pay alpha, and for how many bytes."""
    if pair.way == "shared_memory":
        return through_memory(num_bytes, 2)
    return through_backend(0, pair, 1.0, 0.0), through_backend(num_bytes, pair, 0.0, 1.0)
