"""A LightningModule, a LightningDataModule and a Trainer: python with_lightning.py."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from moons import Moons, Net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self, net: nn.Module, optimizer: Callable[..., Any], scheduler: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.make_optimizer, self.make_scheduler = net, optimizer, scheduler

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        points, labels = batch
        loss = cross_entropy(self.net(points), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        points, labels = batch
        scores = self.net(points)
        self.log("eval/loss", cross_entropy(scores, labels), sync_dist=True)
        self.log("eval/accuracy", (scores.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


class MoonsData(lightning.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Moons(512, seed=0), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Moons(256, seed=1), batch_size=64)


def main(batch_size: int, epochs: int, lr: float) -> None:
    lightning.seed_everything(0)
    model = Classifier(
        Net(width=32),
        partial(torch.optim.SGD, lr=lr, momentum=0.9),
        partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=epochs),
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=8,
        callbacks=[ModelCheckpoint(monitor="eval/loss", mode="min", save_top_k=1, save_last=True)],
        default_root_dir="with_lightning",
    )
    trainer.fit(model, MoonsData(batch_size))
    if trainer.is_global_zero:
        print(" ".join(f"{name} {trainer.callback_metrics[name]:.6f}" for name in ("eval/loss", "eval/accuracy")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    main(**vars(parser.parse_args()))
