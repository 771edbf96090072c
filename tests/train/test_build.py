"""What a rank builds from its configuration."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.data.adapters import MapStyle
from ddpexp.data.datasets import Splits
from ddpexp.errors import RefusedError
from ddpexp.train.build import load_data
from ddpexp.train.choose_samples import arrange, check_held_out
from tests.fitting import ALONE
from tests.refusals import is_about

DRAWN = """\
import random

import numpy as np
import torch

from ddpexp.data.datasets import Splits


def load():
    rows = [(torch.randn(3), float(np.random.rand()), random.random()) for _ in range(4)]
    return Splits(rows, {})
"""


def test_data_drawn_at_random_is_the_same_at_every_start_and_for_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    starts: list[list[tuple[Tensor, float, float]]] = []
    for seed in (0, 0, 1):
        made = compose(["data._target_=drawn.load", "run.trust=[drawn]", f"trainer.seed={seed}"])
        torch.seed()  # a process of its own
        np.random.seed()
        random.seed()
        starts.append(list(load_data(parse(made.values), None, ALONE).train))
    for other in starts[1:]:
        for (row, *numbers), (same, *same_numbers) in zip(starts[0], other, strict=True):
            assert torch.equal(row, same)
            assert numbers == same_numbers


@pytest.mark.parametrize(("fraction", "left", "most"), [("0.9999", 1, "0.36"), ("0.5", 100, "0.36")])
def test_a_fraction_that_leaves_no_batch_to_train_is_refused_with_the_largest_that_does(
    fraction: str, left: int, most: str
) -> None:
    overrides = ["data.source=embedded", "trainer.global_batch_size=128", "trainer.gpus=1"]
    undivided = Splits(MapStyle(range(200)), {})

    def check(value: str) -> None:
        made = compose([*overrides, f"data.validation_fraction={value}"])
        experiment = parse(made.values)
        check_held_out(experiment, arrange(undivided, experiment, ALONE), undivided)

    with pytest.raises(RefusedError) as caught:
        check(fraction)
    assert is_about(caught.value, f"data.validation_fraction={fraction}: leaves {left} training sample")
    check(most)
