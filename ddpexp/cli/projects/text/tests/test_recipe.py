"""The recipe for two steps, on two workers and on one, with a text that the test writes."""

from pathlib import Path

import torch
from myproject.recipe import NextToken

import ddpexp

OVERRIDES = [
    "recipe=myproject", "trainer.threads=1", "trainer.global_batch_size=4", "data.block_size=16",
    "model.width=16", "model.depth=2", "scheduler=constant",
    # The weights are then the same at every number of workers, to the bit.
    "trainer.reduction=exact", "trainer.micro_batch_size=2",
]  # fmt: skip


def test_two_steps_on_two_workers_and_a_resume_on_one(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question\n" * 50)
    overrides = [*OVERRIDES, f"data.path={text}"]
    whole = ddpexp.run([*overrides, "trainer.gpus=2", "trainer.max_steps=2", f"run.dir={tmp_path}/whole"])
    assert whole.result["step"] == 2
    ddpexp.run([*overrides, "trainer.gpus=2", "trainer.max_steps=1", f"run.dir={tmp_path}/parts"])
    parts = ddpexp.run([*overrides, "trainer.gpus=1", "trainer.max_steps=2", f"run.dir={tmp_path}/parts"])
    assert parts.result["weights_sha256"] == whole.result["weights_sha256"]
    written = whole.model().generate(torch.tensor([[0, 1]]), 20, temperature=0.8, top_k=5, seed=0)
    assert written.shape == (1, 22)
    predicted = NextToken().predict(whole.model(), (torch.zeros(3, 16).long(), torch.ones(3, 16).long()))
    assert predicted["loss"].shape == (3,)
