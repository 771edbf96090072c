"""Read safetensors files."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ddpexp.errors import RefusedError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, tied tensors under each of their names.

    Raises:
        RefusedError: it cannot be read as one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_plain_file(path)
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            same = {
                name: kept for name, kept in (file.metadata() or {}).items() if kept in tensors and name not in tensors
            }
    except (OSError, SafetensorError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read as safetensors ({error}).") from None
    return {**tensors, **{name: tensors[kept] for name, kept in same.items()}}


def check_plain_file(path: Path) -> None:
    """Raise OSError where a path is there and no plain file: a pipe would keep its reader waiting."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is no plain file")
