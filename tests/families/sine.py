"""L-BFGS as torch has it, with one iteration a step, on all samples at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from examples.sine import sine
from tests.families.double import arrays
from tests.families.family import GLOBAL_BATCH_SIZE, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    data = arrays(sine.load(GLOBAL_BATCH_SIZE, 1).train)
    torch.manual_seed(SEED)
    model = sine.Curve(hidden=8).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=1, history_size=20, tolerance_grad=0, tolerance_change=0
    )
    places, heights = data.tensors

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(places), heights)
        torch.autograd.backward(loss)
        return loss

    for _ in range(setting.num_steps):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return tensors_of(model)
