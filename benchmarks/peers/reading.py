"""Samples a second that one process reads of a text or of tar shards, ready for a model.

`--way windows|get_batch|shards|webdataset --path FILE|PATTERN --seconds S [--workers N] [--source DIR]`; prints JSON.
`get_batch` is nanoGPT's own function, taken from the train.py of its repository, `--source`, which stays unchanged.
"""

from __future__ import annotations

import argparse
import ast
import glob
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

_BATCH, _BLOCK, _IMAGES = 12, 64, 64
_CPU = torch.device("cpu")


def windows(path: Path) -> Iterator[Any]:
    """Yield batches of ours."""
    from ddpexp.data.batch_plan import plan_batches
    from ddpexp.data.batches import TrainBatches
    from ddpexp.data.text.dataset import Windows

    tokens = np.memmap(path / "train.bin", np.uint16, mode="c")
    data = Windows(torch.from_numpy(tokens.view(np.int16)), _BLOCK)
    for [batch] in TrainBatches(data, plan_batches(_BATCH, "auto", 1), 0, 0, _CPU).steps(0, 1 << 40):
        yield batch


def get_batch(path: Path, source: Path) -> Iterator[Any]:
    """Yield what nanoGPT's function returns."""
    tree = ast.parse((source / "train.py").read_text())
    found: list[ast.stmt] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_batch"
    ]
    names: dict[str, Any] = {"os": __import__("os"), "np": np, "torch": torch, "data_dir": str(path)}
    names |= {"block_size": _BLOCK, "batch_size": _BATCH, "device": "cpu", "device_type": "cpu"}
    exec(compile(ast.Module(found, []), "train.py", "exec"), names)
    while True:
        yield names["get_batch"]("train")


def shards(pattern: str, workers: int, first: float = 0.0) -> Iterator[Any]:
    """Yield batches of ours, from a share of the first epoch on."""
    from ddpexp.data.batch_plan import plan_batches
    from ddpexp.data.batches import TrainBatches
    from ddpexp.data.tar_shards.dataset import load
    from ddpexp.data.tar_shards.prepare import prepare

    splits = load(prepare(pattern, None, ["jpg", "cls"], shuffle="blocks", block_samples=64))
    batches = TrainBatches(splits.train, plan_batches(_IMAGES, "auto", 1), 0, 0, _CPU, workers, order=splits.order)
    for [batch] in batches.steps(int(first * batches.steps_per_epoch), 1 << 40):
        yield batch


def webdataset(pattern: str, workers: int) -> Iterator[Any]:
    """Yield batches of the library webdataset: its loader, with a buffer of 1,024 samples to shuffle."""
    import webdataset as wds

    paths = sorted(glob.glob(pattern))
    data = wds.WebDataset(paths, shardshuffle=len(paths)).shuffle(1024).decode("torchrgb").to_tuple("jpg", "cls")
    loader = wds.WebLoader(data.batched(_IMAGES, partial=False), batch_size=None, num_workers=workers)
    while True:
        yield from loader


def main() -> None:
    """Read for some seconds; nothing of the start counts but in `first`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--source", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ways = {
        "windows": lambda: windows(Path(words.path)),
        "get_batch": lambda: get_batch(Path(words.path), words.source),
        "shards": lambda: shards(words.path, words.workers),
        "webdataset": lambda: webdataset(words.path, words.workers),
    }
    batches = ways[words.way]()
    checked = [(batch[0].float().mean().item(), batch[0].numel(), batch[0].dtype) for batch in islice(batches, 20)]
    size, count = (_IMAGES if words.way in ("shards", "webdataset") else _BATCH), 0
    begin = time.perf_counter()
    while (seconds := time.perf_counter() - begin) < words.seconds:
        next(batches)
        count += 1
    found = {
        "rate": count * size / seconds,
        "values": float(checked[0][1]),
        "mean": float(np.mean([c[0] for c in checked])),
    }
    if words.way == "shards":
        begin = time.perf_counter()
        next(shards(words.path, 0, first=0.8))
        found["resumed"] = time.perf_counter() - begin
    print(json.dumps(found))


if __name__ == "__main__":
    main()
