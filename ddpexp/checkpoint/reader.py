"""Reading checkpoints and weights files: tensors and plain values, never code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.checkpoint import format_1
from ddpexp.checkpoint.codec import decode
from ddpexp.checkpoint.format import Checkpoint
from ddpexp.checkpoint.tensors import read_tensors
from ddpexp.errors import RefusedError
from ddpexp.system.files import read_json
from ddpexp.system.text import first_few

Models = Mapping[str, nn.Module]


def weights_sha256(models: Models, whole: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor) -> str:
    """Hash parameters and buffers, sorted by name, each as name, dtype, shape and bytes.

    `whole` returns the whole tensor of one of which the ranks hold different rows.
    """
    digest = hashlib.sha256()
    named = {
        name if prefix == "model" else f"{prefix}.{name}": (f"{prefix}.{name}", tensor)
        for prefix, module in models.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    for name in sorted(named):
        tensor = whole(*named[name]).detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_model(checkpoint: Checkpoint, name: str, average: bool = False) -> dict[str, Tensor] | None:
    """Return the tensors of a model or of its average, or None; tied tensors appear under each of their names.

    Raises:
        RefusedError: they cannot be read.
    """
    file = f"{name}.ema.safetensors" if average else f"{name}.safetensors"
    return read_tensors(checkpoint.folder / file) if file in checkpoint.files else None


def read_part(checkpoint: Checkpoint, name: str) -> Any:
    """Return a part of the state as it was passed to the writer, or None if the checkpoint has no such part.

    Raises:
        RefusedError: it cannot be read.
    """
    if checkpoint.version == 1:
        return format_1.read_part(checkpoint, name)
    text, file = f"state.{name}.json", f"state.{name}.safetensors"
    if text not in checkpoint.files:
        return None
    tensors = read_tensors(checkpoint.folder / file) if file in checkpoint.files else {}
    try:
        return decode(read_json(checkpoint.folder / text), lambda key: tensors[key])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RefusedError(f"{checkpoint.folder / text} cannot be read: {error}.") from None


def read_rank_state(checkpoint: Checkpoint, rank: int) -> Any:
    """Return the state of a single rank, or None if there is none. Raises RefusedError."""
    return read_part(checkpoint, f"rank-{rank:05}")


def copy_into(
    target: Mapping[str, Tensor],
    source: Mapping[str, Tensor],
    where: str,
    local: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> None:
    """Copy tensors by name into tensors of the same shapes and dtypes.

    `local` returns what this rank holds of a whole tensor.

    Raises:
        RefusedError: a name, shape or dtype differs; lists the first ones.
    """

    def form(tensor: Tensor) -> str:
        return f"{tuple(tensor.shape)} of {tensor.dtype}"

    missing, extra = [name for name in target if name not in source], [name for name in source if name not in target]
    shapes = [
        f"{name} is {form(source[name])} there and {form(tensor)} here"
        for name, tensor in target.items()
        if name in source and (source[name].shape, source[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if missing or extra or shapes:
        parts = [
            *shapes,
            *([f"it lacks {first_few(missing, 3)}"] if missing else []),
            *([f"it also has {first_few(extra, 3)}"] if extra else []),
        ]
        raise RefusedError(f"{where} holds the weights of another model: {first_few(parts, 3, '; ')}.")
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(local(name, source[name]))
