"""A small transformer over letters. It learns which letter is the most frequent; fine-tuned, to know palindromes."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Sums

LETTERS = 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    def __init__(self, classes: int, width: int = 32, heads: int = 4, layers: int = 2, length: int = 12) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        x = self.letters(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x.mean(1)))
        return scores


def load(samples: int, labels: str, length: int = 12) -> Splits:
    words = torch.randint(LETTERS, (samples, length))
    if labels == "palindrome":
        words[::2, length // 2 :] = words[::2, : length // 2].flip(1)
        target = (words == words.flip(1)).all(1).long()
    else:
        target = functional.one_hot(words, LETTERS).sum(1).argmax(1)
    cut = samples // 5
    return Splits(train=Arrays((words[cut:], target[cut:])), evals={"eval": Arrays((words[:cut], target[:cut]))})


class Classify:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        words, target = batch
        scores = model(words)
        loss = functional.cross_entropy(scores, target, reduction="sum")
        return loss, len(target), {"accuracy": ((scores.argmax(1) == target).sum(), len(target))}
