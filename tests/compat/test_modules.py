from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddpexp.compat.modules import BatchNorm, NormBase, buffers_of, copies_when_loading, parameters_of, reset_of


class Layer(nn.Module):
    scale: Tensor
    late: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("late", None)
        self.inner = nn.Linear(2, 2)


def test_parameters_and_buffers_can_be_replaced() -> None:
    layer = Layer()
    assert (list(parameters_of(layer)), list(buffers_of(layer))) == (["weight"], ["scale", "late"])
    parameters_of(layer)["weight"] = buffers_of(layer)["late"] = half = torch.ones(2, dtype=torch.bfloat16)
    assert layer.weight is half
    assert layer.late is half


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_layers_with_statistics_of_batches_have_one_base(kind: type[nn.Module]) -> None:
    assert issubclass(kind, BatchNorm)
    assert issubclass(kind, NormBase)
    assert issubclass(nn.InstanceNorm1d, NormBase)
    assert not issubclass(nn.InstanceNorm1d, BatchNorm)


def test_first_values_can_be_drawn_again() -> None:
    for module in (nn.Linear(8, 8), nn.MultiheadAttention(8, 2)):
        weight = next(module.parameters())
        before = weight.detach().clone()
        reset = reset_of(module)
        assert reset is not None
        reset()
        assert not torch.equal(weight, before)
    assert reset_of(Layer()) is None


def test_modules_that_do_more_than_copy_are_known() -> None:
    class Loads(nn.Linear):
        def _load_from_state_dict(self, *arguments: object) -> None: ...

    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_pre_hook(lambda *arguments: None)  # type: ignore[no-untyped-call]
    assert [copies_when_loading(module) for module in (nn.Linear(2, 2), nn.BatchNorm1d(2))] == [True, True]
    assert [copies_when_loading(module) for module in (Loads(2, 2), hooked)] == [False, False]
