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
from ddpexp.train.build import load_data
from tests.fitting import ALONE

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
        assert made is not None
        torch.seed()  # a process of its own
        np.random.seed()
        random.seed()
        starts.append(list(load_data(parse(made.values), None, ALONE).train))
    for other in starts[1:]:
        for (row, *numbers), (same, *same_numbers) in zip(starts[0], other, strict=True):
            assert torch.equal(row, same)
            assert numbers == same_numbers
