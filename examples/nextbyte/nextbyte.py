"""A small GPT that continues a text byte by byte."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.errors import RefusedError
from ddpexp.loggers.base import Logger
from ddpexp.task import Sums


@dataclass(frozen=True)
class Windows(IndexData):
    """Pieces of a text, each with the byte after it. Shapes: `text` is (bytes,) uint8."""

    text: Tensor
    context: int

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def fetch(self, indices: Tensor, pinned: bool = False) -> Tensor:
        """Return samples. Shapes: (batch, context + 1)."""
        places = indices[:, None] * self.context + torch.arange(self.context + 1)
        return self.text[places].long()


def load(path: str | None, context: int) -> Splits:
    """Read a text, of which the last tenth is for evaluation."""
    try:
        data = counting().encode() if path is None else Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(f"cannot be read: {error.strerror}", key="data.path", value=path) from None
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    if len(text) - cut <= context:
        raise RefusedError(
            f"The text has only {len(text)} bytes", key="data.context", value=context, suggestion="Use a longer text."
        )
    return Splits(train=Windows(text[:cut], context), evals={"eval": Windows(text[cut:], context)})


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Shapes: (batch, up to `context`) bytes -> (batch, the same, 256) scores of the next byte."""

    def __init__(self, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.last(self.blocks(self.bytes(text) + self.places(places)))  # type: ignore[no-any-return]

    @torch.no_grad()
    def sample(self, num_bytes: int, prompt: str = "\n", temperature: float = 0.8, seed: int = 0) -> str:
        """Return the prompt and what follows it."""
        generator, device = torch.Generator().manual_seed(seed), self.bytes.weight.device
        text = list((prompt or "\n").encode())
        for _ in range(num_bytes):
            scores = self(torch.tensor([text[-self.context :]], device=device))[0, -1].float().cpu()
            text.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
        return bytes(text).decode(errors="replace")


class NextByte:
    def step(self, model: nn.Module, text: Tensor) -> Sums:
        scores, targets = model(text[:, :-1]), text[:, 1:]
        loss = cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return loss, targets.numel(), {}

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        total, count = sums["loss"]
        return {"perplexity": math.exp(total / count)}

    def on_eval(self, model: GPT, text: Tensor, logger: Logger, step: int) -> None:
        logger.text(f"sample/{step}", f"```\n{model.sample(200)}\n```")


def counting() -> str:
    """Return a text without a file."""
    ones = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
    ones += [f"{name}teen" for name in ("six", "seven", "eigh", "nine")]
    tens = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()

    def spelled(number: int) -> str:
        if number >= 100:
            rest = f" and {spelled(number % 100)}" if number % 100 else ""
            return f"{spelled(number // 100)} hundred{rest}"
        if number < 20:
            return ones[number]
        return tens[number // 10] + (f"-{ones[number % 10]}" if number % 10 else "")

    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).tolist()
    return "".join(f"After {spelled(number)} comes {spelled(number + 1)}.\n" for number in order)
