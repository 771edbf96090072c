"""The recipe for two steps, on two workers and on one, with pictures that the test draws."""

import random
from pathlib import Path

import torch
from myproject.recipe import Contrast, Net, Views
from PIL import Image

import ddpexp

OVERRIDES = [
    "recipe=myproject", "trainer.threads=1", "trainer.epochs=1", "trainer.global_batch_size=4",
    "data.size=32", "data.num_workers=0", "model.width=8", "scheduler=constant",
    # The weights are then the same at every number of workers, to the bit.
    "trainer.reduction=exact", "trainer.micro_batch_size=2",
]  # fmt: skip


def draw(root: Path, count: int = 30) -> None:
    root.mkdir()
    for number in range(count):
        color = tuple(random.Random(number).randbytes(3))
        Image.new("RGB", (40 + number, 50), color).save(root / f"{number}.png")


def test_two_steps_on_two_workers_and_a_resume_on_one(tmp_path: Path) -> None:
    draw(tmp_path / "pictures")
    overrides = [*OVERRIDES, f"data.root={tmp_path}/pictures"]
    whole = ddpexp.run([*overrides, "trainer.gpus=2", "trainer.max_steps=2", f"run.dir={tmp_path}/whole"])
    assert whole.result["step"] == 2
    ddpexp.run([*overrides, "trainer.gpus=2", "trainer.max_steps=1", f"run.dir={tmp_path}/parts"])
    parts = ddpexp.run([*overrides, "trainer.gpus=1", "trainer.max_steps=2", f"run.dir={tmp_path}/parts"])
    assert parts.result["weights_sha256"] == whole.result["weights_sha256"]
    assert whole.model().features(torch.zeros(3, 3, 32, 32, dtype=torch.uint8)).shape == (3, 64)


def test_views_differ_from_epoch_to_epoch_and_from_one_another(tmp_path: Path) -> None:
    draw(tmp_path / "pictures", 7)
    views = Views(sorted((tmp_path / "pictures").iterdir()), size=16)
    first, second = views.of_epoch(0, 0), views.of_epoch(0, 1)
    assert (len(views), first[0].shape) == (7, (2, 3, 16, 16))
    assert torch.equal(first[0], views.of_epoch(0, 0)[0])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0][0], first[0][1])


def test_a_view_finds_the_other_view_of_its_picture() -> None:
    task = Contrast(temperature=0.1)
    same = torch.eye(4).repeat_interleave(2, 0).reshape(4, 2, 4)  # both views alike, and unlike all others
    loss, count, metrics = task.loss(Net(width=8, depth=2), same)
    assert (count, int(metrics["accuracy"][0])) == (8, 8)
    mixed, _, _ = task.loss(Net(width=8, depth=2), same.roll(1, 0).flip(0))
    assert loss == mixed  # the order of the pictures does not matter
