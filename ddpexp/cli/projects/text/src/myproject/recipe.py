"""A language model: the model and the task of the recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.errors import RefusedError
from ddpexp.task import Sums

_IGNORED = -100  # a target behind the end of the text


class Block(nn.Module):
    """Attention to the tokens so far, and a network for each token. Shapes: (batch, tokens, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        """Build it with `heads` attention heads, each `width / heads` wide."""
        super().__init__()
        if width % heads:
            raise RefusedError(
                f"does not split over model.heads={heads}", key="model.width", value=width, suggestion="Use a multiple."
            )
        self.heads = heads
        self.attend, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute a layer."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.attend(x)).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder-only transformer. Shapes: (batch, tokens) -> (batch, tokens, vocab_size), scores of the next tokens."""

    def __init__(self, vocab_size: int, block_size: int, width: int, depth: int, heads: int) -> None:
        """Build it for at most `block_size` tokens at a time, with `depth` layers."""
        super().__init__()
        self.block_size = block_size
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab_size))
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.places(places)))  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, tokens: Tensor, num_tokens: int, temperature: float, top_k: int | None, seed: int) -> Tensor:
        """Return tokens and what follows them, for `ddpexp generate`. Shapes: (1, tokens) -> (1, more tokens)."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_tokens):
            scores = self(tokens[:, -self.block_size :])[:, -1].cpu()
            if top_k is not None and top_k < scores.shape[1]:
                scores[scores < scores.topk(top_k).values[:, -1:]] = -torch.inf
            chances = (scores / max(temperature, 1e-6)).softmax(1)
            new = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat((tokens, new.to(tokens.device)), 1)
        return tokens


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of the next token, and its perplexity."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Return sums over the batch, in training and in evaluation: ddpexp divides by the counts of all workers."""
        tokens, targets = batch
        scores = model(tokens)
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum")
        return loss, (targets != _IGNORED).sum(), {}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return a row for each window, for `ddpexp predict`: the mean loss of its tokens."""
        tokens, targets = batch
        scores = model(tokens).transpose(1, 2)
        losses = functional.cross_entropy(scores, targets, ignore_index=_IGNORED, reduction="none")
        return {"loss": losses.sum(1) / (targets != _IGNORED).sum(1)}

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return what is no mean over the evaluation set."""
        loss, count = sums["loss"]
        return {"perplexity": math.exp(min(float(loss) / float(count), 700.0))}
