"""The average of the weights: right in every kind of number, and gone without a trace after an evaluation."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from ddpexp.train.average import WeightAverage, slow_average_warning
from ddpexp.train.average_batch_norm import BatchNormEstimate
from ddpexp.train.callbacks.base import Callback, RunView
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.loop import Loop
from tests.conftest import SMALL, Ddpexp
from tests.fitting import loop_alone
from tests.points import Recipe


@pytest.mark.parametrize(("decay", "num_steps"), [(None, 280), (0.9999, 10), (0.9999, 7000), (0.97, 280), (0.96, 20)])
def test_an_average_that_leaves_its_start_behind_needs_no_warning(decay: float | None, num_steps: int) -> None:
    assert slow_average_warning(decay, num_steps) is None


def test_a_run_whose_average_stays_at_its_start_is_warned(ddpexp: Ddpexp) -> None:
    done = ddpexp(*SMALL, "trainer.max_steps=20", "trainer.epochs=null", "trainer.ema_decay=0.999")
    [line] = [line for line in (done.out + done.err).splitlines() if "ema_decay" in line]
    assert line.endswith(
        "trainer.ema_decay=0.999 averages over about 1,000 steps, and this run has 20: 98% of the average, which "
        "evaluations use, would be the weights that it began with. Use trainer.ema_decay=0.5 or trainer.ema_decay=null."
    )
    assert ": 54% of the average" in (slow_average_warning(0.97, 20) or "")


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
    average = WeightAverage({"model": net}, decay=0.999)
    moved(net, 2.0)
    for _ in range(1000):
        average.update(1)
    expected = 2 - 0.999**1000
    for number, kind in enumerate((torch.float32, torch.float32, torch.float32, torch.float64, torch.complex64)):
        found = average.tensors("model")[f"floats.{number}"]
        assert found.dtype == kind
        assert found.real.tolist() == pytest.approx([expected] * 3, rel=1e-4)
    assert average.tensors("model")["tied"] is average.tensors("model")["floats.1"]


def test_parameters_of_whole_numbers_are_those_of_the_last_step() -> None:
    net = Kinds()
    average = WeightAverage({"model": net}, decay=0.9)
    net.whole.add_(5)
    net.flags.logical_not_()
    average.update(1)
    found = average.tensors("model")
    assert (found["whole"].tolist(), found["whole"].dtype) == ([6, 3], torch.int8)
    assert (found["flags"].tolist(), found["flags"].dtype) == ([False, True], torch.bool)


def test_an_evaluation_sees_the_average_and_training_its_weights_to_the_bit() -> None:
    net = Kinds()
    average = WeightAverage({"model": net}, decay=0.5)
    moved(net, 1.1)
    average.update(1)
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
    average, later = WeightAverage({"model": net}, decay=0.9), WeightAverage({"model": other}, decay=0.9)
    moved(net, 1.3)
    average.update(1)
    for name, tensor in later.tensors("model").items():
        tensor.copy_(average.tensors("model")[name])  # as a checkpoint does
    moved(other, 1.3)
    average.update(1)
    later.update(1)
    assert all(torch.equal(tensor, average.tensors("model")[name]) for name, tensor in later.tensors("model").items())
    average.reset()
    assert average.tensors("model")["floats.1"].tolist() == net.floats[1].float().tolist()


class Normed(nn.Module):
    """BatchNorm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 2)
        )

    def forward(self, batch: Any) -> Tensor:
        scores: Tensor = self.net(batch[1])
        return scores


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("average"), {})).module()


class Sides:
    def step(self, model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch), batch[2], reduction="sum"), len(batch[2]), {}


@pytest.mark.parametrize(("start", "every", "steps"), [(0, 1, [1, 2, 3, 4, 5, 6]), (3, 2, [4, 6]), (3, "epoch", [4])])
def test_the_mean_is_over_the_weights_after_the_chosen_steps(
    points: Any, tmp_path: Path, start: int, every: Any, steps: list[int]
) -> None:
    class Keeps(Callback):
        def on_step(self, run: RunView) -> None:
            kept[run.step] = {name: parameter.detach().clone() for name, parameter in run.parameters()}

    kept: dict[int, dict[str, Tensor]] = {}
    callbacks = Callbacks({"keeps": Keeps()})
    loop, _ = loop_alone(points, tmp_path, Sides(), 6, Normed, callbacks=callbacks, swa_start=start, swa_every=every)
    loop.fit()
    assert loop.average is not None
    assert (loop.average.count, loop.average.first_step) == (len(steps), steps[0])
    model = Normed()
    reference = AveragedModel(model)  # torch's own
    for step in steps:
        model.load_state_dict({name.removeprefix("model."): value for name, value in kept[step].items()}, strict=False)
        reference.update_parameters(model)
    for name, parameter in reference.module.named_parameters():
        assert torch.allclose(loop.average.tensors("model")[name], parameter, rtol=1e-5, atol=1e-7), name


def test_until_it_begins_it_is_the_weights() -> None:
    net = Kinds()
    average = WeightAverage({"model": net}, start=4, every=2)
    moved(net, 1.5)
    average.update(3)
    assert average.count == 0
    assert average.tensors("model")["floats.1"].tolist() == [1.5] * 3
    with average.in_place_of_weights():
        assert net.floats[1].tolist() == [1.5] * 3
    average.update(4)  # the step from which on it is the mean
    assert (average.count, average.first_step) == (1, 4)
    moved(net, 2.5)
    assert average.tensors("model")["floats.1"].tolist() == [1.5] * 3


