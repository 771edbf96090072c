"""Reading safetensors files."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ddpexp.errors import RefusedError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; tied tensors appear under each of their names.

    Raises:
        RefusedError: it cannot be read as one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_plain_file(path)
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            tied = {
                name: first
                for name, first in (file.metadata() or {}).items()
                if first in tensors and name not in tensors
            }
    except (OSError, SafetensorError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read as safetensors ({error}).") from None
    return {**tensors, **{name: tensors[first] for name, first in tied.items()}}


def check_plain_file(path: Path) -> None:
    """Raise OSError if a path exists and is not a plain file: reading from a pipe would block."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is no plain file")
