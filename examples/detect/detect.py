"""A detector of rectangles: queries are matched with the objects of a picture, as in DETR.

Source: Carion et al., "End-to-end object detection with transformers", 2020.
"""

from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Loss, NamedSums

SIZE, OBJECTS, CLASSES = 16, 3, 2  # of a picture; most in a picture; bright and dark
NO_OBJECT = CLASSES  # one class more

Pictures = tuple[Tensor, Tensor, Tensor]  # Shapes: (batch, 1, 16, 16), (batch, 3) classes, (batch, 3, 4) boxes


def load(train: int, test: int) -> Splits:
    return Splits(Arrays(draw(train, 0)), {"eval": Arrays(draw(test, 1))})


def draw(count: int, seed: int) -> Pictures:
    """Draw pictures with none to three rectangles; a box has its corners, in parts of the picture."""
    generator = torch.Generator().manual_seed(seed)
    picture = torch.zeros(count, 1, SIZE, SIZE)
    classes = torch.randint(CLASSES + 1, (count, OBJECTS), generator=generator)
    corners = torch.rand(count, OBJECTS, 2, generator=generator) * 0.6
    boxes = torch.cat([corners, corners + 0.2 + torch.rand(count, OBJECTS, 2, generator=generator) * 0.2], 2)
    at = (torch.arange(SIZE) + 0.5) / SIZE
    for number in range(OBJECTS):
        left, top, right, bottom = (boxes[:, number, side, None, None] for side in range(4))
        inside = (left <= at) & (at < right) & (top <= at[:, None]) & (at[:, None] < bottom)
        value = torch.tensor([1.0, -1.0, 0.0])[classes[:, number]]
        picture[:, 0] = torch.where(inside & (value != 0)[:, None, None], value[:, None, None], picture[:, 0])
    return picture, classes, boxes


class Detector(nn.Module):
    """Scores of the classes and a box for each query."""

    def __init__(self, width: int, queries: int) -> None:
        super().__init__()
        self.queries = queries
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(width * (SIZE // 4) ** 2, 4 * width), nn.ReLU(), nn.Linear(4 * width, queries * (CLASSES + 5)),
        )  # fmt: skip

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = self.body(picture).unflatten(1, (self.queries, -1)).split([CLASSES + 1, 4], 2)
        return scores, boxes.sigmoid()


@dataclass(frozen=True)
class Detect:
    no_object: float  # weight of the class that is none
    box_weight: float

    def step(self, model: nn.Module, batch: Pictures) -> NamedSums:
        picture, classes, boxes = batch
        scores, found = model(picture)
        classes, boxes = self.matched(scores, found, classes, boxes)
        weights = torch.tensor([1.0] * CLASSES + [self.no_object], device=scores.device)
        wrong_class = functional.cross_entropy(
            scores.flatten(0, 1).float(), classes.flatten(), weights, reduction="sum"
        )
        is_object = classes != NO_OBJECT
        distance = (found.float() - boxes).abs()[is_object].sum()
        losses: dict[str, Loss] = {
            "class": (wrong_class, weights[classes].sum()),
            "box": (distance, is_object.sum(), self.box_weight),
        }
        return losses, {"accuracy": ((scores.argmax(2) == classes).sum(), classes.numel())}

    def counts(self, batch: Pictures) -> dict[str, Tensor]:
        """Return the counts of both losses, which do not depend on the match."""
        is_object = batch[1] != NO_OBJECT
        return {"class": is_object.sum() + self.no_object * (~is_object).sum(), "box": is_object.sum()}

    @torch.no_grad()
    def matched(self, scores: Tensor, found: Tensor, classes: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objects in the order of the queries that they match best: the cheapest of all orders."""
        orders = torch.tensor(list(permutations(range(OBJECTS))), device=scores.device)
        chance = scores.float().softmax(2).transpose(1, 2)
        unlike = 1 - torch.stack(
            [chance.gather(1, classes[:, order, None].transpose(1, 2)).squeeze(1) for order in orders]
        )
        apart = torch.stack([(found.float() - boxes[:, order]).abs().sum(2) for order in orders])
        is_object = torch.stack([classes[:, order] != NO_OBJECT for order in orders])
        cost = (unlike + self.box_weight * apart * is_object).sum(2)
        best = orders[cost.argmin(0)]
        return classes.gather(1, best), boxes.gather(1, best[..., None].expand(-1, -1, 4))
