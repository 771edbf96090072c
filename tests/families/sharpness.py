"""Sharpness-aware minimization as a plain program, with the gradient of the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.sharpness import sharpness
from tests.families.double import arrays
from tests.families.family import NUM_TRAIN, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    data = arrays(sharpness.load(NUM_TRAIN, 1, 0.2).train)
    torch.manual_seed(SEED)
    model = sharpness.Net(hidden=8).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def gradients(step: int, turn: int) -> list[Tensor]:
        batches = setting.seeded(data, step, turn)
        scores, labels = zip(*[(model(rows), labels) for rows, labels in batches], strict=True)
        loss = cross_entropy(torch.cat(scores), torch.cat(labels))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for step in range(setting.num_steps):
        upwards = gradients(step, turn=0)
        norm = torch.cat([slope.flatten() for slope in upwards]).norm()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), upwards, strict=True):
                parameter.add_(0.1 / norm * slope)
        above = gradients(step, turn=1)
        for parameter, value, slope in zip(model.parameters(), before, above, strict=True):
            parameter.data.copy_(value)
            parameter.grad = slope
        optimizer.step()
    return tensors_of(model)
