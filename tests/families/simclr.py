"""SimCLR as a plain program: the whole global batch at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.simclr import simclr
from tests.families.double import arrays
from tests.families.family import NUM_TRAIN, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    data = arrays(simclr.load(NUM_TRAIN, 1).train)
    torch.manual_seed(SEED)
    model = simclr.Encoder(width=8, features=4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(setting.num_steps):
        firsts, seconds = [], []
        for pictures, _ in setting.seeded(data, step):
            firsts.append(model(simclr.view(pictures))[1])
            seconds.append(model(simclr.view(pictures))[1])
        views = torch.cat([*firsts, *seconds])
        number = len(views)
        similar = (views @ views.T / 0.2).masked_fill(torch.eye(number, dtype=torch.bool), -torch.inf)
        optimizer.zero_grad()
        loss = cross_entropy(similar, (torch.arange(number) + number // 2) % number)
        torch.autograd.backward(loss)
        optimizer.step()
    return tensors_of(model)
