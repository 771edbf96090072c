"""Weights to disk and back: safetensors and JSON, hashed, complete or not there."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpexp.errors import RefusedError
from ddpexp.rundir import dumps, write

Models = Mapping[str, nn.Module]


def weights_sha256(models: Models) -> str:
    """Hash parameters and buffers, sorted by name, each as name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    named = {
        name if prefix == "model" else f"{prefix}.{name}": tensor
        for prefix, module in models.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(folder: Path, models: Models, facts: Mapping[str, Any]) -> Path:
    """Write `<name>.safetensors` for each model and a manifest with their hashes; the folder appears complete or not at all.

    Ranks: one.
    """
    from safetensors.torch import save_model

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        files = {}
        for name, module in models.items():
            path = temporary / f"{name}.safetensors"
            save_model(module, str(path))
            _sync(path)
            files[path.name] = _file_sha256(path)
        write(temporary / "manifest.json", dumps({**facts, "files": files}))
        _sync(temporary)
        os.replace(temporary, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def load_weights(models: Models, source: Path, asked: str) -> None:
    """Load weights from a safetensors file, or a checkpoint folder with one file a model.

    Raises:
        RefusedError: no such file, damaged, or of another model; `asked` is how the user named it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    files = {name: source / f"{name}.safetensors" for name in models} if source.is_dir() else dict.fromkeys(models, source)
    if len(models) > 1 and not source.is_dir():
        raise RefusedError(f"{asked} is one file, but there are several models: name the checkpoint's folder.")
    for name, path in files.items():
        try:
            _check_hash(path)
            load_model(models[name], str(path))
        except (OSError, ValueError, SafetensorError) as error:
            raise RefusedError(f"{asked}: {path.name} cannot be read as safetensors ({error}).") from None
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise RefusedError(f"{asked} holds the weights of another model: {reason}") from None


def _check_hash(path: Path) -> None:
    manifest = path.parent / "manifest.json"
    if not manifest.is_file():
        return
    expected = json.loads(manifest.read_text()).get("files", {}).get(path.name)
    if expected is not None and expected != _file_sha256(path):
        raise OSError("its hash is not the one in manifest.json beside it")


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
