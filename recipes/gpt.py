"""Text, token by token: a decoder in the variants of GPT-2, nanoGPT and Llama, its loss, and samples of its writing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.text.tokenizer import Tokenizer, from_record, prompt_of
from ddpexp.errors import RefusedError

if TYPE_CHECKING:
    from ddpexp.loggers.base import Logger
    from ddpexp.task import Sums

_IGNORED = -100  # a target that does not count, as in data=text


class Conv1D(nn.Module):
    """A linear layer whose weight is transposed, as in GPT-2's files. Shapes: weight (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        """Build it; `GPT` initializes it."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply. Shapes: (..., inputs) -> (..., outputs)."""
        return functional.linear(x, self.weight.t(), self.bias)


class LayerNorm(nn.Module):
    """Layer normalization whose bias can be left out, as nanoGPT's."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        """Build it."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass
class Cache:
    """The keys and values of tokens that a model has seen. Shapes: (batch, kv_heads, num_tokens, head_width) each."""

    num_tokens: int = 0
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """What the layers of a `GPT` have in common; see there."""

    width: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    mlp: str
    norm: str
    norm_eps: float
    bias: bool
    dropout: float
    rotary: bool
    conv1d: bool

    @property
    def head_width(self) -> int:
        """Return the width of an attention head."""
        return self.width // self.num_heads

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """Build a linear layer."""
        return (Conv1D if self.conv1d else nn.Linear)(inputs, outputs, bias=self.bias)

    def normalization(self) -> nn.Module:
        """Build a normalization."""
        if self.norm == "rmsnorm":
            return nn.RMSNorm(self.width, eps=self.norm_eps)
        return LayerNorm(self.width, self.norm_eps, self.bias)


