"""A plain script: torchrun --nproc-per-node=2 plain.py."""

import argparse

import torch
import torch.distributed as dist
from moons import Moons, Net
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(batch_size: int, epochs: int, lr: float) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, held_out = Moons(512, seed=0), Moons(256, seed=1)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Net(width=32))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for points, labels in loader:
            loss = cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            evaluate(model.module, held_out, epoch)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "plain.pth")
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: nn.Module, data: Moons, epoch: int) -> None:
    model.eval()
    scores = model(data.points)
    accuracy = (scores.argmax(1) == data.labels).float().mean()
    print(f"epoch {epoch} eval/loss {cross_entropy(scores, data.labels):.6f} eval/accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    main(**vars(parser.parse_args()))
