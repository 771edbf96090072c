"""Which weights a path names.

A file, the folder of a checkpoint, or the directory of a run, whose newest checkpoint it is.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from ddpexp.checkpoint.format import whole
from ddpexp.errors import RefusedError
from ddpexp.system.files import relative

_PICKLED = (".pth", ".pt", ".bin", ".ckpt")
_MAGIC = (b"PK\x03\x04", b"\x80")  # a zip archive as torch.save writes it, and a bare pickle


def is_run(folder: Path) -> bool:
    """Tell whether a folder is the directory of a run."""
    return (folder / "config.yaml").is_file() and (folder / "manifest.json").is_file()


def check_usable(path: Path, asked: str) -> None:
    """Look at what is there without reading it; `asked` is how the user named it.

    Raises:
        RefusedError: nothing, or a file that other programs have pickled.
    """
    if not path.exists():
        raise RefusedError(f"{asked}: there is no such file.")
    if path.is_file() and _is_pickled(path):
        target = path.with_suffix(".safetensors").name
        code = (
            f"import torch; from safetensors.torch import save_file; "
            f"found = torch.load(open({path.name!r}, 'rb'), 'cpu', weights_only=True); "
            f"save_file({{name: value.contiguous().clone() for name, value in found.items()}}, {target!r})"
        )
        typed = shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"'
        raise RefusedError(
            f"{asked}: {path.name} cannot be read as safetensors: torch.save has written it, and such a file can hold "
            "any code, so "
            f"it is never loaded here. Convert it once, in its folder, and name {target} (where it holds more than a "
            "state_dict, "
            f"take that part of `found`): python -c {typed}"
        )


def find(path: Path, asked: str, warn: Callable[[str], None]) -> Path:
    """Return the file, or the folder of a checkpoint; `warn` is told of newer checkpoints of a run that are damaged.

    Raises:
        RefusedError: as `check_usable`, or a run without a complete checkpoint.
    """
    check_usable(path, asked)
    if is_run(path):
        path = path / "checkpoints"
    if path.name != "checkpoints" or not is_run(path.resolve().parent):
        return path
    chosen, damaged = whole(path, weights_alone=True)
    for one in damaged:
        warn(f"{relative(one.folder)} is damaged and not used: {one.problem}")
    if chosen is None:
        raise RefusedError(f"{asked}: {path} holds no complete checkpoint.")
    if damaged:
        warn(f"the weights are those of step {chosen.step}; resume the run to train the steps after it again")
    return chosen.folder


def _is_pickled(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            begin = file.read(9)
    except OSError:
        return False  # whoever reads it says why
    return begin[8:] != b"{" and (
        path.suffix in _PICKLED or begin.startswith(_MAGIC)
    )  # safetensors: a length, then JSON
