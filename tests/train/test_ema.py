"""The moving average of the weights: right in every kind of number, and gone without a trace after an evaluation."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from ddpexp.train.ema import EMA


class Kinds(nn.Module):
    """A parameter of every kind, one of them under two names."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
        self.floats = nn.ParameterList(torch.ones(3, dtype=kind) for kind in kinds)
        self.tied = self.floats[1]
        self.whole = nn.Parameter(torch.tensor([1, -2], dtype=torch.int8), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))


def moved(net: Kinds, to: float) -> None:
    with torch.no_grad():
        for parameter in net.floats:
            parameter.fill_(to)


def test_a_slow_average_of_16_bit_parameters_moves() -> None:
    net = Kinds()
    average = EMA({"model": net}, decay=0.999)
    moved(net, 2.0)
    for _ in range(1000):
        average.update()
    expected = 2 - 0.999**1000
    for number, kind in enumerate((torch.float32, torch.float32, torch.float32, torch.float64, torch.complex64)):
        found = average.tensors("model")[f"floats.{number}"]
        assert found.dtype == kind
        assert found.real.tolist() == pytest.approx([expected] * 3, rel=1e-4)
    assert average.tensors("model")["tied"] is average.tensors("model")["floats.1"]


def test_parameters_of_whole_numbers_are_those_of_the_last_step() -> None:
    net = Kinds()
    average = EMA({"model": net}, decay=0.9)
    net.whole.add_(5)
    net.flags.logical_not_()
    average.update()
    found = average.tensors("model")
    assert (found["whole"].tolist(), found["whole"].dtype) == ([6, 3], torch.int8)
    assert (found["flags"].tolist(), found["flags"].dtype) == ([False, True], torch.bool)


def test_an_evaluation_sees_the_average_and_training_its_weights_to_the_bit() -> None:
    net = Kinds()
    average = EMA({"model": net}, decay=0.5)
    moved(net, 1.1)
    average.update()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    places = [parameter.data_ptr() for parameter in net.parameters()]
    averages = {name: tensor.clone() for name, tensor in average.tensors("model").items()}
    with suppress(KeyError), average.in_place_of_weights():
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter, averages[name].to(parameter.dtype))
        raise KeyError  # an evaluation may fail
    for parameter, value, place in zip(net.parameters(), before, places, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.data_ptr() == place
    assert all(torch.equal(tensor, averages[name]) for name, tensor in average.tensors("model").items())


def test_what_was_kept_is_read_back_exactly() -> None:
    net, other = Kinds(), Kinds()
    average, later = EMA({"model": net}, decay=0.9), EMA({"model": other}, decay=0.9)
    moved(net, 1.3)
    average.update()
    for name, tensor in later.tensors("model").items():
        tensor.copy_(average.tensors("model")[name])  # as a checkpoint does
    moved(other, 1.3)
    average.update()
    later.update()
    assert all(torch.equal(tensor, average.tensors("model")[name]) for name, tensor in later.tensors("model").items())
    average.reset()
    assert average.tensors("model")["floats.1"].tolist() == net.floats[1].float().tolist()
