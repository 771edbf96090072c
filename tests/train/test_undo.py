"""Snapshots of buffers: in memory that is kept, and in few launches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpexp.train.undo import Undo
from tests.train.test_fuse import Launches


class Buffers(nn.Module):
    """Floats and whole numbers of several layers, a buffer that is replaced, one that grows, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(10)))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("none", None)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        """Shapes: (samples, 3) to the same."""
        self.replaced = torch.ones(2)
        result: Tensor = self.norms(rows)
        return result


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_a_snapshot_is_restored_each_time() -> None:
    model = Buffers()
    undo = Undo({"model": model})
    for step in range(3):
        undo.take()
        before, objects = values(model), dict(model.named_buffers())
        model(torch.randn(5, 3))
        assert not torch.equal(values(model)["norms.0.running_mean"], before["norms.0.running_mean"])
        if step == 1:
            model.seen = torch.ones(4)
        undo.restore()
        assert all(torch.equal(value, before[name]) for name, value in values(model).items())
        assert all(buffer is objects[name] for name, buffer in model.named_buffers())
        model.seen = torch.arange(step + 2.0)  # of another shape from here on
        model(torch.randn(5, 3))


def test_a_snapshot_takes_a_launch_for_each_dtype() -> None:
    undo = Undo({"model": Buffers()})
    undo.take()
    with Launches() as launches:
        undo.take()
        undo.restore()
    assert launches.counts == {"_foreach_copy_": 4}
