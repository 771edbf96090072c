"""Random numbers as a function of seed, step and micro-batch, independent of the rank and of earlier draws."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.random  # here, so that the fork server imports it once instead of every worker
import torch

# Streams: augmentation of a sample must not correlate with the dropout of its activations.
MODEL, DATA, EVAL, OPTIMIZER, HOST, AUGMENT, LOSS, EVAL_MODEL = range(8)
_MASK = 0xFFFFFFFFFFFFFFFF
_MASK32 = 0xFFFFFFFF
_STEPS_AT_ONCE = 256  # whose seeds are hashed together


def seed_of(seed: int, stream: int, step: int, micro_batch: int) -> int:
    """Hash a position in a run to 64 bits; `micro_batch` is its index in the global batch.

    Source: the finaliser of SplitMix64; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    found: int = _mix(_mix(_stream(seed, stream) + step) + micro_batch)
    return found


class MicroBatchSeeds:
    """The seeds of one rank's micro-batches, as `seed_of` returns them, hashed for many steps at once."""

    def __init__(self, seed: int, stream: int, micro_batches: range) -> None:
        """Hash nothing yet; `micro_batches` are the rank's indices in the global batch."""
        self._stream = _stream(seed, stream)
        self._micro_batches = np.array(micro_batches, np.uint64)

    def from_step(self, step: int) -> Iterator[list[int]]:
        """Yield the seeds of a step and of those after it. Shapes: one for each of the rank's micro-batches."""
        while True:
            yield from self.of_steps(step, _STEPS_AT_ONCE)
            step += _STEPS_AT_ONCE

    def of_steps(self, first: int, count: int) -> list[list[int]]:
        """Return the seeds of each of `count` steps from the `first` one on. Shapes: (count, micro-batches)."""
        steps = np.arange(first, first + count, dtype=np.uint64)
        seeds: list[list[int]] = _mix(_mix(steps + np.uint64(self._stream))[:, None] + self._micro_batches).tolist()
        return seeds


@cache
def _stream(seed: int, stream: int) -> int:
    """Hash the values that are the same in every step of a run."""
    found: int = _mix(_mix(seed) + stream)
    return found


@cache
def seeder(device: torch.device) -> Callable[[int], object]:
    """Return a function that seeds torch's generators for the CPU and for `device` with a value.

    It takes 1 microsecond for each, where `torch.manual_seed` takes 65.
    """
    if device.type != "cuda":
        return torch.default_generator.manual_seed

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)
        torch.cuda.default_generators[device.index].manual_seed(value)

    return seed


def seed_evaluation(batch: int, device: torch.device) -> None:
    """Seed torch for the model's pass over a batch of an evaluation: alike in every evaluation of every run.

    `batch` is its index in the whole set.
    """
    seeder(device)(seed_of(0, EVAL_MODEL, 0, batch))


def seed_everything(value: int) -> None:
    """Seed torch, numpy and Python's `random`, which data sets of single samples may use."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value & _MASK32)  # the global generator, which users' augmentations use
    random.seed(value)


class HostRandom:
    """The generators of numpy and Python in one rank's process, which code outside torch may use.

    Seeding them takes longer than a small step, so it happens once; checkpoints store their state if it has changed.
    """

    def __init__(self, seed: int, rank: int) -> None:
        """Seed both generators."""
        value = seed_of(seed, HOST, 0, rank)
        np.random.seed(value & _MASK32)
        random.seed(value)
        self._untouched = _states()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the states that have changed. Shapes: (num_words,) int64 each."""
        states = _states()
        return {name: torch.tensor(words) for name, words in states.items() if words != self._untouched[name]}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""
        if "numpy" in state:
            *key, position, has_gauss, bits = state["numpy"].tolist()
            np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, _float(bits)))
        if "python" in state:
            *words, has_gauss, bits = state["python"].tolist()
            random.setstate((3, tuple(words), _float(bits) if has_gauss else None))


def _states() -> dict[str, list[int]]:
    """Return the words of both generators, then whether the second of a pair of normals is cached, and its bits."""
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    _, words, gauss_next = random.getstate()
    return {
        "numpy": [*map(int, key), int(position), int(has_gauss), _bits(float(gauss))],
        "python": [*words, int(gauss_next is not None), _bits(gauss_next or 0.0)],
    }


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def _mix(value: Any) -> Any:
    """Scramble an integer below 2**64, or an array of uint64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
