"""What a run reads inputs by: its kind of data, the source of a mixture, or its task."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ddpexp as package
from ddpexp.config.instantiate import instantiate
from ddpexp.config.schema import Experiment
from ddpexp.data.base import SampleNames
from ddpexp.data.batches import EvalBatches
from ddpexp.data.inputs import Inputs
from ddpexp.predict.inputs import read_inputs
from ddpexp.run.prepare import prepare
from tests.examples import EXAMPLES
from tests.refusals import refused

CPU = torch.device("cpu")
TRANSFORMS = (f"--config-dir={EXAMPLES}/transforms/conf", "recipe=transforms")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def composed(*words: str) -> tuple[Experiment, Any]:
    """Return an experiment and its task."""
    experiment = package.compose(list(words)).experiment
    experiment.trust.make_importable()
    return experiment, instantiate(experiment.task, experiment.trust, "task")


def batch_of(inputs: Inputs) -> Any:
    return EvalBatches(inputs.samples, len(inputs.samples), 0, 1, CPU).first()


def test_a_task_makes_the_samples_of_data_of_its_own() -> None:
    experiment, task = composed(*TRANSFORMS, "data.eval_transform={_target_: transforms.shift, most: 0}")
    folder = Path("bars")
    folder.mkdir()
    for number in (1, 0):
        np.savetxt(folder / f"{number}.txt", np.full((8, 8), number))
    (folder / ".hidden").write_text("no")
    inputs = read_inputs(experiment, task, {}, folder, None)
    assert (inputs.names, inputs.is_one) == (SampleNames("file", ["0.txt", "1.txt"]), False)
    images, labels = batch_of(inputs)
    assert (images.shape, images.sum((1, 2, 3)).tolist(), labels.tolist()) == ((2, 1, 8, 8), [0, 64], [-1, -1])
    one = read_inputs(experiment, task, {}, folder / "1.txt", None)
    assert (one.names, one.is_one) == (SampleNames("file", ["bars/1.txt"]), True)
    of_python = read_inputs(experiment, task, {}, ["bars/0.txt", "bars/1.txt"], None)
    assert torch.equal(batch_of(of_python)[0], images)


def test_data_of_ones_own_without_a_way_to_read_is_shown_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test may have imported one of its own
    experiment, task = composed(f"--config-dir={EXAMPLES}/mine/conf", "recipe=mine")
    with refused("def read_input(self, value):"):
        read_inputs(experiment, task, {}, Path(), None)
    del sys.modules["mine"]


def test_inputs_of_a_mixture_are_read_as_one_of_its_sources() -> None:
    for name in ("first", "second"):
        Path(f"{name}.csv").write_text("x,kind\n1,0\n2,1\n3,0\n4,1\n")
    experiment, task = composed(
        "recipe=tabular", "data=mixture", "~data.standardize", "data.validation_fraction=0",
        "task.num_outputs=2", "task.target_mean=null", "task.target_std=null",
        "model.num_features=1", "model.num_outputs=2", "trainer.global_batch_size=4",
        *(f"+data.sources.{name}={{_target_: arrays, prepare: arrays, path: {name}.csv, targets: kind}}"
          for name in ("first", "second")),
    )  # fmt: skip
    known = json.loads(json.dumps(prepare(experiment.data, experiment.trust)))
    assert batch_of(read_inputs(experiment, task, known, {"x": 7}, "second"))[0].item() == 7
    for split in (None, "eval"):
        with refused("--split first"):
            read_inputs(experiment, task, known, {"x": 1}, split)


def test_an_input_is_of_no_set_of_the_data_and_needs_the_record_of_the_run() -> None:
    experiment, task = composed("recipe=mnist")
    with refused("split: leave"):
        read_inputs(experiment, task, {}, Path("x.png"), "test")
    with refused("the input: name the run"):
        read_inputs(experiment, task, {}, Path("x.png"), None)
