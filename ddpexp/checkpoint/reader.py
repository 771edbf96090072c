"""Reading checkpoints and weights files: tensors and plain values, never code."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.checkpoint import format_1
from ddpexp.checkpoint.codec import decode
from ddpexp.checkpoint.format import OLDER, Checkpoint, is_checkpoint, is_named_so, open_checkpoint
from ddpexp.checkpoint.layout import ties
from ddpexp.checkpoint.tensors import StoredTensor, check_plain_file, open_tensors, read_tensors
from ddpexp.errors import RefusedError
from ddpexp.strategy.base import Shard
from ddpexp.system.files import read_json
from ddpexp.system.text import first_few

Models = Mapping[str, nn.Module]


def weights_sha256(
    models: Models, parts: Callable[[str, Tensor], Iterable[Tensor]] = lambda name, tensor: (tensor,)
) -> str:
    """Hash parameters and buffers, sorted by name, each as name, dtype, shape and bytes.

    `parts` returns the rows of a tensor of which the ranks hold different ones, in order.
    """
    digest = hashlib.sha256()
    named = {
        name if prefix == "model" else f"{prefix}.{name}": (f"{prefix}.{name}", tensor)
        for prefix, module in models.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    for name in sorted(named):
        key, tensor = named[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for part in parts(key, tensor):
            array: Any = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(array)
    return digest.hexdigest()


def open_model(checkpoint: Checkpoint, name: str, average: bool = False) -> dict[str, StoredTensor] | None:
    """Return the tensors of a model or of its average, not read yet, or None; tied ones under each of their names.

    Raises:
        RefusedError: their file cannot be read.
    """
    file = f"{name}.ema.safetensors" if average else f"{name}.safetensors"
    return open_tensors(checkpoint.folder / file) if file in checkpoint.files else None


def read_part(checkpoint: Checkpoint, name: str) -> Any:
    """Return a part of the state as it was passed to the writer, or None if the checkpoint has no such part.

    Raises:
        RefusedError: it cannot be read.
    """
    return _part(checkpoint, name, read_tensors)


def open_part(checkpoint: Checkpoint, name: str) -> Any:
    """Return a part of the state as `read_part` does, with a `StoredTensor` for each tensor. Raises RefusedError."""
    return _part(checkpoint, name, open_tensors)


def _part(checkpoint: Checkpoint, name: str, load: Callable[[Path], Mapping[str, Any]]) -> Any:
    if checkpoint.version == 1:
        return format_1.read_part(checkpoint, name, load)
    text, file = f"state.{name}.json", f"state.{name}.safetensors"
    if text not in checkpoint.files:
        return None
    tensors = load(checkpoint.folder / file) if file in checkpoint.files else {}
    try:
        return decode(read_json(checkpoint.folder / text), lambda key: tensors[key])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RefusedError(f"{checkpoint.folder / text} cannot be read: {error}.") from None


def read_rank_state(checkpoint: Checkpoint, rank: int) -> Any:
    """Return the state of a single rank, or None if there is none. Raises RefusedError."""
    return read_part(checkpoint, f"rank-{rank:05}")


def copy_into(
    target: Mapping[str, Shard],
    source: Mapping[str, StoredTensor] | Mapping[str, Tensor],
    where: str,
    casts: bool = False,
) -> None:
    """Copy tensors by name into tensors of the same shapes and dtypes, which may differ with `casts`.

    Of a tensor in a file no more than the rows of the shard are read; those in memory are copied whole.

    Raises:
        RefusedError: a name, shape or dtype differs, and which are the first; or they cannot be read.
    """
    missing, extra = [name for name in target if name not in source], [name for name in source if name not in target]
    shapes = [
        f"{name} is {tuple(source[name].shape)} of {source[name].dtype} there and {shard.shape} of "
        f"{shard.tensor.dtype} here"
        for name, shard in target.items()
        if name in source
        and (tuple(source[name].shape) != shard.shape or (source[name].dtype != shard.tensor.dtype and not casts))
    ]
    if missing or extra or shapes:
        parts = [
            *shapes,
            *([f"it lacks {first_few(missing, 3)}"] if missing else []),
            *([f"it also has {first_few(extra, 3)}"] if extra else []),
        ]
        raise RefusedError(f"{where} holds the weights of another model: {first_few(parts, 3, '; ')}.")
    for name, shard in target.items():
        value = source[name]
        if isinstance(value, StoredTensor):
            value.read_into(shard.tensor, shard.first_row or 0)
        else:
            shard.tensor.detach().copy_(value)


def load_weights(models: Models, source: Path, description: str, averaged: bool = False) -> None:
    """Load weights from a safetensors file, or from a checkpoint folder with checkpoint file per model.

    Raises:
        RefusedError: there is no such file, or it is damaged or of another model.
    """
    ending = ".ema.safetensors" if averaged else ".safetensors"
    files = {name: source / f"{name}{ending}" for name in models} if source.is_dir() else dict.fromkeys(models, source)
    if len(models) > 1 and not source.is_dir():
        raise RefusedError(f"{description} is one file, but there are several models: name the checkpoint's folder.")
    for name, path in files.items():
        try:
            check_plain_file(path)
            _check_hash(path)
            tensors = read_tensors(path)
        except (OSError, ValueError) as error:
            raise RefusedError(f"{description}: {path.name} cannot be read as safetensors ({error}).") from None
        except RefusedError as error:
            raise RefusedError(f"{description}: {error}") from None
        problem = _load(models[name], tensors)
        if problem is not None:
            raise RefusedError(f"{description} holds the weights of another model: {problem}.")


def _load(module: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """Load weights by the names of the state_dict; return what does not fit, or None.

    Tensors that the model has under several names (tied weights) may be saved under only checkpoint of them.
    """
    given = dict(tensors)
    state = {
        name: value for name, value in module.state_dict().items() if isinstance(value, Tensor) and not is_lazy(value)
    }
    tied = ties(state)
    for first in set(tied.values()):
        names = [first, *(name for name, other in tied.items() if other == first)]
        there = [name for name in names if name in given]
        for name in names if there else ():
            if not torch.equal(given.setdefault(name, given[there[0]]), given[there[0]]):
                return f"{there[0]} and {name} are one tensor here and two different ones there"
    try:
        result = module.load_state_dict(given, strict=False)
    except RuntimeError as error:  # tensors have other sizes
        return " ".join(str(error).split())[:300].rstrip(".")
    missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]  # only those of tensors
    parts = [f"it lacks {first_few(missing, 3)}"] if missing else []
    parts += [f"it also has {first_few(result.unexpected_keys, 3)}"] if result.unexpected_keys else []
    return "; ".join(parts) or None


def _check_hash(path: Path) -> None:
    """Raise OSError or ValueError if a file in a checkpoint is not the checkpoint that was written."""
    folder = path.resolve().parent
    if is_checkpoint(folder) or is_named_so(folder):  # without a manifest it is damaged
        checkpoint = open_checkpoint(folder)
        problem = checkpoint.problem(files=[path.name])
        if problem is not None:
            raise OSError(problem)
        if checkpoint.version == 1:
            logging.getLogger("ddpexp").warning(OLDER, path.parent.name)
