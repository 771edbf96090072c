"""The races' job with Lightning's Trainer, with its defaults or with what its manual says of speed."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn

from benchmarks.peers.common import Report
from benchmarks.peers.job import Job, parser


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The model with its loss and optimizer."""

    def __init__(self, job: Job, logs: bool) -> None:
        """Build the model."""
        super().__init__()
        self.net, self.loss_of = job.network(), nn.CrossEntropyLoss()
        self.job, self.logs, self.report = job, logs, Report()

    def training_step(self, batch: Any, _index: int) -> Any:
        """Return the loss."""
        loss = self.loss_of(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Count the step."""
        self.report.step()

    def configure_optimizers(self) -> Any:
        """Make the optimizer."""
        return self.job.optimizer(self.net)


def main() -> None:
    """Train with the Trainer's own launcher."""
    typed = parser()
    typed.add_argument("--barebones", action="store_true", help="Trainer(barebones=True): no records either")
    words = vars(typed.parse_args())
    barebones = words.pop("barebones")
    torch.set_num_threads(1)
    job = Job(**words)
    module = Module(job, logs=not barebones)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=job.workers, strategy="ddp" if job.workers > 1 else "auto", max_epochs=1,
        use_distributed_sampler=False, default_root_dir=job.folder, **_forms(job, barebones),
    )  # fmt: skip
    trainer.fit(module, job.batches(job.rows(trainer.global_rank)))
    if trainer.is_global_zero:
        job.keep(module.net, module.report)


def _forms(job: Job, barebones: bool) -> dict[str, Any]:
    if barebones:
        return {"barebones": True}
    if job.fast:
        return {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return {}


if __name__ == "__main__":
    main()
