"""The recipe for two steps, on two workers and on one, with pictures that the test draws."""

import random
from pathlib import Path

import torch
from myproject.recipe import Contrast, Groups, Net
from PIL import Image

import ddpexp

OVERRIDES = [
    "recipe=myproject", "trainer.threads=1", "trainer.epochs=1", "trainer.global_batch_size=4", "data.group_size=3",
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


def test_groups_differ_from_epoch_to_epoch_and_views_from_one_another(tmp_path: Path) -> None:
    draw(tmp_path / "pictures", 7)
    groups = Groups(sorted((tmp_path / "pictures").iterdir()), group_size=3, size=16)
    first, second = groups.of_epoch(0, 0), groups.of_epoch(0, 1)
    assert (len(groups), first[0].shape) == (2, (2, 3, 3, 16, 16))
    assert torch.equal(first[0], groups.of_epoch(0, 0)[0])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0][0], first[0][1])


def test_the_loss_of_a_group_does_not_depend_on_the_others() -> None:
    task = Contrast(temperature=0.2)
    model = Net(width=8, depth=2)
    groups = torch.randint(256, (4, 2, 3, 3, 8, 8), dtype=torch.uint8)
    together, _, _ = task.step(model, groups)
    apart = [task.step(model, groups[number : number + 1])[0] for number in range(4)]
    torch.testing.assert_close(together, torch.stack(apart).sum())
