from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ddpexp.compat import operators


def lists(*values: float) -> list[Tensor]:
    return [torch.full((2,), float(value)) for value in values]


def first(tensors: list[Tensor] | tuple[Tensor, ...]) -> list[float]:
    return [float(tensor.flatten()[0]) for tensor in tensors]


def test_operators_on_lists() -> None:
    assert first(operators.foreach_add(lists(1, 2), lists(3, 4))) == [4, 6]
    assert first(operators.foreach_sub(lists(1, 2), lists(3, 5))) == [-2, -3]
    assert first(operators.foreach_div(lists(1, 2), 2)) == [0.5, 1]
    norms = operators.foreach_norm(lists(3, -4), 2, torch.float64)
    assert [norm.dtype for norm in norms] == [torch.float64] * 2
    assert torch.stack(norms).allclose(torch.tensor([18.0, 32.0], dtype=torch.float64).sqrt())


def test_operators_on_lists_in_place() -> None:
    tensors = lists(1, 2)
    operators.foreach_copy_(tensors, lists(3, 4))
    operators.foreach_mul_(tensors, 2)
    assert first(tensors) == [6, 8]
    operators.foreach_mul_(tensors, torch.tensor(0.5))
    operators.foreach_sub_(tensors, lists(1, 1))
    assert first(tensors) == [2, 3]
    operators.foreach_lerp_(tensors, lists(4, 4), 0.5)
    assert first(tensors) == [3, 3.5]
    operators.foreach_clamp_max_(tensors, 3.25)
    operators.foreach_clamp_min_(tensors, 3.125)
    assert first(tensors) == [3.125, 3.25]
    operators.foreach_zero_(tensors)
    assert first(tensors) == [0, 0]


def test_gradients_are_unscaled_and_checked() -> None:
    gradients, nonfinite = lists(2, 4), torch.zeros(())
    operators.amp_foreach_non_finite_check_and_unscale_(gradients, nonfinite, torch.tensor(0.5))
    assert (first(gradients), float(nonfinite)) == ([1, 2], 0)
    operators.amp_foreach_non_finite_check_and_unscale_(lists(torch.inf), nonfinite, torch.tensor(0.5))
    assert float(nonfinite) == 1


def test_a_scale_is_halved_and_doubled() -> None:
    scale, good_steps = torch.tensor(8.0), torch.zeros((), dtype=torch.int32)
    operators.amp_update_scale_(scale, good_steps, torch.ones(()), 2.0, 0.5, 2)
    assert (float(scale), int(good_steps)) == (4, 0)
    for _ in range(2):
        operators.amp_update_scale_(scale, good_steps, torch.zeros(()), 2.0, 0.5, 2)
    assert (float(scale), int(good_steps)) == (8, 0)


def test_images_are_resized_as_interpolate_does() -> None:
    image, out = torch.rand(1, 3, 9, 7), torch.empty(1, 3, 4, 4)
    operators.upsample_bilinear2d_aa.out(image, out.shape[2:], False, out=out)
    assert torch.equal(out, interpolate(image, (4, 4), mode="bilinear", antialias=True))
