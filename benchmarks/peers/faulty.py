"""A small DDP training in which something breaks, by hand under torchrun or with Lightning's Trainer."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpexp.system.fault_injection import fault_point

_STEP_SECONDS = 0.02


def main() -> None:
    """Train until the fault, or for a minute."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--with", dest="way", choices=["torchrun", "lightning"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds that the ranks wait for one another")
    words = parser.parse_args()
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(40_000, 20), torch.randint(0, 2, (40_000,)))
    if words.way == "torchrun":
        by_hand(data, words.folder, words.timeout)
    else:
        with_lightning(data, words.folder, words.timeout)


def say(folder: Path, step: int) -> None:
    """Leave a mark that this rank is there and trains, with its process; then break what is to break."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    os.environ["RANK"] = rank
    (folder / f"rank{rank}").write_text(f"{os.getpid()} {step}")
    time.sleep(_STEP_SECONDS)
    fault_point("step")


def by_hand(data: TensorDataset, folder: Path, timeout: float) -> None:
    """Train as torch's tutorial does."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    model = DistributedDataParallel(nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, (rows, labels) in enumerate(DataLoader(data, 16)):
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        say(folder, step)


def with_lightning(data: TensorDataset, folder: Path, timeout: float) -> None:
    """Train with the Trainer's own launcher, one process a device."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(20, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            say(folder, self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=timedelta(seconds=timeout)), max_epochs=1,
        logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(Module(), DataLoader(data, 16))  # fmt: skip


if __name__ == "__main__":
    main()
