"""Reading checkpoints and weights files: tensors and plain values, never code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.checkpoint.codec import decode
from ddpexp.checkpoint.format import Checkpoint
from ddpexp.checkpoint.tensors import StoredTensor, open_tensors, read_tensors
from ddpexp.errors import RefusedError
from ddpexp.strategy.base import Shard, Stored
from ddpexp.system.files import read_json
from ddpexp.system.text import first_few

Models = Mapping[str, nn.Module]


def weights_sha256(
    models: Models,
    parts: Callable[[str, Tensor], Iterable[Tensor]] = lambda name, tensor: (tensor,),
    shape_of: Callable[[str, Tensor], Sequence[int]] = lambda name, tensor: tensor.shape,
) -> str:
    """Hash parameters and buffers, sorted by name, each as name, dtype, shape and bytes.

    `parts` returns the rows of a tensor of which the ranks hold different ones, in order, and `shape_of` its shape.
    """
    digest = hashlib.sha256()
    named = {
        name if prefix == "model" else f"{prefix}.{name}": (f"{prefix}.{name}", tensor)
        for prefix, module in models.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    for name in sorted(named):
        key, tensor = named[name]
        digest.update(f"{name} {tensor.dtype} {tuple(shape_of(key, tensor))}\n".encode())
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
    text, file = f"state.{name}.json", f"state.{name}.safetensors"
    if text not in checkpoint.files:
        return None
    tensors = load(checkpoint.folder / file) if file in checkpoint.files else {}
    try:
        return decode(read_json(checkpoint.folder / text), lambda key: tensors[key])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RefusedError(f"cannot be read: {error}", place=checkpoint.folder / text) from None


def read_all(tree: Any) -> Any:
    """Return a tree of values with all of its tensors read."""
    if isinstance(tree, Stored):
        return tree.read()
    if isinstance(tree, Mapping):
        return {key: read_all(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(read_all(value) for value in tree)
    return tree


def read_rank_state(checkpoint: Checkpoint, rank: int) -> Any:
    """Return the state of a single rank, or None if there is none. Raises RefusedError."""
    return read_part(checkpoint, f"rank-{rank:05}")


def copy_into(
    target: Mapping[str, Shard], source: Mapping[str, StoredTensor] | Mapping[str, Tensor], where: str
) -> None:
    """Copy tensors by name into tensors of the same shapes and dtypes.

    Of a tensor in a file no more than the rows of the shard are read; those in memory are copied whole.

    Raises:
        RefusedError: a name, shape or dtype differs, and which are the first; or they cannot be read.
    """
    missing, extra = [name for name in target if name not in source], [name for name in source if name not in target]
    shapes = [
        f"{name} is {tuple(source[name].shape)} of {source[name].dtype} there and {shard.shape} of "
        f"{shard.tensor.dtype} here"
        for name, shard in target.items()
        if name in source and (tuple(source[name].shape), source[name].dtype) != (shard.shape, shard.tensor.dtype)
    ]
    if missing or extra or shapes:
        parts = [
            *shapes,
            *([f"it lacks {first_few(missing, 3)}"] if missing else []),
            *([f"it also has {first_few(extra, 3)}"] if extra else []),
        ]
        raise RefusedError(f"holds the weights of another model: {first_few(parts, 3, '; ')}", place=where)
    for name, shard in target.items():
        value = source[name]
        if isinstance(value, StoredTensor) and shard.is_contiguous:
            value.read_into(shard.tensor, shard.blocks[0].start if shard.first_row is not None else 0)
        elif isinstance(value, StoredTensor):
            shard.tensor.detach().copy_(shard.read(value.read))
        else:
            shard.tensor.detach().copy_(value)
