"""Fused optimizers: what they launch, and where torch has none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ddpexp.train.fuse import describe, fuse


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the operations of a step that read or write tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def launches(optimizer: Optimizer) -> Counter[str]:
    """Return the operations of the second step with gradients of ones."""
    for _ in range(2):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        with Launches() as counted:
            optimizer.step()
    found: Counter[str] = counted.counts
    return found


@pytest.mark.parametrize(
    ("kind", "settings", "kernel"),
    [(AdamW, {}, "_fused_adamw_"), (SGD, {"momentum": 0.9, "nesterov": True}, "_fused_sgd_")],
)
def test_a_fused_step_is_one_kernel(kind: Any, settings: dict[str, Any], kernel: str) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(10)))
    fused = kind(model.parameters(), lr=0.1, **settings)
    each = kind(model.parameters(), lr=0.1, foreach=True, **settings)
    fuse(fused, {"model": model})
    found = launches(fused)
    assert found[kernel] == 1
    assert found.total() <= 2  # that of AdamW counts the steps beside it
    assert launches(each).total() > found.total()
    assert describe([fused]).startswith("optimizer.fused=auto: parameters are updated in one kernel")


def test_momentum_may_start_later_than_that_of_other_parameters() -> None:
    def trained(makes_fused: bool) -> list[Tensor]:
        early, late = (nn.Parameter(torch.linspace(-1, 1, 67)) for _ in range(2))
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        optimizer = SGD([early, late, frozen], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
        if makes_fused:
            fuse(optimizer, {})
        for step in range(5):
            early.grad = torch.full((67,), 0.1 * step)
            late.grad = torch.full((67,), 0.2 * step) if step > 1 else None
            optimizer.step()
        return [early.detach(), late.detach()]

    torch.testing.assert_close(trained(True), trained(False))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2, sparse=True)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("model", [Sparse(), Complex()])
def test_what_torch_has_no_fused_kernel_for_keeps_its_default(model: nn.Module) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    fuse(optimizer, {"model": model})
    assert optimizer.param_groups[0]["fused"] is None
    assert describe([optimizer]).startswith("optimizer.fused=auto: no parameters are updated in one kernel")
