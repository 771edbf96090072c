"""The training loop of cifar10-airbench's airbench94.py, from its own repository, on a CPU in fp32.

The file is written for a GPU and half precision: what it asks of those is answered here, its loop runs as it stands.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_FILES = ("airbench94.py", "legacy/airbench94.py")


class _Normalize:
    """What the file uses of torchvision, whose builds need not fit a torch for CPUs."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean, self.std = mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class _Event:
    """An event of a device that computes nothing later."""

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later.time - self.time)


def main() -> None:
    """Train, and print the samples a second of the epochs after the first one, as the file itself counts the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repository", type=Path, required=True, help="a clone of cifar10-airbench")
    parser.add_argument("--folder", type=Path, required=True, help="of train-images.npy and train-labels.npy")
    parser.add_argument("--width", type=int, nargs=3, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    typed = parser.parse_args()
    torch.set_num_threads(1)
    _answer_for_a_gpu()
    [path] = [typed.repository.resolve() / name for name in _FILES if (typed.repository / name).is_file()][:1]
    airbench = _loaded(path)
    airbench.hyp["opt"] |= {"batch_size": typed.batch, "train_epochs": typed.epochs}
    airbench.hyp["net"]["widths"] = dict(zip(("block1", "block2", "block3"), typed.width, strict=True))
    _put_data(typed.folder.resolve())
    ends: list[float] = []
    airbench.print_training_details = _noting(ends)
    airbench.main(0)
    samples = len(np.load(typed.folder / "train-labels.npy")) // typed.batch * typed.batch
    seconds = ends[typed.epochs - 1] - ends[0]
    steps = samples // typed.batch * typed.epochs
    print(json.dumps({"rate": samples * (typed.epochs - 1) / seconds, "steps": steps}))


def _answer_for_a_gpu() -> None:
    vision, transforms = ModuleType("torchvision"), ModuleType("torchvision.transforms")
    transforms.Normalize = _Normalize  # type: ignore[attr-defined]
    vision.transforms = transforms  # type: ignore[attr-defined]
    sys.modules |= {"torchvision": vision, "torchvision.transforms": transforms}
    Tensor.half = Tensor.float  # type: ignore[method-assign]
    nn.Module.half = nn.Module.float  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    torch.cuda.Event = _Event  # type: ignore[misc,assignment]
    torch.cuda.synchronize = lambda device=None: None


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("airbench", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    *others, gpu = module.CifarLoader.__init__.__defaults__
    assert gpu == 0
    module.CifarLoader.__init__.__defaults__ = (*others, "cpu")
    return module


def _put_data(folder: Path) -> None:
    """Write the images where the file looks for them, in the current folder."""
    os.makedirs("cifar10", exist_ok=True)
    images, labels = (np.load(folder / f"train-{what}.npy") for what in ("images", "labels"))
    data = {"images": _last_channels(torch.from_numpy(images)), "labels": torch.from_numpy(labels).long()}
    torch.save({**data, "classes": list(range(10))}, "cifar10/train.pt")
    few = {name: values[:16] for name, values in data.items()}
    torch.save({**few, "classes": list(range(10))}, "cifar10/test.pt")


def _last_channels(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1).contiguous() if images.shape[1] == 3 else images


def _noting(ends: list[float]) -> Callable[..., None]:
    def note(variables: Mapping[str, Any], is_final_entry: bool) -> None:
        ends.append(float(variables["total_time_seconds"]))

    return note


if __name__ == "__main__":
    main()
