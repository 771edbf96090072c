"""FixMatch with a slowly moving teacher as a plain program: the whole global batch at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddpexp.data.mixture.dataset import mix
from examples.fixmatch import fixmatch
from tests.families import double
from tests.families.family import GLOBAL_BATCH_SIZE, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    sources = {
        "labelled": double.data("examples.fixmatch.fixmatch.labelled", train=12, test=1),
        "unlabelled": double.data("examples.fixmatch.fixmatch.unlabelled", train=84),
    }
    data = mix(sources, {"labelled": 1, "unlabelled": 7}, None, GLOBAL_BATCH_SIZE).train
    torch.manual_seed(SEED)
    student, teacher = (net.double() for net in fixmatch.networks(width=8).values())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    for step in range(setting.num_steps):
        parts = [(fixmatch.weak(p), fixmatch.strong(p), labels) for p, labels in setting.seeded(data, step)]
        weak, strong, labels = (torch.cat(values) for values in zip(*parts, strict=True))
        known = labels != fixmatch.UNKNOWN
        with torch.no_grad():
            probability, guess = torch.softmax(teacher(weak[~known]), 1).max(1)
        losses = cross_entropy(student(strong[~known]), guess, reduction="none") * (probability >= 0.3)
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(student(weak[known]), labels[known]) + 2 * losses.mean())
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    return {**tensors_of(student, "student"), **tensors_of(teacher, "teacher")}
