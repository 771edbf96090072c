"""Resolving a path to weights: a file, the folder of a checkpoint, or a run directory, for its newest checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from ddpexp.checkpoint.format import newest_intact
from ddpexp.errors import RefusedError
from ddpexp.system.files import relative

_PICKLED = (".pth", ".pt", ".bin", ".ckpt")
_MAGIC = (b"PK\x03\x04", b"\x80")  # a zip archive as torch.save writes it, and a bare pickle


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory."""
    return (folder / "config.yaml").is_file() and (folder / "manifest.json").is_file()


def check_usable(path: Path, description: str) -> None:
    """Check a path without reading the weights; `description` is how the user named it.

    Raises:
        RefusedError: it does not exist, or is a pickled file of other programs.
    """
    if not path.exists():
        download = " Download it first: ddpexp reads only local files." if "://" in description else ""
        raise RefusedError(f"{description}: there is no such file.{download}")
    if path.is_file() and _is_pickled(path):
        target = path.with_suffix(".safetensors").name
        code = (
            f"import torch; from safetensors.torch import save_file; found = torch.load(open({path.name!r}, 'rb'), "
            f"'cpu', weights_only=True); save_file({{name: value.contiguous().clone() for name, value in "
            f"found.items()}}, {target!r})"
        )
        argument = shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"'
        raise RefusedError(
            f"{description}: {path.name} cannot be read as safetensors: torch.save has written it, and such a file "
            f"can hold any code, so it is never loaded here. Convert it once, in its folder, and name {target} (where "
            f"it holds more than a state_dict, take that part of `found`): python -c {argument}"
        )


def find(path: Path, description: str, warn: Callable[[str], None]) -> Path:
    """Return the file, or the folder of a checkpoint; `warn` is called for damaged newer checkpoints of a run.

    Raises:
        RefusedError: as `check_usable`, or the run has no complete checkpoint.
    """
    check_usable(path, description)
    if is_run(path):
        path = path / "checkpoints"
    if path.name != "checkpoints" or not is_run(path.resolve().parent):
        return path
    chosen, damaged = newest_intact(path, weights_only=True)
    for entry in damaged:
        warn(f"{relative(entry.folder)} is damaged and not used: {entry.problem}")
    if chosen is None:
        raise RefusedError(f"{description}: {path} holds no complete checkpoint.")
    if damaged:
        warn(f"the weights are those of step {chosen.step}; resume the run to train the steps after it again")
    return chosen.folder


def _is_pickled(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            begin = file.read(9)
    except OSError:
        return False  # reading it will report why
    return begin[8:] != b"{" and (
        path.suffix in _PICKLED or begin.startswith(_MAGIC)
    )  # safetensors: a length, then JSON
