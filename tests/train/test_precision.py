"""Number formats: what a forward pass computes in, and which updates are left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpexp.errors import DdpexpError
from ddpexp.train.precision import Precision
from tests.refusals import refused

CPU = torch.device("cpu")


def update(precision: Precision, model: nn.Linear, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> Tensor:
    """Do one step on the gradient of half the sum of the weights, times a factor; return the true gradient."""
    precision.backward(model.weight.sum() * factor, torch.tensor(0.5))
    precision.unscale(optimizer)
    assert model.weight.grad is not None
    gradient = model.weight.grad.clone()
    precision.step(optimizer)
    precision.update()
    optimizer.zero_grad()
    return gradient


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_forward_pass_computes_in_its_format_and_weights_stay(
    model: nn.Linear, name: Literal["fp32", "bf16", "fp16"], dtype: torch.dtype
) -> None:
    with Precision(name, CPU, skip_nonfinite=False).autocast():
        assert model(torch.ones(1, 2)).dtype == dtype
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("skip", [False, True])
def test_the_gradient_is_weighted_and_of_its_true_size(model: nn.Linear, name: Any, skip: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    gradient = update(Precision(name, CPU, skip), model, optimizer)
    assert gradient.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    torch.testing.assert_close(model.weight.detach(), before - 0.5)


@pytest.mark.parametrize("form", [Tensor.float, Tensor.double, lambda loss: loss.view(1)])
def test_a_loss_of_another_type_or_form_is_weighted_too(model: nn.Linear, form: Callable[[Tensor], Tensor]) -> None:
    Precision("fp32", CPU, False).backward(form(model.weight.sum()), torch.tensor(0.5))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(("name", "skip"), [("fp32", True), ("bf16", True), ("fp16", False), ("fp16", True)])
def test_an_update_by_a_gradient_that_is_not_finite_is_left_out(model: nn.Linear, name: Any, skip: bool) -> None:
    precision = Precision(name, CPU, skip)
    assert precision.skips
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    before = model.weight.detach().clone()
    update(precision, model, optimizer, math.inf)
    assert torch.equal(model.weight.detach(), before)
    assert not optimizer.state  # the momentum has not seen it either
    update(precision, model, optimizer)
    torch.testing.assert_close(model.weight.detach(), before - 0.5)


def test_without_a_guard_every_update_is_done(model: nn.Linear) -> None:
    precision = Precision("fp32", CPU, skip_nonfinite=False)
    assert not precision.skips
    update(precision, model, torch.optim.SGD(model.parameters(), lr=1.0), math.nan)
    assert bool(model.weight.isnan().all())


def test_the_state_of_a_scaler_of_torch_is_restored_and_kept_under_its_names(model: nn.Linear) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    precision = Precision("fp16", CPU, False)
    precision.restore({**scaler.state_dict(), "_growth_tracker": 1})
    assert precision.state() == {**scaler.state_dict(), "_growth_tracker": 1}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scales = []
    for factor in (1.0, 1.0, math.inf):  # the third good step in a row is one to grow after
        update(precision, model, optimizer, factor)
        scales.append(precision.state()["scale"])
    assert scales == [64.0, 256.0, 64.0]


def test_weights_in_fp16_are_refused_where_gradients_are_scaled() -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.float16)
    precision = Precision("fp16", CPU, False)
    precision.backward(model.weight.sum(), torch.tensor(0.5))
    with refused("trainer.precision=fp16", DdpexpError):
        precision.unscale(torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.parametrize("num_workers", [1, 4])
def test_an_overflow_in_a_backward_pass_does_not_depend_on_the_number_of_workers(
    model: nn.Linear, num_workers: int
) -> None:
    largest = torch.finfo(torch.float16).max
    for factor, finite in ((0.9, True), (1.1, False)):
        precision = Precision("fp16", CPU, False, gradient_weight=num_workers)
        loss = (model.weight.half().float() * (factor * largest / precision.state()["scale"])).sum()
        precision.backward(loss, torch.tensor(float(num_workers)))  # a mean over the workers makes 1 of it
        precision.unscale(optimizer := torch.optim.SGD(model.parameters(), lr=1.0))
        assert precision.step(optimizer) is finite
        optimizer.zero_grad()


class Order(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note when numbers are read on the host, and when a fused kernel runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.seen.append("read")
        elif name.startswith("_fused_"):
            self.seen.append("kernel")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True})],
)
@pytest.mark.parametrize("factors", [(1.0, math.inf, 1.0), (math.inf, 1.0, math.inf, 1.0)])
def test_a_fused_optimizer_skips_on_the_device_and_the_host_reads_the_flag_afterwards(
    kind: Any, settings: dict[str, Any], factors: tuple[float, ...]
) -> None:
    orders, ends = {}, {}
    for fused in (True, None):
        torch.manual_seed(0)
        model = nn.Linear(2, 2, bias=False)
        optimizer = kind(model.parameters(), lr=0.1, fused=fused, **settings)
        precision, stepped = Precision("fp32", CPU, True), []
        for factor in factors:
            precision.backward(model.weight.sum() * factor, torch.tensor(0.5))
            precision.unscale(optimizer)
            with Order() as order:
                stepped.append(precision.step(optimizer))
            precision.update()
            optimizer.zero_grad()
        assert stepped == [math.isfinite(factor) for factor in factors]
        orders[fused], ends[fused] = order.seen, model.weight.detach()
    assert orders[True] == ["kernel", "read"]
    torch.testing.assert_close(ends[True], ends[None])
