"""CLIP as a plain program: the whole global batch at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.clip import clip
from tests.families.double import arrays
from tests.families.family import NUM_TRAIN, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    data = arrays(clip.load(NUM_TRAIN, 1).train)
    torch.manual_seed(SEED)
    model = clip.Towers(width=8, features=4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(setting.num_steps):
        parts = [model(*batch) for batch in setting.seeded(data, step)]  # each with the random numbers of its dropout
        pictures, captions = (torch.cat(rows) for rows in zip(*parts, strict=True))
        scores = model.scale.exp() * pictures @ captions.T
        labels = torch.arange(len(scores))
        optimizer.zero_grad()
        torch.autograd.backward(0.5 * cross_entropy(scores, labels) + 0.5 * cross_entropy(scores.T, labels))
        optimizer.step()
    return tensors_of(model)
