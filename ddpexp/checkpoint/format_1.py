"""Reading checkpoints of format 1, written until November 2026.

`state.json` and `state.safetensors` held everything, optimizers by the positions of parameters. Model files are the
same; averages had the dtype of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ddpexp.checkpoint.codec import decode
from ddpexp.checkpoint.format import Checkpoint
from ddpexp.checkpoint.tensors import read_tensors
from ddpexp.errors import RefusedError
from ddpexp.system.files import read_json


def read_part(checkpoint: Checkpoint, name: str, load: Callable[[Path], Mapping[str, Any]]) -> Any:
    """Return a part of the state by its name in the current format, None if there is none.

    `load` returns the tensors of a file.

    Raises:
        RefusedError: it cannot be read.
    """
    if name == "world":
        return {"world_size": int(checkpoint.manifest["world_size"])}
    if name.startswith("rank-"):
        return _own(checkpoint, f"{name}.safetensors")
    state = _state(checkpoint, load)
    position = dict(state["position"])
    if name == "clock":
        since = sum(float(entry["seconds"]) for entry in position.get("window", []))
        return {"train_seconds": position.get("train_seconds", 0.0), "since_record": since}
    if name == "progress":
        position.pop("train_seconds", None)
        window = [
            {key: value for key, value in entry.items() if key != "seconds"} for entry in position.pop("window", [])
        ]
        return {**position, "window": window, "precision": state["precision"]}
    if name == "modules":
        names = {*state["hidden_buffers"], *state["extra"]}
        parts = ("buffers", "hidden_buffers"), ("extra", "extra")
        return {model: {new: state[old].get(model, {}) for new, old in parts} for model in sorted(names)}
    if name == "optimizers":
        return {key: {"by_position": saved, "built": state["built"][key]} for key, saved in state["optimizers"].items()}
    return None


def _state(checkpoint: Checkpoint, load: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    tensors = load(checkpoint.folder / "state.safetensors")

    def known(name: str) -> Any:
        if name not in tensors:
            raise ValueError(f"state.safetensors holds no {name}")
        return tensors[name]

    try:
        found = decode(read_json(checkpoint.folder / "state.json"), known)
        if (
            not isinstance(found, Mapping)
            or not {"position", "precision", "hidden_buffers", "extra", "optimizers"} <= found.keys()
        ):
            raise ValueError("it is not the state of a run")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RefusedError(f"{checkpoint.folder / 'state.json'} cannot be read: {error}.") from None
    return found


def _own(checkpoint: Checkpoint, file: str) -> dict[str, dict[str, Tensor]] | None:
    if file not in checkpoint.files:
        return None
    found: dict[str, dict[str, Tensor]] = {"random": {}, "buffers": {}}
    for name, tensor in read_tensors(checkpoint.folder / file).items():
        kind, _, key = name.partition(".")
        found[kind][key] = tensor
    return found
