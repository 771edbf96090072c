"""A diffusion model as a plain program, with the moving average of its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from examples.diffusion import diffusion
from tests.families.double import arrays
from tests.families.family import NUM_TRAIN, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    data = arrays(diffusion.load(NUM_TRAIN, 1).train)
    torch.manual_seed(SEED)
    model = diffusion.Denoiser(width=8, num_times=20).double()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(setting.num_steps):
        noisy, times, noises = [], [], []
        for (points,) in setting.seeded(data, step):
            times.append(torch.randint(20, (len(points),)))
            noises.append(torch.randn_like(points))
            kept = model.kept[times[-1]][:, None]
            noisy.append(points * kept**0.5 + noises[-1] * (1 - kept) ** 0.5)
        optimizer.zero_grad()
        torch.autograd.backward(mse_loss(model(torch.cat(noisy), torch.cat(times)), torch.cat(noises)))
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
    return tensors_of(model) | tensors_of(average, "model.ema")
