"""A cheap fingerprint of the data: the number of samples, and hashes of a few if nothing else identifies it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Arrays, Splits
from ddpexp.data.lengths import ByLength
from ddpexp.data.loader import Key, load
from ddpexp.data.order import TrainingOrder
from ddpexp.data.streams import Stream
from ddpexp.data.token_batches import ByTokens
from ddpexp.data.weights import Weighted
from ddpexp.distributed.rng import seed_everything
from ddpexp.errors import LoaderError

IDENTITY = ("sha256", "hash")  # keys of the result of `prepare` that identify the content
_SAMPLES = 8  # of each set, spread over it
_READS = 3  # of each sample: what differs between reads is random, and is left out
_SECONDS = 0.5  # for all sets together
_DEPTH = 20
_WORKER_SECONDS = 5  # for a DataLoader worker to produce a sample


def fingerprint(
    splits: Splits, identified: bool, num_workers: int, order: TrainingOrder | None = None
) -> dict[str, dict[str, Any]]:
    """Return the number of samples of each set, and a hash of each part of a sample.

    Samples are read as in training: in this process, or in a DataLoader worker if there are any, so that the data set
    is not used in any other way. The random number generators are restored. With `identified`, something else
    identifies the content, and nothing is read. Takes at most 0.5 s, plus the sample being read at that time.
    """
    until = time.monotonic() + _SECONDS
    found: dict[str, dict[str, Any]] = {}
    for name, part in {"train": splits.train, **splits.evals}.items():
        if isinstance(part, Stream):  # of which no more is known
            found[name] = {"samples": None}
            continue
        content = {} if identified else _content(part, name, num_workers, until)
        found[name] = {"samples": len(part), **({"content": content} if content else {})}
    if not isinstance(splits.train, Stream) and splits.train.brings_order:
        found["train"]["samples_per_epoch"] = splits.train.samples_per_epoch
    if isinstance(order, ByTokens):
        found["train"] |= {"lengths": order.digest, "samples_per_epoch": order.samples_per_epoch}
    if isinstance(order, ByLength):
        found["train"]["lengths"] = order.digest
        order = order.base
    if isinstance(order, Weighted):
        found["train"]["weights"] = order.digest
    return found


def _content(part: IndexData, name: str, num_workers: int, until: float) -> dict[str, str]:
    """Return the hashes of a few samples; none if they cannot be read in time."""
    states = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([]):
            return _rows(part) if isinstance(part, Arrays) else contents(part, name, num_workers, until)
    except (Exception, SystemExit, LoaderError):  # if it matters, training reports it
        return {}
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])


def carried_over(before: Any, now: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return `now`, with the earlier content of each set of the same size whose samples could not be read this time."""
    found = {}
    for name, one in now.items():
        was = before.get(name) if isinstance(before, Mapping) else None
        keeps = (
            isinstance(was, Mapping)
            and was.get("samples") == one["samples"]
            and "content" in was
            and "content" not in one
        )
        found[name] = {**one, **({"content": was["content"]} if keeps and isinstance(was, Mapping) else {})}
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changes between two fingerprints, a phrase for each set; content is compared where both have it."""
    found = []
    for name in [*now, *(name for name in before if name not in now)]:
        was, is_now = before.get(name), now.get(name)
        if not isinstance(was, Mapping) or not isinstance(is_now, Mapping):
            found.append(f"`{name}` is {'gone' if is_now is None else 'new'}")
        elif was.get("samples") != is_now.get("samples") and None in (was.get("samples"), is_now.get("samples")):
            found.append(f"`{name}` {'is a stream now' if is_now.get('samples') is None else 'is no stream any more'}")
        elif was.get("samples") != is_now.get("samples"):
            found.append(
                f"`{name}` had {_counted(was.get('samples'))} samples and has {_counted(is_now.get('samples'))} now"
            )
        elif _of_an_epoch(was) != _of_an_epoch(is_now):
            found.append(
                f"an epoch of `{name}` had {_counted(_of_an_epoch(was))} samples and has "
                f"{_counted(_of_an_epoch(is_now))} now"
            )
        elif was.get("weights") != is_now.get("weights"):
            found.append(f"`{name}` is drawn by other weights")
        else:
            old, new = was.get("content"), is_now.get("content")
            if (
                isinstance(old, Mapping)
                and isinstance(new, Mapping)
                and any(old[key] != new[key] for key in new if key in old)
            ):
                found.append(f"`{name}` has as many samples as before, and others")
    return found


def _of_an_epoch(one: Mapping[str, Any]) -> Any:
    return one.get("samples_per_epoch", one.get("samples"))


def contents(part: IndexData, name: str = "train", num_workers: int = 0, until: float = math.inf) -> dict[str, str]:
    """Return a hash of each part of a sample over a few samples of a set, without random parts. Seeds all generators.

    Returns nothing if that takes longer than `until`, in seconds of the monotonic clock.
    """
    digests: dict[str, Any] = {}
    unstable = set()
    samples = _samples(part, name, num_workers)
    for _ in _indices(part):
        reads = []
        for _ in range(_READS):
            if time.monotonic() > until:
                return {}
            reads.append(dict(_leaves(next(samples), "", 0)))
        for key in {key for read in reads for key in read}:
            if any(read.get(key) != reads[0].get(key) for read in reads):
                unstable.add(key)
            else:
                digests.setdefault(key, hashlib.sha256()).update(reads[0][key])
    return {key: digest.hexdigest() for key, digest in sorted(digests.items()) if key not in unstable}


def _samples(part: IndexData, name: str, num_workers: int) -> Iterator[Any]:
    """Yield each of a few samples several times, each time with another seed."""
    keys = (Key(seed, [index]) for index in _indices(part) for seed in range(_READS))
    if num_workers and part.is_loaded:
        yield from load(part, name, keys, 1, torch.device("cpu"), _WORKER_SECONDS)
        return
    for seed, [index], _ in keys:
        seed_everything(seed)
        yield part[index] if part.is_loaded else part.gather(torch.tensor([index]), torch.device("cpu"))


def _rows(part: Arrays) -> dict[str, str]:
    """Return the same as `contents` for rows of tensors, as they are stored."""
    indices = torch.tensor(_indices(part))
    try:
        return {
            f"[{place}]": _hashed(one.index_select(0, indices.to(one.device))).hex()
            for place, one in enumerate(part.tensors)
        }
    except (IndexError, RuntimeError):  # tensors of different lengths: training reports it
        return {}


def _indices(part: Sized) -> list[int]:
    """Return the indices of the samples to read: spread over the set, including the first and the last."""
    return sorted({number * (len(part) - 1) // (_SAMPLES - 1) for number in range(_SAMPLES)})


def _leaves(value: Any, key: str, depth: int) -> Iterator[tuple[str, bytes]]:
    """Yield the parts of a sample: the path of each part, and a hash of its value."""
    if isinstance(value, Mapping) and depth < _DEPTH:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}", depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEPTH:
        yield f"{key}[]", str(len(value)).encode()
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{number}]", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < _DEPTH:
        for one in dataclasses.fields(value):
            yield from _leaves(getattr(value, one.name), f"{key}.{one.name}", depth + 1)
    else:
        yield key, _hashed(value)


def _hashed(value: Any) -> bytes:
    """Hash a value; of unknown types only the type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    digest = hashlib.sha256(kind.encode())
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_quantized:
            digest.update(f" {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        if not array.dtype.hasobject:
            digest.update(f" {array.dtype.str} {np.shape(value)} ".encode())
            digest.update(array.tobytes())
    elif isinstance(value, str) and os.sep in value:
        pass  # a path: the same data may be in another place
    elif isinstance(value, str | bytes | bool | int | float | complex | None):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
    elif _is_image(value):
        digest.update(f" {value.mode} {value.size} ".encode())
        digest.update(value.tobytes())
    return digest.digest()


def _is_image(value: Any) -> bool:
    """Return whether a value is a Pillow image, without importing Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _counted(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)