class Attention(nn.Module):
    """Causal self-attention; several heads may share keys and values (grouped-query attention).

    Source: Vaswani et al., 2017; Ainslie et al., "GQA", 2023; Su et al., "RoFormer", 2021.
    """

    def __init__(self, shape: Shape) -> None:
        """Build it."""
        super().__init__()
        self.shape = shape
        self.c_attn = shape.linear(shape.width, shape.width + 2 * shape.num_kv_heads * shape.head_width)
        self.c_proj = shape.linear(shape.width, shape.width)
        self.resid_dropout = nn.Dropout(shape.dropout)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: Cache | None, layer: int
    ) -> Tensor:
        """Attend. Shapes: (batch, tokens, width) -> the same; angles and mask as in `GPT.forward`."""
        shape = self.shape
        kv_width = shape.num_kv_heads * shape.head_width
        q, k, v = (
            part.unflatten(2, (-1, shape.head_width)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for part in _divided(self.c_attn(x), (shape.width, kv_width, kv_width))
        )
        if angles is not None:
            q, k = _rotated(q, *angles), _rotated(k, *angles)
        if cache is not None:
            if layer in cache.layers:
                k, v = (torch.cat(pair, 2) for pair in zip(cache.layers[layer], (k, v), strict=True))
            cache.layers[layer] = k, v
        y = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=shape.dropout if self.training else 0.0,
            is_causal=mask is None and q.shape[2] > 1,
            enable_gqa=shape.num_kv_heads != shape.num_heads,
        )
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers around a nonlinearity, or three with a gate (SwiGLU).

    Source: Shazeer, "GLU variants improve transformer", 2020.
    """

    def __init__(self, shape: Shape) -> None:
        """Build it."""
        super().__init__()
        self.c_fc = shape.linear(shape.width, shape.hidden)
        self.c_gate = shape.linear(shape.width, shape.hidden) if shape.mlp == "swiglu" else None
        self.c_proj = shape.linear(shape.hidden, shape.width)
        self.approximate = "tanh" if shape.mlp == "gelu_tanh" else "none"
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Compute each token by itself. Shapes: (batch, tokens, width) -> the same."""
        hidden = self.c_fc(x)
        if self.c_gate is not None:
            hidden = functional.silu(self.c_gate(x)) * hidden
        else:
            hidden = functional.gelu(hidden, approximate=self.approximate)
        return self.dropout(self.c_proj(hidden))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each after a normalization and added to what came in."""

    def __init__(self, shape: Shape) -> None:
        """Build it."""
        super().__init__()
        self.ln_1, self.attn = shape.normalization(), Attention(shape)
        self.ln_2, self.mlp = shape.normalization(), MLP(shape)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: Cache | None, layer: int
    ) -> Tensor:
        """Compute a layer. Shapes: as in `Attention`."""
        x = x + self.attn(self.ln_1(x), angles, mask, cache, layer)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder-only transformer whose parameters have the names of GPT-2's.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019; Touvron et al., "LLaMA", 2023.
    """

    fsdp_blocks = ("Block",)

    def __init__(  # noqa: PLR0913  (an argument for each key of the configuration)
        self,
        vocab_size: int,
        block_size: int,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 128,
        num_kv_heads: int | None = None,
        hidden: int | None = None,
        mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu",
        norm: Literal["layernorm", "rmsnorm"] = "layernorm",
        norm_eps: float = 1e-5,
        positions: Literal["learned", "rotary"] = "learned",
        rotary_base: float = 10_000.0,
        bias: bool = False,
        tied: bool = True,
        dropout: float = 0.0,
        conv1d: bool = False,
    ) -> None:
        """Build and initialize it, as GPT-2: normal weights, smaller ones where a layer adds to its input.

        Raises: RefusedError, if sizes do not fit together.
        """
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        _check_sizes(width, num_heads, num_kv_heads, positions)
        shape = Shape(
            width, num_heads, num_kv_heads, hidden or 4 * width, mlp, norm, norm_eps, bias, dropout,
            positions == "rotary", conv1d,
        )  # fmt: skip
        self.vocab_size, self.block_size, self.shape, self.rotary_base = vocab_size, block_size, shape, rotary_base
        self.wte = nn.Embedding(vocab_size, width)
        self.wpe = nn.Embedding(block_size, width) if positions == "learned" else None
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(shape) for _ in range(num_layers))
        self.ln_f = shape.normalization()
        self.lm_head = None if tied else nn.Linear(width, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02 / math.sqrt(2 * num_layers) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def tensor_plan(self) -> Sequence[Mapping[str, Any]]:
        """Return how the ranks of tensor parallelism divide the layers; a tied embedding every rank has whole."""
        shape = self.shape
        kv_width = shape.num_kv_heads * shape.head_width
        heads = {"multiple_of": shape.head_width}
        plan: list[Mapping[str, Any]] = [
            {"match": "h.*.attn.c_attn", "style": "colwise", "parts": (shape.width, kv_width, kv_width), **heads},
            {"match": "h.*.attn.c_proj", "style": "rowwise", **heads},
            {"match": "h.*.mlp.c_fc", "style": "colwise"},
            {"match": "h.*.mlp.c_proj", "style": "rowwise"},
        ]
        if shape.mlp == "swiglu":
            plan.append({"match": "h.*.mlp.c_gate", "style": "colwise"})
        if self.lm_head is not None:
            plan.append({"match": "wte", "style": "embedding_rowwise"})
            plan.append({"match": "lm_head", "style": "colwise_gather_output"})
        between = ("h.*.ln_1", "h.*.attn.resid_dropout", "h.*.ln_2", "h.*.mlp.dropout")
        return [
            *plan,
            {"match": "drop", "style": "sequence_begin"},
            {"match": between, "style": "sequence"},
            {"match": "ln_f", "style": "sequence_end"},
        ]

    @property
    def pipeline_layers(self) -> Sequence[Sequence[str]]:
        """Return the layers that the stages of a pipeline divide; a tied embedding is in the first and the last."""
        first = ("wte", "drop") if self.wpe is None else ("wte", "wpe", "drop")
        blocks = [(f"h.{number}",) for number in range(len(self.h))]
        return [first, *blocks, ("ln_f", "wte" if self.lm_head is None else "lm_head")]

    def forward(self, tokens: Tensor, documents: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Return the scores of the next token at each place.

        With `documents`, the number of each token's document, attention and positions begin anew with each. With
        `cache` the tokens follow those that are in it; add their number to it after the call.

        Shapes: tokens, documents (batch, tokens up to block_size) -> (batch, tokens, vocab_size).
        """
        return self.forward_layers(range(len(self.h) + 2), tokens, documents, cache)

    def forward_layers(
        self, layers: range, x: Tensor, documents: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Compute some of `pipeline_layers`. Shapes: x (batch, tokens) for the first, else (batch, tokens, width)."""
        begin = 0 if cache is None else cache.num_tokens
        places = torch.arange(begin, begin + x.shape[1], device=x.device)
        mask = None
        if documents is not None:
            new = documents.diff(prepend=documents[:, :1] - 1) != 0
            places = places - torch.where(new, places, 0).cummax(1)[0]
            causal = places.new_ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mask = ((documents[:, :, None] == documents[:, None]) & causal)[:, None]
        if 0 in layers:
            x = self.wte(x)
            if self.wpe is not None:
                x = x + self.wpe(places)
            x = self.drop(x)
        angles = self._angles(places) if self.wpe is None else None
        for layer, block in enumerate(self.h):
            if layer + 1 in layers:
                x = block(x, angles, mask, cache, layer)
        if len(self.h) + 1 in layers:
            x = self.ln_f(x)
            return functional.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)
        return x

    def _angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles by which places are rotated.

        Shapes: (tokens,) or (batch, tokens) -> ([batch, 1,] tokens, head_width / 2) each, float32.
        """
        width = self.shape.head_width
        exponents = torch.arange(0, width, 2, device=places.device, dtype=torch.float32) / width
        angles = places[..., None].float() * self.rotary_base**-exponents
        angles = angles if places.dim() == 1 else angles[:, None]
        return angles.cos(), angles.sin()

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, num_tokens: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
    ) -> Tensor:
        """Return tokens and what follows them, drawn one by one from a generator of its own.

        `temperature` divides the scores; 0 takes the most likely token. `top_k` leaves only that many to draw from.
        Shapes: (1, tokens) -> (1, tokens + num_tokens), int64.
        """
        generator = torch.Generator().manual_seed(seed)
        cache = Cache()
        new = tokens[:, -self.block_size :]
        for _ in range(num_tokens):
            if cache.num_tokens + new.shape[1] > self.block_size:  # places have moved: all change
                cache, new = Cache(), tokens[:, -self.block_size :]
            scores = self(new, cache=cache)[:, -1].float().cpu()
            cache.num_tokens += new.shape[1]
            new = _drawn(scores, temperature, top_k, generator).to(tokens.device)
            tokens = torch.cat((tokens, new), 1)
        return tokens


def _divided(joined: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Split what a layer has computed at once, of which this rank may have an equal share of each part."""
    ranks = sum(sizes) // joined.shape[-1]
    return torch.split(joined, [size // ranks for size in sizes], -1)


def _check_sizes(width: int, num_heads: int, num_kv_heads: int, positions: str) -> None:
    if width % num_heads:
        raise RefusedError(
            f"does not split over model.num_heads={num_heads}",
            key="model.width",
            value=width,
            suggestion="Use a multiple.",
        )
    if num_heads % num_kv_heads:
        raise RefusedError(
            f"does not split over model.num_kv_heads={num_kv_heads}",
            key="model.num_heads",
            value=num_heads,
            suggestion="Use a divisor.",
        )
    if positions == "rotary" and width // num_heads % 2:
        raise RefusedError(
            f"divided by model.num_heads={num_heads} is odd, and model.positions=rotary turns pairs",
            key="model.width",
            value=width,
            suggestion="Use an even width of heads.",
        )


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of one half and the other. Shapes: (batch, heads, tokens, head_width)."""
    one, other = x.chunk(2, -1)
    return torch.cat((one * cosine - other * sine, other * cosine + one * sine), -1).to(x.dtype)


def _drawn(scores: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Draw a token. Shapes: (batch, vocab_size) -> (batch, 1)."""
    if temperature == 0:
        return scores.argmax(1, keepdim=True)
    if top_k is not None and top_k < scores.shape[1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
    return torch.multinomial((scores / temperature).softmax(1), 1, generator=generator)


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of the next token, its perplexity, and a sample at each evaluation.

    `tokenizer` is the record of the data's; without it there are no samples. They begin with `sample_prompt`; None: a
    new line, or the first token where the text has none.
    """

    tokenizer: Mapping[str, Any] | None = None
    sample_tokens: int = 200
    sample_prompt: str | None = None
    sample_temperature: float = 0.8
    sample_top_k: int | None = 200

    def step(self, model: nn.Module, batch: Sequence[Tensor] | Mapping[str, Tensor]) -> Sums:
        """Return the sum over all tokens. Shapes: a batch is that of data=text."""
        count: int | Tensor
        if isinstance(batch, Mapping):
            targets, count = batch["targets"], batch["count"]
            scores = model(batch["inputs"], batch["documents"])
        else:
            inputs, targets = batch
            scores = model(inputs)
            # Only in evaluation are there targets that do not count; in training a number costs no reduction.
            count = targets.numel() if model.training else (targets != _IGNORED).sum()
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum")
        return loss, count, {}

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the perplexity over an evaluation set."""
        total, count = sums["loss"]
        return {"perplexity": math.exp(min(float(total) / float(count), 700.0))}

    def on_eval(self, model: GPT, batch: Any, logger: Logger, step: int) -> None:
        """Log what the model writes; the same random numbers each time."""
        if self.tokenizer is None or not self.sample_tokens:
            return
        prompt = torch.tensor([prompt_of(self._tokenizer, self.sample_prompt)], device=model.wte.weight.device)
        tokens = model.generate(prompt, self.sample_tokens, self.sample_temperature, self.sample_top_k)
        logger.text(f"sample/{step}", f"```\n{self._tokenizer.decode(tokens[0].tolist())}\n```")

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None
        return from_record(self.tokenizer)
