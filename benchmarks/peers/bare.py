"""The best hand-written loop we know, under torchrun.

Whole tensors in memory, a batched gather, no wait for the device but every 50 steps.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.common import Report, load, model


@dataclass(frozen=True)
class Words:
    """What is typed."""

    data: str
    steps: int
    tensorboard: str
    batch: int = 64  # samples a step of one rank
    model: str = "linear"
    lr: float = 0.05
    seed: int = 0


def main() -> None:
    """Train and report, as one of torchrun's ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--model", choices=["linear", "lenet"], default="linear")
    parser.add_argument("--tensorboard", required=True)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    words = Words(**vars(parser.parse_args()))
    dist.init_process_group("gloo")
    report = train(words)
    if dist.get_rank() == 0:
        report.show()
    dist.barrier()
    dist.destroy_process_group()


def train(words: Words) -> Report:
    """Train as one rank of the process group that there is."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    pixels, digits = load(words.data, "train")
    images, labels = torch.from_numpy(pixels.copy()).unsqueeze(1), torch.from_numpy(digits.copy()).long()
    network = DistributedDataParallel(model(words.model, words.seed), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(network.parameters(), words.lr, momentum=0.9, nesterov=True, foreach=True)
    loss_of = nn.CrossEntropyLoss()
    writer = None
    if rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(words.tensorboard)
    report = Report()
    per_epoch = len(labels) // (words.batch * world)
    for step in range(words.steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(words.seed + epoch))[
                rank::world
            ]
        rows = order[place * words.batch : (place + 1) * words.batch]
        inputs = images[rows].float().mul_(1 / 255 / 0.3081).sub_(0.1307 / 0.3081)
        loss = loss_of(network(inputs), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if writer is not None and step % 50 == 0:
            writer.add_scalar("loss", loss.item(), step)
        report.step()
    return report


if __name__ == "__main__":
    main()
