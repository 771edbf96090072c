"""A VAE as a plain program: the noise of each micro-batch, and all else at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from examples.vae import vae
from tests.families.double import arrays
from tests.families.family import GLOBAL_BATCH_SIZE, NUM_TRAIN, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    data = arrays(vae.load(NUM_TRAIN, 1).train)
    torch.manual_seed(SEED)
    model = vae.VAE(width=16, features=4).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(setting.num_steps):
        noise = torch.cat([torch.randn(len(b), 4, dtype=torch.float64) for [b] in setting.seeded(data, step)])
        [pictures] = setting.batch(data, step)
        mean, log_variance = model.encoder(pictures).split(4, 1)
        scores = model.decoder(mean + noise * torch.exp(0.5 * log_variance))
        error = binary_cross_entropy_with_logits(scores, pictures, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        beta = min(1.0, step / setting.num_steps / 0.5)
        optimizer.zero_grad()
        torch.autograd.backward((error + beta * divergence) / GLOBAL_BATCH_SIZE)
        optimizer.step()
    return tensors_of(model)
