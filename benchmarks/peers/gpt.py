"""A GPT in the sizes of GPT-2, and the best hand-written loop we know for it on one GPU, which is nanoGPT's.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

RATE, BETAS, DECAY = 0.0003, (0.9, 0.95), 0.1


@dataclass(frozen=True)
class Size:
    """What a model consists of."""

    layers: int
    heads: int
    width: int
    context: int
    words: int


SIZES = {"124M": Size(12, 12, 768, 1024, 50_304), "six": Size(6, 4, 128, 64, 256), "tiny": Size(2, 2, 32, 16, 64)}


class Layer(nn.Module):
    """Attention and a perceptron, each beside the residual. Shapes: (batch, context, width)."""

    def __init__(self, size: Size) -> None:
        """Make the weights."""
        super().__init__()
        width, self.heads = size.width, size.heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, values: Tensor) -> Tensor:
        """Add what both give."""
        batch, context, width = values.shape
        qkv = self.qkv(self.before_attention(values)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(seen.transpose(1, 2).reshape(batch, context, width))
        return values + self.perceptron(self.before_perceptron(values))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Scores of the next token. Shapes: (batch, context) to (batch, context, words)."""

    def __init__(self, size: Size) -> None:
        """Make the weights; those of the last layer are those of the first."""
        super().__init__()
        self.words, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.context, size.width)
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every word at every place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        values = self.norm(self.layers(self.words(tokens) + self.places(places)))
        return functional.linear(values, self.words.weight)


def model(size: str) -> nn.Module:
    """Build a GPT; the same weights every time."""
    torch.manual_seed(0)
    return GPT(SIZES[size])


def tokens(size: str, samples: int) -> Tensor:
    """Return random tokens, some more frequent than others: something to learn. Shapes: (samples, context + 1)."""
    draw = np.random.default_rng(0)
    kind = SIZES[size]
    return torch.from_numpy((kind.words * draw.random((samples, kind.context + 1)) ** 4).astype(np.int32))


def loss_of(network: nn.Module, batch: Tensor, reduction: str) -> Tensor:
    """Return the cross entropy of the next token. Shapes: (batch, context + 1)."""
    scores = network(batch[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction)


def steps(
    order: Path,
    folder: Path,
    size: str,
    samples: int,
    every: int,
    micro_batches: int = 1,
    clip: float | None = None,
    compiles: bool = False,
    lowers: bool = True,
) -> Iterator[None]:
    """Take every step of the order as nanoGPT's train.py does, and yield after each.

    The whole model compiled, in bf16 if it `lowers`, AdamW fused on a GPU, and the next batch on its way while the last
    one computes. At the end leave the mean loss of the last record in `by_hand.json`.

    Source: Karpathy, nanoGPT (github.com/karpathy/nanoGPT, train.py).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, rows = tokens(size, samples), torch.from_numpy(np.load(order))
    network = model(size).to(device)
    matrices = [parameter for parameter in network.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in network.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=BETAS, fused=device.type == "cuda")
    called: Any = torch.compile(network) if compiles else network

    def moved(indices: Tensor) -> Tensor:
        batch = data[indices].long()
        return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch

    parts = [part for row in rows for part in row.chunk(micro_batches)]
    writer, since, batch = SummaryWriter(folder), torch.zeros((), device=device), moved(parts[0])
    for number in range(1, len(parts) + 1):
        with torch.autocast(device.type, torch.bfloat16, enabled=lowers):
            loss = loss_of(called, batch, "mean") / micro_batches
        batch = moved(parts[number % len(parts)])
        loss.backward()  # type: ignore[no-untyped-call]
        since += loss.detach()
        if number % micro_batches:
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if (step := number // micro_batches) % every == 0:
            mean = since.item() / every
            writer.add_scalar("loss", mean, step)
            (folder / "by_hand.json").write_text(json.dumps({"loss": mean}))
            since.zero_()
        yield
    writer.close()
