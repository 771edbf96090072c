from __future__ import annotations

import pytest
import torch

from ddpexp.compat.autograd import preserved_versions, run_backward, version


def test_a_version_counts_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = version(tensor)
    tensor.add_(1)
    assert version(tensor) == before + 1


def test_changes_of_preserved_tensors_do_not_count() -> None:
    tensor, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    product = tensor * weight
    with torch.no_grad(), preserved_versions((tensor,)):
        tensor.add_(1)
    # torch accepts it, although the graph has saved what has changed
    product.sum().backward()  # type: ignore[no-untyped-call]
    product = tensor * weight
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()  # type: ignore[no-untyped-call]


def test_a_backward_pass_is_that_of_torch_autograd_backward() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    run_backward(((weight * weight).sum(),), (torch.tensor(3.0),))
    run_backward(((weight * weight).sum(),), (torch.tensor(3.0),))  # it accumulates
    assert weight.grad is not None
    assert weight.grad.tolist() == [12.0, 24.0]
