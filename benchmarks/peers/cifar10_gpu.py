"""airbench94's loop for a GPU, on the network of recipe=cifar10: half precision, everything in the GPU's memory.

Prints JSON: the seconds of the epochs after the first one, the steps, and the accuracy over six views of each image.
Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, and its program airbench94.py.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.cifar10 import FRAME, cropped, factor, normalized, optimizer
from ddpexp.data.cifar10.prepare import patch_moments
from recipes.cifar10 import Classify, SpeedNet

_EVERY, _DECAY, _POWER = 5, 0.95, 3  # of the average of the weights
_WARM_EPOCHS = 3  # before the average begins, and in which the first layer's bias is trained


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of train-images.npy and train-labels.npy")
    parser.add_argument("--width", type=int, nargs=3, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    typed = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.half if device.type == "cuda" else torch.float
    torch.backends.cudnn.benchmark = True
    images, labels = _part(typed.folder, "train", device, dtype)
    pixels = np.load(typed.folder / "train-images.npy", mmap_mode="r")[:5000]
    network = SpeedNet(10, typed.width, patch_moments(pixels.tobytes())).to(device, dtype)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    found = _train(network, images, labels, typed.batch, typed.epochs)
    network.eval()
    images, labels = _part(typed.folder, "test", device, dtype)
    task = Classify(views="shift")
    with torch.no_grad():
        guesses = torch.cat([task.scores(network, part).argmax(1) for part in torch.split(images, 2000)])
    print(json.dumps({**found, "accuracy": (guesses == labels).float().mean().item()}))


def _train(network: SpeedNet, images: Tensor, labels: Tensor, batch: int, epochs: int) -> dict[str, float]:
    sgd = optimizer(network)
    for group in sgd.param_groups:  # for a sum over the batch, whose gradients half precision can express
        group["lr"] /= batch
        group["weight_decay"] *= batch
    rates = [group["lr"] for group in sgd.param_groups]
    chosen = torch.rand(len(images), device=images.device) < 0.5
    padded = functional.pad(torch.where(chosen.view(-1, 1, 1, 1), images.flip(-1), images), [FRAME] * 4, "reflect")
    average: dict[str, Tensor] = {}
    per_epoch, step, begin = len(labels) // batch, 0, 0.0
    total = per_epoch * epochs
    for epoch in range(epochs):
        if epoch == 1:
            begin = _now()
        network.whiten.bias.requires_grad = epoch < _WARM_EPOCHS  # type: ignore[union-attr]
        shown = cropped(padded).flip(-1) if epoch % 2 else cropped(padded)
        order = torch.randperm(len(labels), device=images.device)
        for rows in order[: per_epoch * batch].view(per_epoch, batch):
            for group, rate in zip(sgd.param_groups, rates, strict=True):
                group["lr"] = rate * factor(step, total)
            scores = network(shown[rows])
            loss = functional.cross_entropy(scores, labels[rows], label_smoothing=0.2, reduction="sum")
            sgd.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
            step += 1
            if epoch >= _WARM_EPOCHS and step % _EVERY == 0:
                _look_ahead(network, average, _DECAY**_EVERY * (step / total) ** _POWER)
        if average:
            _look_ahead(network, average, 1.0)
    return {"seconds": _now() - begin, "steps": step}


def _look_ahead(network: nn.Module, average: dict[str, Tensor], decay: float) -> None:
    """Move the average towards the weights, and the weights to it."""
    weights = {name: value for name, value in network.state_dict().items() if value.is_floating_point()}
    if not average:
        average.update({name: value.clone() for name, value in weights.items()})
        return
    for name, value in weights.items():
        average[name].lerp_(value, 1 - decay)
        value.copy_(average[name])


def _part(folder: Path, part: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pixels, labels = (
        torch.from_numpy(np.load(folder / f"{part}-{what}.npy")).to(device) for what in ("images", "labels")
    )
    return normalized(pixels).to(dtype), labels.long()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
