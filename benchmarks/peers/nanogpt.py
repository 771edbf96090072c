"""nanoGPT's own train.py on a text, and one function for the loss of what it and we have trained.

`--source DIR --text FILE --out DIR train|loss WEIGHTS`: the source is nanoGPT's repository, which stays unchanged. What
follows `train` are its own options. `loss` prints JSON: the loss of nanoGPT's model with those weights, nanoGPT's
ckpt.pt or our model.safetensors, over every token of the validation part.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import runpy
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

_BLOCK = 64
_SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": _BLOCK, "bias": False, "dropout": 0.0}


def parts(text: str) -> tuple[NDArray[np.uint16], NDArray[np.uint16], int]:
    """Encode a text as nanoGPT's prepare.py does: nine tenths to train, the rest to validate, the number of tokens."""
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    tokens = np.array([numbers[character] for character in text], np.uint16)
    border = int(len(text) * 0.9)
    return tokens[:border], tokens[border:], len(characters)


def windows(tokens: NDArray[np.uint16], size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and targets in batches, the last window shorter. Shapes: (batch, size) each, int64."""
    long = torch.from_numpy(tokens.astype(np.int64))
    whole = (len(long) - 1) // size
    inputs, targets = (part[: whole * size].view(whole, size) for part in (long[:-1], long[1:]))
    batches = list(zip(torch.split(inputs, 256), torch.split(targets, 256), strict=True))
    rest = (long[whole * size : -1][None], long[whole * size + 1 :][None])
    return [*batches, rest] if rest[0].numel() else batches


def loss(module: Any, path: Path, tokens: NDArray[np.uint16], vocab_size: int) -> float:
    """Return the mean loss over every target, in nanoGPT's model."""
    model = module.GPT(module.GPTConfig(vocab_size=vocab_size, **_SHAPE))
    if path.suffix == ".pt":
        model.load_state_dict(torch.load(path, weights_only=True)["model"])
    else:
        weights = {f"transformer.{name}": value for name, value in load_file(path).items()}
        model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    model.eval()
    total = 0.0
    with torch.no_grad():
        for inputs, targets in windows(tokens, _BLOCK):
            total += model(inputs, targets)[1].item() * targets.numel()
    return total / (len(tokens) - 1)


def main() -> None:
    """Train, or print the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("what", choices=["train", "loss"])
    words, more = parser.parse_known_args()
    out = words.out.resolve()
    train, held_out, vocab_size = parts(words.text.read_text(encoding="utf-8"))
    sys.path.insert(0, str(words.source.resolve()))
    if words.what == "loss":
        model = import_module("model")
        print(json.dumps({"loss": loss(model, Path(more[0]), held_out, vocab_size)}))
        return
    copy = out / "nanoGPT"
    data = copy / "data" / "text"
    data.mkdir(parents=True)
    for path in words.source.glob("*.py"):
        shutil.copy(path, copy)
    train.tofile(data / "train.bin")
    held_out.tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    os.chdir(copy)
    shape = [f"--{key}={value}" for key, value in _SHAPE.items()]
    sys.argv = ["train.py", "--dataset=text", f"--out_dir={out}", *shape, *more]
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
