"""The best hand-written loop we know for one GPU: samples in its memory, bf16, a compiled network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from benchmarks.peers.common import model
from benchmarks.peers.job import EVERY, RATE


def steps(
    data: Path,
    order: Path,
    folder: Path,
    name: str,
    channels_last: bool,
    compiles: bool = True,
    every: int = EVERY,
    precision: str = "bf16",
) -> Iterator[None]:
    """Take every step of the order, and yield after each; `precision` is bf16 or fp16.

    At the end leave the mean loss of the last record in `by_hand.json`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = (torch.from_numpy(np.load(data / f"train-{what}.npy")).to(device) for what in ("images", "labels"))
    rows = torch.from_numpy(np.load(order)).to(device)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    network = model(name).to(device, memory_format=memory_format)  # type: ignore[call-overload]
    called, loss_of = torch.compile(network) if compiles else network, nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), RATE, momentum=0.9, nesterov=True, fused=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    writer, since = SummaryWriter(folder), torch.zeros((), device=device)
    for step, row in enumerate(rows, start=1):
        batch = images.index_select(0, row).float().mul_(1 / 127.5).sub_(1).contiguous(memory_format=memory_format)
        with torch.autocast(device.type, dtype):
            loss = loss_of(called(batch), labels.index_select(0, row))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        since += loss.detach()
        if step % every == 0:
            mean = since.item() / every
            writer.add_scalar("loss", mean, step)
            (folder / "by_hand.json").write_text(json.dumps({"loss": mean}))
            since.zero_()
        yield
    writer.close()
