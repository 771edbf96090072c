"""A script with Accelerate: torchrun --nproc-per-node=2 with_accelerate.py."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from moons import Moons, Net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main(batch_size: int, epochs: int, lr: float) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    set_seed(0)
    model = Net(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    loader = DataLoader(Moons(512, seed=0), batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(Moons(256, seed=1), batch_size=64)
    model, optimizer, loader, eval_loader = accelerator.prepare(model, optimizer, loader, eval_loader)
    for epoch in range(epochs):
        model.train()
        for points, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(points), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        model.eval()
        losses, hits = [], []
        for points, labels in eval_loader:
            with torch.no_grad():
                scores = model(points)
            scores, labels = accelerator.gather_for_metrics((scores, labels))
            losses.append(cross_entropy(scores, labels, reduction="none"))
            hits.append(scores.argmax(1) == labels)
        mean, accuracy = torch.cat(losses).mean(), torch.cat(hits).float().mean()
        accelerator.print(f"epoch {epoch} eval/loss {mean:.6f} eval/accuracy {accuracy:.4f}")
    accelerator.save_model(model, "with_accelerate")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    main(**vars(parser.parse_args()))
