"""The recipe for two steps, on two workers and on one, with a table of sums."""

import csv
from pathlib import Path

import torch
from myproject.recipe import Predict

import ddpexp

OVERRIDES = [
    "recipe=myproject", "trainer.threads=1", "trainer.global_batch_size=8",
    # The weights are then the same at every number of workers, to the bit.
    "trainer.reduction=exact", "trainer.micro_batch_size=4",
]  # fmt: skip


def write(path: Path) -> None:
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["one", "other", "sum"])
        table.writerows([row, row % 5, ("small", "large")[row + row % 5 > 20]] for row in range(40))


def test_two_steps_on_two_workers_a_resume_on_one_and_predictions(tmp_path: Path) -> None:
    write(tmp_path / "table.csv")
    overrides = [
        *OVERRIDES, f"data.path={tmp_path}/table.csv", "data.targets=sum", "data.inputs=[one,other]",
        "data.target_type=class", "scheduler=constant",
    ]  # fmt: skip
    whole = ddpexp.run([*overrides, "trainer.gpus=2", "trainer.max_steps=2", f"run.dir={tmp_path}/whole"])
    assert whole.result["step"] == 2
    ddpexp.run([*overrides, "trainer.gpus=2", "trainer.max_steps=1", f"run.dir={tmp_path}/parts"])
    parts = ddpexp.run([*overrides, "trainer.gpus=1", "trainer.max_steps=2", f"run.dir={tmp_path}/parts"])
    assert parts.result["weights_sha256"] == whole.result["weights_sha256"]
    predicted = Predict(None, None, ["sum"]).predict(whole.model(), [torch.zeros(3, 2)])
    assert {name: rows.shape for name, rows in predicted.items()} == {"label": (3,), "probability": (3, 2)}


def test_numbers_are_predicted_in_the_units_of_the_column() -> None:
    task = Predict([10.0], [2.0], ["price"])
    predicted = task.predict(torch.nn.Linear(2, 1), [torch.zeros(3, 2)])
    assert {name: rows.shape for name, rows in predicted.items()} == {"price": (3,)}
    empty = task.predict(torch.nn.Linear(2, 1, device="meta"), [torch.zeros(3, 2, device="meta")])
    assert empty["price"].device.type == "meta"  # as on a GPU: nothing stays on the host
