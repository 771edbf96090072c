"""The fixed cost of a step beside a loop by hand, counted in bytecodes and calls: no clock decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddpexp.data.datasets import Arrays
from ddpexp.data.order import Permutation
from ddpexp.distributed.times import Times
from ddpexp.train.schedule import Cosine
from tests.bytecodes import Count, count
from tests.fitting import loop_alone, sgd

BATCH, SAMPLES = 4, 4096
NEVER = 10**6
FIRST, LAST = 60, 100  # steps that are counted: after 60 up to 100
ROWS = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(SAMPLES) % 4


def scaled(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return rows.mul(2.0).add_(0.5), labels


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


class Classify:
    def step(self, model: Any, batch: Any) -> Any:
        rows, labels = batch
        return nn.functional.cross_entropy(model(rows), labels, reduction="sum"), labels.numel(), {}


def ours(folder: Path) -> Count:
    loop, _ = loop_alone(
        None, folder, Classify(), LAST + 1, factory=Net, evals={}, data=Arrays((ROWS, LABELS), scaled),
        global_batch_size=BATCH, log_every=NEVER, eval_every=0, checkpoint_every=NEVER,
    )  # fmt: skip
    try:
        return count(loop.fit, lambda: FIRST <= loop.progress.step < LAST)
    finally:
        loop.logger.close()


def by_hand() -> Count:
    torch.manual_seed(0)
    model, schedule = Net(), Cosine()
    optimizer = sgd(model.parameters())
    order = Permutation(SAMPLES, 0, 0)(np.arange((LAST + 1) * BATCH)).reshape(-1, BATCH)
    losses: list[float] = []

    def train() -> None:
        for step, indices in enumerate(torch.from_numpy(order)):
            rows, labels = scaled(ROWS.index_select(0, indices), LABELS.index_select(0, indices))
            optimizer.param_groups[0]["lr"] = 0.05 * schedule.factor(step, LAST + 1)
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    return count(train, lambda: FIRST <= len(losses) < LAST)


def test_fixed_cost_is_that_of_a_loop_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Times, "start", lambda self, device: None)  # its marks are counted by themselves
    own = ours(tmp_path)
    hand = by_hand()
    print(own.table(LAST - FIRST), hand.table(LAST - FIRST), sep="\n\n")
    assert own.total <= 1.1 * hand.total