def test_a_mean_that_is_reset_begins_again() -> None:
    net = Kinds()
    average = WeightAverage({"model": net})
    for step, value in enumerate((4.0, 8.0), start=1):
        moved(net, value)
        average.update(step)
    assert average.tensors("model")["floats.0"].tolist() == [6.0] * 3
    moved(net, 1.5)
    average.reset()
    moved(net, 2.0)
    assert average.tensors("model")["floats.0"].tolist() == [2.0] * 3  # those of now: it has not begun
    average.update(3)
    moved(net, 3.0)
    average.update(4)
    assert average.tensors("model")["floats.0"].tolist() == [2.5] * 3


def test_a_step_that_moves_nothing_leaves_a_moving_average() -> None:
    net = Kinds()
    average = WeightAverage({"model": net}, decay=0.5)
    average.is_stale = False  # as after an estimate of the statistics
    moved(net, 3.0)
    average.update(1, moved=False)
    assert (average.tensors("model")["floats.0"].tolist(), average.is_stale) == ([1.0] * 3, False)
    average.update(2)
    assert (average.tensors("model")["floats.0"].tolist(), average.is_stale) == ([2.0] * 3, True)


class Shared(nn.Module):
    """A BatchNorm layer under two names, one without statistics, and one whose statistics stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.BatchNorm1d(2)
        self.other = self.one
        self.free = nn.BatchNorm1d(2, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(2)
        self.frozen.track_running_stats = False


def test_statistics_of_a_layer_are_the_same_under_all_its_names() -> None:
    net = Shared()
    average = WeightAverage({"model": net}, decay=0.5, batch_norm=True)
    assert average.layers == [net.one]
    average.statistics[0][0].fill_(5.0)  # as an estimate does
    found = average.tensors("model")
    assert found["one.running_mean"].tolist() == found["other.running_mean"].tolist() == [5.0, 5.0]
    assert net.one.running_mean is not None
    with average.in_place_of_weights():
        assert net.one.running_mean.tolist() == [5.0, 5.0]
    assert net.one.running_mean.tolist() == [0.0, 0.0]
    net.one.running_mean.fill_(7.0)
    average.reset()
    assert average.tensors("model")["other.running_mean"].tolist() == [7.0, 7.0]
    later = WeightAverage({"model": net}, start=4, batch_norm=True)
    net.one.running_mean.fill_(8.0)  # before it begins, what is evaluated has the statistics of training
    assert later.tensors("model")["one.running_mean"].tolist() == [8.0, 8.0]
    assert WeightAverage({"model": net}, decay=0.5).layers == []


@pytest.mark.parametrize("micro_batch_size", ["auto", 6])
def test_the_statistics_of_the_average_are_those_of_torch_and_training_never_sees_them(
    points: Any, tmp_path: Path, micro_batch_size: Any
) -> None:
    keys: dict[str, Any] = {"micro_batch_size": micro_batch_size, "eval_every": 3, "ema_decay": 0.5}
    loop, _ = loop_alone(points, tmp_path, Sides(), 6, Normed, average_batch_norm=4, **keys)
    plain, _ = loop_alone(points, tmp_path, Sides(), 6, Normed, **keys)
    loop.fit()
    plain.fit()
    model, other = loop.run.strategy.modules["model"], plain.run.strategy.modules["model"]
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert plain.average is not None
    of_training = plain.average.tensors("model")["net.1.running_mean"]  # without average_batch_norm
    assert torch.equal(of_training, other.state_dict()["net.1.running_mean"])
    averaged = with_statistics_of_torch(loop)
    assert not torch.allclose(averaged["net.1.running_mean"], model.state_dict()["net.1.running_mean"], atol=1e-4)
    assert loop.progress.metrics["eval/loss"] != plain.progress.metrics["eval/loss"]


def with_statistics_of_torch(loop: Loop) -> dict[str, Tensor]:
    """Check that the average has the statistics that torch estimates for its weights, and return its tensors."""
    assert loop.average is not None
    averaged = loop.average.tensors("model")
    with torch.no_grad():
        reference = Normed()
        reference.load_state_dict(averaged)
        update_bn([_Held(batch) for batches in loop.run.train.steps(0, 4) for batch in batches], _Whole(reference))
    for name, tensor in reference.state_dict().items():
        assert torch.allclose(averaged[name].double(), tensor.double(), rtol=1e-5, atol=1e-6), name
    return averaged


def test_the_statistics_are_estimated_before_the_first_step_and_again_after_a_reset(
    points: Any, tmp_path: Path
) -> None:
    class Counted(Sides):
        def step(self, model: nn.Module, batch: Any) -> Any:
            counts.append(len(batch[2]))
            return super().step(model, batch)

    counts: list[int] = []
    loop, _ = loop_alone(points, tmp_path, Counted(), 6, Normed, average_batch_norm=4, ema_decay=0.5)
    assert loop.average is not None
    estimate = BatchNormEstimate(loop.run, num_batches=4)
    for _ in range(2):
        estimate.refresh(loop.average)
        with_statistics_of_torch(loop)
        assert len(counts) == 4  # once, as it has not changed
    with torch.no_grad():
        for parameter in loop.run.strategy.modules["model"].parameters():
            parameter.mul_(2)
    loop.average.reset()
    estimate.refresh(loop.average)
    with_statistics_of_torch(loop)
    assert len(counts) == 8


class _Held:
    """A batch that torch's function passes on whole: of a tuple it would take the first part."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class _Whole(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, held: _Held) -> Any:
        return self.model(held.batch)
