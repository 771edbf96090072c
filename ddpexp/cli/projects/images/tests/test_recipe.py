"""The recipe for two steps, on two workers and on one, with pictures in two colors."""

from pathlib import Path

import torch
from myproject.recipe import Classify
from PIL import Image

import ddpexp

OVERRIDES = [
    "recipe=myproject", "trainer.threads=1", "trainer.global_batch_size=8", "trainer.epochs=1",
    "data.size=32",
    # The weights are then the same at every number of workers, to the bit.
    "trainer.reduction=exact", "trainer.micro_batch_size=4",
]  # fmt: skip


def draw(root: Path) -> None:
    for part, count in (("train", 16), ("val", 4)):
        for name in ("red", "green"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40 + number, 50), name).save(folder / f"{number}.png")


def test_two_steps_on_two_workers_and_a_resume_on_one(tmp_path: Path) -> None:
    draw(tmp_path / "pictures")
    overrides = [*OVERRIDES, f"data.root={tmp_path}/pictures", "scheduler=constant"]
    whole = ddpexp.run([*overrides, "trainer.gpus=2", "trainer.max_steps=2", f"run.dir={tmp_path}/whole"])
    assert whole.result["step"] == 2
    ddpexp.run([*overrides, "trainer.gpus=2", "trainer.max_steps=1", f"run.dir={tmp_path}/parts"])
    parts = ddpexp.run([*overrides, "trainer.gpus=1", "trainer.max_steps=2", f"run.dir={tmp_path}/parts"])
    assert parts.result["weights_sha256"] == whole.result["weights_sha256"]
    predicted = Classify().predict(whole.model(), [torch.zeros(3, 3, 32, 32)])
    assert {name: rows.shape for name, rows in predicted.items()} == {"label": (3,), "probability": (3, 2)}
