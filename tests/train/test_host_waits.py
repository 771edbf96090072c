"""Steps on a device without numbers: whatever the host had to read there, or copied there and waited, would fail.

torch's meta device stands in for a GPU: it has shapes and no values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpexp.distributed.transfers import rows
from ddpexp.errors import DdpexpError
from ddpexp.strategy.exact import buffers
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.train.counts import GlobalCounts, totals_on_device, totals_on_host
from tests.conftest import Ddpexp
from tests.fitting import ALONE, STRATEGY, fit_alone, loop_alone
from tests.points import Recipe
from tests.refusals import refused

META = torch.device("meta")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)

CODE = """\
class Masked(Sides):
    def step(self, model, batch):
        _, rows, labels = batch
        kept = rows[:, 0] > 0
        losses = nn.functional.cross_entropy(model(rows), labels, reduction="none")
        return (losses * kept).sum(), kept.sum(), {"kept": (kept.sum(), len(labels))}


class Reads(Sides):
    # Asks for a number of the device in a step, as a task should not.
    def step(self, model, batch):
        loss, count, metrics = super().step(model, batch)
        loss.item()
        return loss, count, metrics


class Normed(nn.Sequential):
    # Buffers that change, floats and integers, and constant ones.
    def __init__(self):
        norms = nn.BatchNorm1d(64), nn.BatchNorm1d(64)
        super().__init__(nn.Linear(4, 64), norms[0], nn.ReLU(), nn.Linear(64, 64), norms[1], nn.Linear(64, 2))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.register_buffer("scale", torch.full((4,), 2.0))
"""


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse what makes the host wait for a GPU: reading a number, and copies that block."""

    def __init__(self, refuses: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuses = refuses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            assert not self.refuses, "a number was read"
        if func in COPIES:
            target, source = (args[0], args[1]) if func is COPIES[1] else (kwargs.get("device"), args[0])
            to = source.device if target is None else target.device if isinstance(target, Tensor) else target
            blocks = not (kwargs.get("non_blocking", False) or (func is COPIES[1] and len(args) > 2 and args[2]))
            if torch.device(to).type != source.device.type:
                assert not (self.refuses and blocks), f"a copy from {source.device} to {to} blocks"
                if torch.device(to).type == "cpu" and func is COPIES[1]:
                    return args[0]  # there is nothing to copy
        found = func(*args, **kwargs)
        if self.refuses and func is torch.ops.aten.lift_fresh.default:
            assert found.device.type != "meta", "torch.tensor(values, device=...) blocks"
        return found


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("waits"), environ), CODE).module()


