"""MoCo as a plain program: the whole global batch at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.moco import moco
from tests.families.double import arrays
from tests.families.family import GLOBAL_BATCH_SIZE, NUM_TRAIN, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    data = arrays(moco.load(NUM_TRAIN, 1).train)
    torch.manual_seed(SEED)
    model = moco.Encoders(width=8, features=4, num_keys=64).double()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    for step in range(setting.num_steps):
        views = [(moco.view(pictures), moco.view(pictures)) for [pictures] in setting.seeded(data, step)]
        queries, keys = model(*(torch.cat(parts) for parts in zip(*views, strict=True)))
        alike = torch.einsum("nc,nc->n", queries, keys)[:, None]
        unlike = torch.einsum("nc,kc->nk", queries, model.queue)
        optimizer.zero_grad()
        torch.autograd.backward(
            cross_entropy(torch.cat([alike, unlike], 1) / 0.2, torch.zeros(len(keys), dtype=torch.int64))
        )
        optimizer.step()
        with torch.no_grad():
            model.queue[:-GLOBAL_BATCH_SIZE] = model.queue[GLOBAL_BATCH_SIZE:].clone()
            model.queue[-GLOBAL_BATCH_SIZE:] = keys
            for slow, fast in zip(model.key.parameters(), model.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    return tensors_of(model)
