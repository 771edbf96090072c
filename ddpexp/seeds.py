"""Random numbers as a function of seed, step and micro-batch, never of what happened before or of the rank."""

from __future__ import annotations

import random

import numpy as np
import torch

MODEL, DATA, EVAL = range(3)  # streams: what augments a sample must not correlate with what drops its activations
_MASK = 0xFFFFFFFFFFFFFFFF


def seed_of(seed: int, stream: int, step: int, micro_batch: int) -> int:
    """Mix the place in a run into 64 bits; `micro_batch` counts over the global batch.

    Source: the finaliser of SplitMix64; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    value = seed
    for part in (stream, step, micro_batch):
        value = _mix(value) + part
    return _mix(value)


def seed_torch(value: int, device: torch.device) -> None:
    """Seed torch's generators for the CPU and for `device`; a microsecond each, where `torch.manual_seed` takes 65."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)


def seed_everything(value: int) -> None:
    """Seed what a data set of single samples may use: torch, numpy and Python's own."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)  # users' augmentations use the global one
    random.seed(value)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
