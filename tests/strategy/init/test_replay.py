"""Construction that is recorded and replayed one tensor at a time gives the numbers of an ordinary construction."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddpexp.errors import RefusedError
from ddpexp.strategy.init.replay import record


class Everything(nn.Module):
    """Layers and initializers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=0)
        self.linear = nn.Linear(4, 6)
        self.convolution = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.recurrent = nn.LSTM(4, 5)
        self.register_buffer("frequencies", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5), persistent=False)
        self.small = nn.Parameter(torch.randn(3, 3) * 0.02)
        self.square, self.wide = nn.Linear(6, 6), nn.Linear(9, 4)
        nn.init.orthogonal_(self.square.weight)
        nn.init.orthogonal_(self.wide.weight)
        self.tied = nn.Linear(4, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))  # values that the factory has from elsewhere
        self.apply(_normal)
        torch.manual_seed(7)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.kaiming_normal_(self.layer.linear1.weight[:3])
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            self.linear.bias.uniform_(-1, 1, generator=generator)
            self.small[0].fill_(5)
            self.convolution.weight.data.mul_(2)
        generator.manual_seed(4)
        self.drawn = nn.Parameter(torch.randn(4, generator=generator))
        self.narrow = nn.Parameter(torch.rand(2, 2, dtype=torch.float64).to(torch.bfloat16))
        self.flipped = torch.randn(2, 5).t_()
        self.permutation = nn.Parameter(torch.randperm(6), requires_grad=False)


def _normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


def built() -> nn.Module:
    torch.manual_seed(0)
    return Everything()


def replayed(factory: Callable[[], nn.Module]) -> dict[str, Tensor]:
    model, recording = record(factory)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    values = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    assert set(values) <= {"given", "norm.num_batches_tracked"}
    without = {name: tensor for name, tensor in tensors.items() if name not in values}
    recording.replay(without, torch.device("cpu"), lambda name, tensor: values.update({name: tensor.clone()}))
    return values


def test_every_parameter_and_buffer_has_the_values_of_an_ordinary_construction() -> None:
    model = built()
    expected = dict([*model.named_parameters(), *model.named_buffers()])
    found = replayed(built)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name


def converted() -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 4), nn.Linear(3, 4)
    last.weight.data = first.weight.data * 2
    last.weight.data.add_(1)
    last.bias = first.bias
    model = nn.Sequential(first, nn.BatchNorm1d(4), last).double()
    first.bias.data.mul_(3)
    return model


def test_what_is_assigned_to_data_counts_as_when_a_model_is_converted() -> None:
    expected = converted()
    model, recording = record(converted)
    assert model.get_parameter("2.bias") is model.get_parameter("0.bias")
    found: dict[str, Tensor] = {}
    tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if t.is_meta}
    recording.replay(tensors, torch.device("cpu"), lambda name, tensor: found.update({name: tensor.clone()}))
    assert found.keys() == expected.state_dict().keys() - {"1.num_batches_tracked"}
    for name, tensor in found.items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, expected.state_dict()[name]), name


def test_the_model_is_as_built_but_for_its_memory() -> None:
    model, _ = record(built)
    assert isinstance(model, Everything)
    assert model.tied.weight is model.embedding.weight
    assert not model.permutation.requires_grad
    assert model.embedding.weight.is_meta
    assert torch.nn.init.trunc_normal_.__module__ == "torch.nn.init"  # what was replaced for the recording is back


def large() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(32)])  # 4 MiB each
    model.apply(_normal)  # again, after all of them are there
    return model


def test_a_replay_holds_a_few_tensors_at_a_time() -> None:
    model, recording = record(large)
    tensors = dict(model.named_parameters())
    recording.replay({}, torch.device("cpu"), lambda name, tensor: None)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        recording.replay(tensors, torch.device("cpu"), lambda name, tensor: None)
        os.write(writer, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 100)) < 40 * 1024  # KiB, of 128 MiB
    os.close(reader)
    os.close(writer)


def _looks() -> nn.Module:
    model = nn.Linear(3, 3)
    if model.weight.sum() > 0:
        nn.init.zeros_(model.bias)
    return model


def _of_numpy() -> nn.Module:
    model = nn.Linear(3, 3)
    model.bias.data = torch.from_numpy(np.ones(3, np.float32))
    return model


def _as_numpy() -> nn.Module:
    model = nn.Linear(3, 3)
    model.bias.detach().numpy()[0] = 1
    return model


@pytest.mark.parametrize("factory", [_looks, _as_numpy, _of_numpy])
def test_a_construction_that_looks_at_values_is_refused(factory: Callable[[], nn.Module]) -> None:
    with pytest.raises(RefusedError) as caught:
        record(factory)
    assert (caught.value.key, caught.value.value) == ("strategy.init", "replay")
    assert "depends on values" in caught.value.reason


def test_other_errors_of_a_construction_stay_what_they_are() -> None:
    def wrong() -> nn.Module:
        torch.ones(2) + torch.ones(3)
        return nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match="shape"):
        record(wrong)
