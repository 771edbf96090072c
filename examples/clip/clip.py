"""Pictures and captions that belong together, found by a loss over all pairs of the global batch.

Source: Radford et al., "Learning transferable visual models from natural language supervision", 2021.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Sums

SIZE, PLACES = 16, 8  # of a picture; of a square in it, across and down
Pairs = tuple[Tensor, Tensor]  # Shapes: (batch, 1, 16, 16), and (batch, 3) words: brightness, column and row


def load(train: int, test: int) -> Splits:
    return Splits(Arrays(draw(train, 0)), {"eval": Arrays(draw(test, 1))})


def draw(count: int, seed: int) -> Pairs:
    """Draw pictures with one square in noise, and say of each how bright the square is and where."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.stack([torch.randint(most, (count,), generator=generator) for most in (2, PLACES, PLACES)], 1)
    bright, column, row = (words[:, number, None, None] for number in range(3))
    at = torch.arange(SIZE)
    inside = ((at - column).clamp(0, SIZE // 2) == at - column) & (((at - row).clamp(0, SIZE // 2)) == at - row).mT
    noise = torch.randn(count, SIZE, SIZE, generator=generator) * 0.3
    return (noise + torch.where(inside, 2.0 * bright - 1, 0.0))[:, None], words


class Towers(nn.Module):
    """A tower for pictures and one for captions, and the scale of their products."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(width * (SIZE // 4) ** 2, features),
        )  # fmt: skip
        self.words = nn.ModuleList(nn.Embedding(most, width) for most in (2, PLACES, PLACES))
        self.caption = nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, features))
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, pictures: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        captions = torch.stack([table(words[:, number]) for number, table in enumerate(self.words)]).sum(0)
        return normalize(self.picture(pictures), dim=1), normalize(self.caption(captions), dim=1)


class Contrast:
    def embed(self, model: nn.Module, batch: Pairs) -> tuple[Tensor, Tensor]:
        pictures, captions = model(*batch)
        return pictures.float(), captions.float()

    def loss(self, model: Towers, embeddings: tuple[Tensor, Tensor]) -> Sums:
        pictures, captions = embeddings  # of the whole global batch
        scores = pictures @ captions.T * model.scale.exp()
        labels = torch.arange(len(scores), device=scores.device)
        loss = sum(cross_entropy(each, labels, reduction="sum") for each in (scores, scores.T)) / 2
        return torch.as_tensor(loss), len(scores), {"found": ((scores.argmax(1) == labels).sum(), len(scores))}
