"""The recipe for two steps, on two workers and on one."""

from pathlib import Path

import torch
from myproject.recipe import Classify

import ddpexp

OVERRIDES = [
    "recipe=myproject", "trainer.threads=1", "trainer.log_every=1",
    # The weights are then the same at every number of workers, to the bit.
    "trainer.reduction=exact", "trainer.micro_batch_size=32",
]  # fmt: skip


def test_two_steps_on_two_workers_and_a_resume_on_one(tmp_path: Path) -> None:
    whole = ddpexp.run([*OVERRIDES, "trainer.gpus=2", "trainer.max_steps=2", f"run.dir={tmp_path}/whole"])
    assert whole.result["step"] == 2
    ddpexp.run([*OVERRIDES, "trainer.gpus=2", "trainer.max_steps=1", f"run.dir={tmp_path}/parts"])
    parts = ddpexp.run([*OVERRIDES, "trainer.gpus=1", "trainer.max_steps=2", f"run.dir={tmp_path}/parts"])
    assert parts.result["weights_sha256"] == whole.result["weights_sha256"]
    predicted = Classify().predict(whole.model(), [torch.zeros(3, 2)])
    assert {name: rows.shape for name, rows in predicted.items()} == {"label": (3,), "probability": (3, 2)}