@pytest.fixture
def steps(points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Do a first step on the meta device, then three more that must not wait."""
    monkeypatch.setattr("tests.fitting.ALONE", replace(ALONE, device=META))

    def run(task: str, **options: Any) -> None:
        loop, _ = loop_alone(points, tmp_path, getattr(points, task)(), evals={}, **options)
        loop._start()
        for step, micro_batches in enumerate(loop.run.train.steps(0, 4)):
            with Waits(refuses=step > 0):
                loop._metrics.add(loop._step.take(step, micro_batches, with_norm=False))

    return run


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("task", ["Sides", "Masked"])
def test_a_step_does_not_wait_for_the_device(
    steps: Callable[..., None], points: Any, task: str, reduction: str
) -> None:
    keys = {"micro_batch_size": 6, "clip_grad_norm": 1.0, "ema_decay": 0.9, "reduction": reduction}
    steps(task, factory=points.Normed, **keys)


def test_a_step_that_waits_is_noticed(steps: Callable[..., None]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        steps("Reads")


def test_rows_on_a_device_are_gathered_there_and_not_into_pinned_memory_of_the_host() -> None:
    there = torch.zeros(10, 3, device=META)
    found = rows(there, torch.arange(4, device=META), pinned=True)
    assert (found.device, found.shape) == (META, (4, 3))


def not_host(device: torch.device) -> bool:
    return False


@pytest.mark.parametrize("unread", [0, 1 << 20])
@pytest.mark.parametrize("share", [1, 10**9])
def test_an_exact_step_without_waiting_gives_the_same_bits(
    points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int, unread: int
) -> None:
    """With constant buffers as part of the sum, or watched for changes that the host reads seldom or at once."""

    def weights() -> dict[str, Tensor]:
        keys: dict[str, Any] = {"reduction": "exact", "micro_batch_size": 6}
        return fit_alone(points, tmp_path, points.Masked(), factory=Changes, **keys).weights

    class Changes(points.Normed):  # type: ignore[misc]
        """Its scale changes late, and in one micro-batch of four."""

        calls = 0

        def forward(self, rows: Tensor) -> Tensor:
            self.calls += self.training
            if self.training and self.calls > 8 and self.calls % 4 == 2:
                self.scale += 1.0
            found: Tensor = super().forward(rows * self.scale)
            return found

    expected = weights()
    monkeypatch.setattr("ddpexp.strategy.exact.buffers.is_host", not_host)
    monkeypatch.setattr("ddpexp.strategy.exact.round.is_host", not_host)
    monkeypatch.setattr("ddpexp.train.counts.moved", lambda tensor, device: tensor)
    monkeypatch.setattr("ddpexp.train.counts.is_host", not_host)
    monkeypatch.setattr(buffers, "_SHARE_OF_GRADIENTS", share)
    monkeypatch.setattr(buffers, "_UNREAD_BYTES", unread)
    found = weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert expected["model.scale"][0] > 2.0  # it has changed


def test_an_integer_buffer_without_a_mean_is_noticed_late_but_before_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpexp.strategy.exact.buffers.is_host", not_host)
    monkeypatch.setattr("ddpexp.strategy.exact.round.is_host", not_host)
    monkeypatch.setattr(buffers, "_SHARE_OF_GRADIENTS", 1)

    class Odd(nn.Linear):
        calls = 0

        def forward(self, rows: Tensor) -> Tensor:
            self.count: Tensor
            self.count += self.calls
            self.calls += 1
            return super().forward(rows)

    def build() -> nn.Module:
        model = Odd(3, 1)
        model.register_buffer("count", torch.tensor(3))
        return model

    def go_round(model: Exact) -> None:
        for leaf in range(4):
            with model.micro_batch(last=leaf == 3):
                model.train_model(torch.ones(2, 3)).sum().backward()
        model.clear_gradient()

    expected = "the buffer model.count: the 4 micro-batches"
    model = Exact(STRATEGY, ALONE, build, gradient_accumulation_steps=4)
    go_round(model)
    with refused(expected, DdpexpError):
        go_round(model)
    model = Exact(STRATEGY, ALONE, build, gradient_accumulation_steps=4)
    go_round(model)
    with refused(expected, DdpexpError), model.synced_buffers():
        pass


COUNTS = [3.0, 0.5, 2.25, 4.0]


@pytest.mark.parametrize(
    ("places", "totals"), [([0, 0, 0, 0], [9.75]), ([0, 1, 0, 1], [5.25, 4.5]), ([7, 7, 2, 7], [2.25, 7.5])]
)
def test_the_device_adds_counts_up_as_the_host_does(places: list[int], totals: list[float]) -> None:
    counts, where = torch.tensor(COUNTS, dtype=torch.float64), torch.tensor(places, dtype=torch.float64)
    assert totals_on_host(counts, where) == totals
    found = totals_on_device(counts, where)
    assert found[: len(totals)].tolist() == totals
    assert found[len(totals) :].isnan().all()


def test_counts_that_differ_are_refused_at_once_on_the_host_and_when_checked_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts, places = torch.tensor([3.0, 4.0, 1.0, 0.0]).double(), torch.tensor([0.0, 1.0, 0.0, 1.0]).double()
    totals = GlobalCounts("the task's step")
    assert float(totals.factor(counts, places, 8)) == 2.0
    assert float(totals.factor(torch.zeros(2).double(), torch.zeros(2).double(), 8)) == 0.0
    counts[3] = 1.0
    with refused("backward", DdpexpError):
        totals.factor(counts, places, 8)
    monkeypatch.setattr("ddpexp.train.counts.is_host", not_host)
    totals.check()
    assert float(totals.factor(counts[:2], places[:1].repeat(2), 14)) == 2.0
    totals.factor(counts, places, 8)
    with refused("over", DdpexpError):
        totals.check()
    totals.check()  # once
