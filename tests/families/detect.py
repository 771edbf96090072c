"""A detector as DETR as a plain program: the whole global batch at once, objects matched in a loop."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, l1_loss

from examples.detect import detect
from tests.families.double import arrays
from tests.families.family import NUM_TRAIN, SEED, Setting, tensors_of


def plain(setting: Setting) -> Mapping[str, Tensor]:
    data = arrays(detect.load(NUM_TRAIN, 1).train)
    torch.manual_seed(SEED)
    model = detect.Detector(width=8, queries=3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(setting.num_steps):
        pictures, classes, boxes = setting.batch(data, step)
        scores, found = model(pictures)
        for number in range(len(pictures)):
            order = best_order(scores[number].detach(), found[number].detach(), classes[number], boxes[number])
            classes[number], boxes[number] = classes[number, order], boxes[number, order]
        is_object = classes < 2
        weight = torch.tensor([1, 1, 0.1], dtype=torch.float64)
        loss = cross_entropy(scores.flatten(0, 1), classes.flatten(), weight)
        distance = l1_loss(found[is_object], boxes[is_object], reduction="sum") / is_object.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss + 5 * distance)
        optimizer.step()
    return tensors_of(model)


def best_order(scores: Tensor, found: Tensor, classes: Tensor, boxes: Tensor) -> list[int]:
    """Return the order of the objects of a picture that matches the queries best."""
    costs: dict[tuple[int, ...], float] = {}
    for order in permutations(range(3)):
        costs[order] = 0.0
        for query, number in enumerate(order):
            costs[order] -= float(scores[query].softmax(0)[classes[number]])
            if classes[number] < 2:
                costs[order] += 5 * float((found[query] - boxes[number]).abs().sum())
    best = min(costs, key=costs.__getitem__)
    return list(best)
