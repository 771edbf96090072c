"""The races' job with Lightning Fabric."""

from __future__ import annotations

from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger
from torch import nn

from benchmarks.peers.common import Report
from benchmarks.peers.job import EVERY, Job


def main() -> None:
    """Train with Fabric's own launcher."""
    job = Job.typed()
    strategy = "ddp" if job.workers > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=job.workers, strategy=strategy, loggers=TensorBoardLogger(job.folder))
    fabric.launch()
    bare = job.network()
    network, optimizer = fabric.setup(bare, job.optimizer(bare))
    loader = fabric.setup_dataloaders(job.batches(job.rows(fabric.global_rank)), use_distributed_sampler=False)
    loss_of, report = nn.CrossEntropyLoss(), Report()
    for step, (images, labels) in enumerate(loader, start=1):
        loss = loss_of(network(images), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            fabric.log("loss", loss.item(), step)
        report.step()
    if fabric.is_global_zero:
        job.keep(bare, report)


if __name__ == "__main__":
    main()
