"""Loading weights into models: those of a checkpoint, and those of other programs, renamed and in part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.checkpoint.adapters import Merged, is_factor, layers_with_adapters, lora_of
from ddpexp.checkpoint.format import is_checkpoint, is_named_so, open_checkpoint
from ddpexp.checkpoint.headers import is_foreign_folder, read_source
from ddpexp.checkpoint.layout import ties
from ddpexp.checkpoint.matching import Match, Selection, advice, match
from ddpexp.checkpoint.source import Source
from ddpexp.checkpoint.tensors import check_plain_file
from ddpexp.compat.modules import copies_when_loading
from ddpexp.errors import RefusedError, subject
from ddpexp.settings.parameters import LoRA
from ddpexp.strategy.base import Shard

Held = Callable[[Tensor], Shard]
"""Returns what this rank holds of a tensor of a model."""


def load_weights(
    models: Mapping[str, nn.Module],
    source: Path,
    description: str,
    averaged: bool = False,
    selection: Selection | None = None,
    held: Held = Shard.whole,
    lora: LoRA | None = None,
) -> dict[str, Match]:
    """Load weights from a file, or from a folder: a checkpoint's with a file for each model, or Hugging Face's.

    Tensors are read one at a time, and of each only the rows that this rank holds. `selection` is what run.init_rename
    and run.init_skip say. Returns what each model was given.

    Adapters in the file are merged into layers that have none in the model. Those of the model, by `lora`, may be
    missing in the file.

    Raises:
        RefusedError: there is no such file, or it is damaged or of another model.
    """
    if source.is_dir() and not is_foreign_folder(source):
        ending = ".ema.safetensors" if averaged else ".safetensors"
        files = {name: source / f"{name}{ending}" for name in models}
    else:
        files = dict.fromkeys(models, source)
    if len(models) > 1 and len(set(files.values())) == 1:
        raise RefusedError(
            "is one file, but there are several models",
            suggestion="Name the checkpoint's folder.",
            **subject(description),
        )
    return {name: _load(models[name], path, description, selection, held, lora) for name, path in files.items()}


def _load(
    module: nn.Module, path: Path, description: str, selection: Selection | None, held: Held, lora: LoRA | None
) -> Match:
    # The parameters themselves, because `held` may know something about them.
    target = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    shards = {name: held(value) for name, value in target.items() if not is_lazy(value)}
    tied = _ties(module, {name: shard.tensor for name, shard in shards.items()})
    shapes = {name: shards[name].shape if name in shards else None for name in target}
    try:
        source = _open(path, target, lora)
        entries = {name: entry.shape for name, entry in source.entries.items()}
        found = match(entries, shapes, selection or Selection(), tied, _may_be_missing)
        problem = _different_ties(found, tied, source) if found.fits() else found.problem()
        if problem is None:
            _fill(module, target, found, source, held)
    except RefusedError as error:
        if error.key is not None:
            raise
        fields = subject(description, error.place)
        raise RefusedError(error.reason, suggestion=error.suggestion, **fields) from None
    if problem is not None:
        hint = advice(found, selection.skip) if selection is not None else ""
        reason = f"holds the weights of another model: {problem}"
        raise RefusedError(reason, suggestion=hint, **subject(description))
    return found


def _ties(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each further name of a tied tensor to the first: the same parameter, or the same memory."""
    first: dict[int, str] = {}
    same = {}
    for name, tensor in sorted((*module.named_parameters(remove_duplicate=False), *module.named_buffers())):
        if first.setdefault(id(tensor), name) != name and name in tensors:
            same[name] = first[id(tensor)]
    return {**ties(tensors), **same}


def _open(path: Path, target: Collection[str], lora: LoRA | None) -> Source:
    """Open weights; those of a checkpoint must have the hash in its manifest.

    Adapters that the target does not have are merged. Raises RefusedError.
    """
    try:
        check_plain_file(path if not path.is_dir() else path / "-")
        _check_hash(path)
    except (OSError, ValueError) as error:
        raise RefusedError(f"cannot be read as safetensors ({error})", place=path.name) from None
    entries = read_source(path)
    layers = layers_with_adapters(entries)
    if not layers:
        return Source(entries)
    written, here = lora_of(path), set(layers_with_adapters(target))
    if lora is not None and here & set(layers) and written.scale != lora.scale:
        raise RefusedError(
            f"Its adapters were trained with alpha / rank = {written.scale:g}, but this run has {lora.scale:g}",
            suggestion=f"Use trainer.lora.rank={written.rank} trainer.lora.alpha={written.alpha:g}.",
        )
    return Merged(entries, [layer for layer in layers if layer not in here], written.scale)


def _check_hash(path: Path) -> None:
    """Raise OSError or ValueError if a file in a checkpoint is not the one that was written."""
    folder = path.resolve().parent
    if is_checkpoint(folder) or is_named_so(folder):  # without a manifest it is damaged
        checkpoint = open_checkpoint(folder)
        problem = checkpoint.problem(files=[path.name])
        if problem is not None:
            raise OSError(problem)


def _may_be_missing(name: str) -> bool:
    """Return whether a tensor may stay as it was built: an adapter, or what old versions of torch did not have."""
    return is_factor(name) or name.endswith("num_batches_tracked")


def _different_ties(found: Match, tied: Mapping[str, str], source: Source) -> str | None:
    """Return which names of one tensor of the model have different values in the file, if any do."""
    for name, first in tied.items():
        there, first_there = found.taken.get(name), found.taken.get(first)
        if there is None or first_there is None or there == first_there:
            continue
        if not torch.equal(source.read(there), source.read(first_there)):
            return f"{first} and {name} are one tensor here and two different ones there"
    return None


def _fill(module: nn.Module, target: Mapping[str, Tensor], found: Match, source: Source, held: Held) -> None:
    """Give the tensors of a model their values."""
    if _loads_itself(module):
        values = {name: source.read(there) for name, there in found.taken.items()}
        try:
            module.load_state_dict({**module.state_dict(), **values})
        except (RuntimeError, ValueError) as error:
            raise RefusedError(
                f"{type(module).__name__} cannot load it: {' '.join(str(error).split())[:300]}"
            ) from None
        return
    with torch.no_grad():
        for name, there in found.taken.items():
            shard = held(target[name])
            read = partial(source.read, there)
            shard.tensor.copy_(read() if shard.first_row is None else shard.read(read))


def _loads_itself(module: nn.Module) -> bool:
    """Return whether more happens in `load_state_dict` than copying."""
    return not all(map(copies_when_loading, module.modules()))
