"""Writing weights in the form of Hugging Face's libraries: a folder with one file or several, or adapters alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors.torch import save_file

from ddpexp.checkpoint.adapters import Merged, is_factor, layers_with_adapters, lora_of
from ddpexp.checkpoint.headers import INDEX, SINGLE, read_header
from ddpexp.checkpoint.source import Source
from ddpexp.errors import RefusedError
from ddpexp.system import files

_ADAPTER_FILE, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of every name in a file of peft


def export_weights(weights: Path, folder: Path, max_file_bytes: int) -> list[Path]:
    """Write a file of weights as `model.safetensors`, or in several files with an index; adapters are merged.

    One file is in memory at a time. Tied weights are stored once. Returns the files.

    Raises:
        RefusedError: the folder is not empty.
    """
    _make(folder)
    entries = read_header(weights)
    layers = layers_with_adapters(entries)
    merged = set(layers)
    source = Merged(entries, layers, lora_of(weights).scale) if layers else Source(entries)
    tied = {  # not those of which only one name is merged
        name: entry.stored_as
        for name, entry in source.entries.items()
        if name != entry.stored_as
        and not {name.removesuffix(".weight"), entry.stored_as.removesuffix(".weight")} & merged
    }
    stored = [name for name in source.entries if name not in tied]
    groups = list(_grouped({name: _num_bytes(source, name) for name in stored}, max_file_bytes))
    names = [
        SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    total = 0
    for file, group in zip(names, groups, strict=True):
        tensors = {name: source.read(name) for name in group}
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        aliases = {name: first for name, first in tied.items() if first in tensors}
        save_file(tensors, folder / file, metadata={**aliases, "format": "pt"})
    if len(groups) > 1:
        places = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        files.write_json(folder / INDEX, index)
        names.append(INDEX)
    return [folder / name for name in names]


def export_adapters(weights: Path, folder: Path) -> list[Path]:
    """Write the adapters alone, with what is trained beside them, under the names of peft. Returns the files.

    Raises:
        RefusedError: there are none, or the folder is not empty.
    """
    entries = read_header(weights)
    layers = layers_with_adapters(entries)
    if not layers:
        raise RefusedError("holds no adapters: the run was trained without trainer.lora", place=weights)
    lora = lora_of(weights)
    _make(folder)
    others = [name for name in entries if not is_factor(name) and any(fnmatchcase(name, p) for p in lora.trained)]
    source = Source(entries)
    tensors = {f"{_PREFIX}{name}": source.read(name) for name in entries if is_factor(name) or name in others}
    save_file(tensors, folder / _ADAPTER_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in others}) or None,
        "r": lora.rank,
        "target_modules": layers,
        "task_type": None,
    }
    files.write_json(folder / _ADAPTER_CONFIG, config)
    return [folder / _ADAPTER_FILE, folder / _ADAPTER_CONFIG]


def _make(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or list(folder.iterdir())):
        raise RefusedError("is not an empty folder", place=folder, suggestion="Export into a new one.")
    folder.mkdir(parents=True, exist_ok=True)


def _num_bytes(source: Source, name: str) -> int:
    entry = source.entries[name]
    bits = int("".join(filter(str.isdigit, entry.dtype.partition("_")[0])) or 8)  # F32, BF16, F8_E4M3; BOOL: a byte
    return entry.num_elements * bits // 8


def _grouped(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield names, in their order, that fit into a file together; a tensor that is larger has one of its own."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group
