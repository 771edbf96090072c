"""The process that reads a file of torch.save: tensors alone, with limits, written as safetensors.

Such a file is a program for pickle. torch.load with `weights_only=True` runs none of it but what rebuilds tensors. The
process has no more memory, time and room on the disk than the size of the file explains.
"""

from __future__ import annotations

import os
import re
import resource
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddpexp.checkpoint.layout import ties
from ddpexp.errors import RefusedError
from ddpexp.system import files
from ddpexp.system.oom import private_bytes
from ddpexp.system.process import die_with_parent
from ddpexp.system.text import first_few, sanitize

_PARTS = ("state_dict", "model_state_dict", "model", "module", "weights", "net")
_AVERAGES = ("ema_state_dict", "state_dict_ema", "model_ema", "ema", "params_ema")
_SPARE_BYTES = 2 << 30  # of memory, beside what the tensors take
_COPIES = 3  # of the tensors in memory at once, at most
_BYTES_PER_SECOND = 5_000_000
_SECONDS = 120


def convert_and_answer(parent: int, answers: int, source: str, target: str, averaged: bool) -> None:
    """Subprocess entry point: read the file and write the other; answer as JSON to the descriptor `answers`."""
    die_with_parent(parent)
    size = os.path.getsize(source)
    seconds = _SECONDS + size // _BYTES_PER_SECOND
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + _SPARE_BYTES + _COPIES * size,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + (1 << 24),) * 2)
    answer: dict[str, Any]
    try:
        mapped = zipfile.is_zipfile(source)
        with open(source, "rb") as file:  # by its number: torch.load reads a name in .safetensors as such a file
            loaded = torch.load(f"/dev/fd/{file.fileno()}", "cpu", weights_only=True, mmap=mapped)
        tensors, part = choose(loaded, averaged)
        _write(tensors, Path(target))
        answer = {"part": part}
    except RefusedError as error:
        answer = {"refused": error.as_dict()}
    except MemoryError:
        reason = "takes more memory than a file of its size should: it is damaged, or made to do so"
        answer = {"refused": RefusedError(reason).as_dict()}
    except Exception as error:
        answer = {"refused": RefusedError(explained(error)).as_dict()}
    files.answer(answers, answer)


def choose(loaded: Any, averaged: bool) -> tuple[Mapping[str, Tensor], str | None]:
    """Return the tensors by name that a file holds, and the key below which they were; None: at the top.

    Raises:
        RefusedError: there are none; a sentence without subject.
    """
    if not isinstance(loaded, Mapping):
        raise RefusedError(f"holds a {type(loaded).__name__} and no tensors by name")
    if _are_tensors(loaded) and not averaged:
        return loaded, None
    part = next((key for key in (_AVERAGES if averaged else _PARTS) if isinstance(loaded.get(key), Mapping)), None)
    if part is not None:
        tensors, inner = choose(loaded[part], False)
        return tensors, part if inner is None else f"{part}.{inner}"
    keys = [sanitize(str(key), 40) for key in loaded]
    if averaged:
        raise RefusedError(
            "holds no average of weights, which run.init_weights=ema needs, under any of the names "
            f"{', '.join(_AVERAGES)}. It has {first_few(keys)}"
        )
    raise RefusedError(
        f"holds other things than tensors by name, and nothing called {', '.join(_PARTS)}. It has {first_few(keys)}",
        suggestion="Save the weights alone.",
    )


def explained(error: Exception) -> str:
    """Return what was wrong with a file of torch.save, as a sentence without subject."""
    text = " ".join(str(error).split())
    found = re.search(r"(?:Unsupported (?:global|class|operand)[^:]*:|GLOBAL) (?:GLOBAL )?([\w.]+)", text)
    if found is not None:
        return (
            f"holds code, {sanitize(found[1], 80)}, which is not run: it may be anything. Save its tensors alone, as "
            "torch.save(model.state_dict(), ...)."
        )
    reason = text.rpartition("WeightsUnpickler error: ")[2].partition(". ")[0].rstrip(".")
    return f"cannot be read as tensors: {sanitize(reason, 200)}."


def _are_tensors(values: Mapping[Any, Any]) -> bool:
    return bool(values) and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in values.items())


def _write(tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write tensors; of those that share all of their memory the first alone, the others as its further names."""
    dense = {name: tensor.detach() for name, tensor in tensors.items()}
    tied = ties(dense)
    kept = {name: tensor.contiguous().clone() for name, tensor in dense.items() if name not in tied}
    partial = target.with_name(f".{target.name}.partial")
    try:
        save_file(kept, partial, metadata={**tied, "format": "pt"})
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
