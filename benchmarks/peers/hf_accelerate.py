"""The races' job with Accelerate, under torchrun."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn

from benchmarks.peers.common import Report
from benchmarks.peers.job import EVERY, Job


def main() -> None:
    """Train as one rank."""
    job = Job.typed()
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=job.folder)
    accelerator.init_trackers("raced")
    bare = job.network()
    network, optimizer = accelerator.prepare(bare, job.optimizer(bare))
    loss_of, report = nn.CrossEntropyLoss(), Report()
    # Whole batches are this rank's already, so `prepare` has nothing to share out; of a DataLoader's it gives each rank
    # its own.
    loader = (
        job.batches(job.rows(accelerator.process_index))
        if job.fast
        else accelerator.prepare(job.batches(job.all_rows()))
    )
    for step, (images, labels) in enumerate(loader, start=1):
        loss = loss_of(network(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            accelerator.log({"loss": loss.item()}, step=step)
        report.step()
    if accelerator.is_main_process:
        job.keep(bare, report)
    accelerator.end_training()


if __name__ == "__main__":
    main()
