"""A hand-written loop of the airbench kind on a CPU: augment a whole epoch at once, then index batches."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.cifar10.prepare import MEAN, STD, patch_moments
from recipes.cifar10 import SpeedNet

FRAME = 2


def main() -> None:
    """Train, and print the samples a second from the end of the first epoch to the end of the last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of train-images.npy and train-labels.npy")
    parser.add_argument("--width", type=int, nargs=3, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    typed = parser.parse_args()
    torch.set_num_threads(1)
    pixels, labels = (torch.from_numpy(np.load(typed.folder / f"train-{what}.npy")) for what in ("images", "labels"))
    network = SpeedNet(10, typed.width, patch_moments(pixels.numpy().tobytes()))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sgd = optimizer(network)
    labels = labels.long()
    images = normalized(pixels)
    chosen = torch.rand(len(images)) < 0.5
    images = torch.where(chosen.view(-1, 1, 1, 1), images.flip(-1), images)
    padded = functional.pad(images, [FRAME] * 4, "reflect")
    per_epoch = len(labels) // typed.batch
    total, step, begin = per_epoch * typed.epochs, 0, 0.0
    rates = [group["lr"] for group in sgd.param_groups]
    for epoch in range(typed.epochs):
        if epoch == 1:
            begin = time.perf_counter()
        shown = cropped(padded)
        if epoch % 2:
            shown = shown.flip(-1)
        order = torch.randperm(len(labels))
        for rows in order[: per_epoch * typed.batch].view(per_epoch, typed.batch):
            for group, rate in zip(sgd.param_groups, rates, strict=True):
                group["lr"] = rate * factor(step, total)
            scores = network(shown[rows].contiguous(memory_format=torch.channels_last))
            loss = functional.cross_entropy(scores, labels[rows], label_smoothing=0.2)
            sgd.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
            step += 1
        if not math.isfinite(loss.item()):
            raise SystemExit("the loss is not finite")
    seconds = time.perf_counter() - begin
    print(json.dumps({"rate": per_epoch * typed.batch * (typed.epochs - 1) / seconds, "steps": step}))


def optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Return airbench94's optimizer, for a mean loss."""
    trained = {name: value for name, value in network.named_parameters() if value.requires_grad}
    biases = [value for name, value in trained.items() if "norm" in name]
    others = [value for name, value in trained.items() if "norm" not in name]
    groups: list[dict[str, Any]] = [{"params": biases, "lr": 96.0, "weight_decay": 0.0}, {"params": others}]
    return torch.optim.SGD(groups, lr=1.5, momentum=0.85, weight_decay=1.33e-3, nesterov=True)


def normalized(pixels: Tensor) -> Tensor:
    """Return images of mean 0 and standard deviation 1. Shapes: (samples, 3, side, side)."""
    mean, std = (torch.tensor(values, device=pixels.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return ((pixels.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def cropped(padded: Tensor) -> Tensor:
    """Cut every image out at a place of its own: all images of one place at once."""
    side = padded.shape[-1] - 2 * FRAME
    places = torch.randint(0, 2 * FRAME + 1, (len(padded), 2), device=padded.device)
    result = padded.new_empty(len(padded), 3, side, side).contiguous(memory_format=torch.channels_last)
    for top in range(2 * FRAME + 1):
        for left in range(2 * FRAME + 1):
            rows = ((places[:, 0] == top) & (places[:, 1] == left)).nonzero().flatten()
            result[rows] = padded[rows, :, top : top + side, left : left + side]
    return result


def factor(step: int, total: int) -> float:
    """Return the factor of the learning rates in a step."""
    peak = 0.23 * total
    return 0.2 + 0.8 * step / peak if step < peak else 1 - 0.93 * (step - peak) / (total - peak)


if __name__ == "__main__":
    main()
