"""What tells a run's data from other data, cheaply: the number of samples, and a few of them where nothing else says it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ddpexp.data.datasets import Arrays, IndexData, Splits
from ddpexp.launch.process import die_with_parent
from ddpexp.seeds import seed_everything

IDENTITY = ("sha256", "hash")  # what `prepare` says of the data that tells its content
_SAMPLES = 8  # of each set, spread over it
_READS = 3  # of each sample: what is not the same each time is random, and says nothing
_SECONDS = 0.5  # for all sets together
_DEPTH = 20
_BYTES = 1 << 20  # that a process may answer


class Reading:
    """A few samples of each set; what takes more than a look at tensors is read by a process of its own while this one goes on.

    Code that makes a sample could draw here from a generator that the set keeps, or open a file that each DataLoader worker has
    to open for itself; it could fail, hang or print. None of this reaches the run from another process.
    """

    def __init__(self, splits: Splits, known: bool) -> None:
        """Begin; with `known`, something else tells the content, and nothing is read."""
        self._sets = {"train": splits.train, **splits.evals}
        self._until = time.monotonic() + _SECONDS
        self._found = {name: _rows(part) for name, part in self._sets.items() if isinstance(part, Arrays) and not known}
        others = {name: part for name, part in self._sets.items() if name not in self._found and not known}
        self._pid, self._answer = _fork(others) if others else (0, -1)

    def result(self) -> dict[str, dict[str, Any]]:
        """Return for each set its number of samples, and a hash for each part of a sample; these for once. Waits 0.5 s at most."""
        content = {**self._found, **(self._content() if self._pid else {})}
        return {
            name: {"samples": len(part), **({"content": content[name]} if content.get(name) else {})}
            for name, part in self._sets.items()
        }

    def _content(self) -> dict[str, dict[str, str]]:
        text = b""
        while len(text) < _BYTES and select.select([self._answer], [], [], max(0.0, self._until - time.monotonic()))[0]:
            more = os.read(self._answer, 1 << 16)
            if not more:
                break
            text += more
        os.kill(self._pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
        os.waitpid(self._pid, 0)
        os.close(self._answer)
        self._pid = 0
        found = {}
        for line in text.split(b"\n")[:-1]:  # of a set that took too long there is no line
            name, content = json.loads(line)
            found[name] = content
        return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what has changed between two results, a phrase for each set; content only where both have the same parts of it."""
    found = []
    for name in [*now, *(name for name in before if name not in now)]:
        was, is_now = before.get(name), now.get(name)
        if not isinstance(was, Mapping) or not isinstance(is_now, Mapping):
            found.append(f"`{name}` is {'gone' if is_now is None else 'new'}")
        elif was.get("samples") != is_now.get("samples"):
            found.append(f"`{name}` had {_counted(was.get('samples'))} samples and has {_counted(is_now.get('samples'))} now")
        else:
            old, new = was.get("content"), is_now.get("content")
            if isinstance(old, Mapping) and isinstance(new, Mapping) and any(old[key] != new[key] for key in new if key in old):
                found.append(f"`{name}` has as many samples as before, and others")
    return found


def contents(part: Any) -> dict[str, str]:
    """Return a hash for each part of a sample, over a few samples of a set; not of parts that are random.

    Seeds everything: for a process of its own.
    """
    digests: dict[str, Any] = {}
    unstable = set()
    for index in _indices(part):
        reads = []
        for number in range(_READS):
            seed_everything(number)
            reads.append(dict(_leaves(_sample(part, index), "", 0)))
        for key in {key for read in reads for key in read}:
            if any(read.get(key) != reads[0].get(key) for read in reads):
                unstable.add(key)
            else:
                digests.setdefault(key, hashlib.sha256()).update(reads[0][key])
    return {key: digest.hexdigest() for key, digest in sorted(digests.items()) if key not in unstable}


def _rows(part: Arrays) -> dict[str, str]:
    """Return the same for rows of tensors, as they are stored."""
    indices = torch.tensor(_indices(part))
    try:
        return {f"[{place}]": _hashed(one.index_select(0, indices.to(one.device))).hex() for place, one in enumerate(part.tensors)}
    except (IndexError, RuntimeError):  # tensors of several lengths: the run itself will say it
        return {}


def _indices(part: Sized) -> list[int]:
    """Return which samples are read: spread over the set, the first and the last among them."""
    return sorted({number * (len(part) - 1) // (_SAMPLES - 1) for number in range(_SAMPLES)})


def _fork(sets: Mapping[str, Any]) -> tuple[int, int]:
    """Start the process; return its id, and where its answer can be read. (0, -1): there can be none."""
    reading, writing = os.pipe()
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: torch's loaders fork just so
            pid = os.fork()
    except OSError:  # no process is left, or no memory
        os.close(reading)
        os.close(writing)
        return 0, -1
    if pid == 0:
        _be(sets, writing, parent)
    os.close(writing)
    return pid, reading


def _be(sets: Mapping[str, Any], answer: int, parent: int) -> NoReturn:
    """Be the process: silent, and with one thread."""
    try:
        die_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # also where they were other files
        logging.disable()  # the log and the channel to the watcher are the run's
        torch.set_num_threads(1)  # those of the parent are not here
        for name, part in sets.items():
            try:
                found = contents(part)
            except Exception:  # the run itself will say it, if it meets it
                found = {}
            os.write(answer, json.dumps([name, found]).encode() + b"\n")
    finally:
        os._exit(0)


def _sample(part: Any, index: int) -> Any:
    if isinstance(part, IndexData):
        return part.gather(torch.tensor([index]), torch.device("cpu"))
    return part[index]


def _leaves(value: Any, key: str, depth: int) -> Iterator[tuple[str, bytes]]:
    """Yield what a sample is made of, each with the place where it stands in it and a hash of what it is."""
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
    """Hash one value; of what is not known here only its type."""
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
    elif isinstance(value, str | bytes | bool | int | float | complex | None):
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
    elif _is_image(value):
        digest.update(f" {value.mode} {value.size} ".encode())
        digest.update(value.tobytes())
    return digest.digest()


def _is_image(value: Any) -> bool:
    """Tell whether a value is an image of Pillow's, which is not imported for that."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _counted(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)
