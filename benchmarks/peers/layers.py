"""A small decoder whose layers are divided among workers with torch's own tools: its pipelines, and tensor parallelism.

Each generator takes steps of a loop by hand and yields after each, on all ranks of the default process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

WORDS, CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 128, 4, 8
BATCH, MICRO_BATCHES, RATE, SAMPLES = 16, 8, 1e-3, 4096
SCHEDULES: Mapping[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}


class Layer(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.before_attention, self.before_hidden = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute. Shapes: (batch, context, width) to the same; of heads there may be a part."""
        normal = self.before_attention(x)
        parts = [project(normal) for project in (self.query, self.key, self.value)]
        heads = [part.view(*part.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for part in parts]
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.before_hidden(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Scores of the next token. Shapes: (batch, context) to (batch, context, words)."""

    tensor_plan = (
        {"match": ("*.query", "*.key", "*.value"), "style": "colwise", "multiple_of": WIDTH // HEADS},
        {"match": "*.out", "style": "rowwise", "multiple_of": WIDTH // HEADS},
        {"match": "*.up", "style": "colwise"},
        {"match": "*.down", "style": "rowwise"},
    )

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    @property
    def pipeline_layers(self) -> Sequence[Sequence[str]]:
        """Return the layers that a pipeline divides: as many blocks for each stage."""
        blocks = [[f"layers.{number}"] for number in range(LAYERS)]
        return [["words", "places", *blocks[0]], *blocks[1:-1], [*blocks[-1], "norm", "head"]]

    def forward_layers(self, layers: range, x: Tensor) -> Tensor:
        """Compute some of them."""
        if 0 in layers:
            x = self.words(x) + self.places(torch.arange(x.shape[1]))
        for number in layers:
            x = self.layers[number](x)
        return self.head(self.norm(x)) if LAYERS - 1 in layers else x

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute all."""
        return self.forward_layers(range(LAYERS), tokens)


@dataclass
class Loss:
    """The mean loss of the last step, which one rank has."""

    value: float = math.nan


def model() -> Decoder:
    """Build it; the same weights every time."""
    torch.manual_seed(0)
    return Decoder()


def tokens() -> Tensor:
    """Return random tokens, some more frequent than others. Shapes: (samples, context + 1), int64."""
    drawn = WORDS * np.random.default_rng(0).random((SAMPLES, CONTEXT + 1)) ** 4
    return torch.from_numpy(drawn.astype(np.int64))


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    data = tokens()
    generator = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(SAMPLES, generator=generator).view(-1, BATCH):
            batch = data[rows]
            yield batch[:, :-1], batch[:, 1:]


class Part(nn.Module):
    """Some layers of the decoder."""

    def __init__(self, whole: Decoder, layers: range) -> None:
        """Keep their modules."""
        super().__init__()
        self.layers = nn.ModuleDict({str(number): whole.layers[number] for number in layers})
        self.before = nn.ModuleDict({"words": whole.words, "places": whole.places} if layers[0] == 0 else {})
        self.behind = nn.Sequential(whole.norm, whole.head) if layers[-1] == LAYERS - 1 else nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        """Compute them."""
        if len(self.before):
            x = self.before["words"](x) + self.before["places"](torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return self.behind(x)  # type: ignore[no-any-return]


def pipeline_steps(schedule: str, stages_per_rank: int, loss: Loss) -> Iterator[None]:
    """Train in a pipeline of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    number = size * stages_per_rank
    stages = []
    for stage in range(rank, number, size):
        part = Part(model(), range(stage * LAYERS // number, (stage + 1) * LAYERS // number))
        stages.append(PipelineStage(part, stage, number, torch.device("cpu")))
    made = SCHEDULES[schedule](stages if stages_per_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for one in stages for p in one.submod.parameters()], RATE)
    for inputs, targets in _batches():
        losses: list[Tensor] = []
        first = (inputs,) if rank == 0 else ()
        last = {"target": targets, "losses": losses} if rank == size - 1 else {}
        made.step(*first, **last)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            loss.value = torch.stack(losses).mean().item()
        yield


def tensor_steps(loss: Loss) -> Iterator[None]:
    """Train with all ranks as one tensor group."""
    mesh, network = init_device_mesh("cpu", (dist.get_world_size(),)), model()
    styles = {"query": ColwiseParallel, "key": ColwiseParallel, "value": ColwiseParallel, "out": RowwiseParallel}
    styles |= {"up": ColwiseParallel, "down": RowwiseParallel}
    plan = {f"layers.{number}.{name}": style() for number in range(LAYERS) for name, style in styles.items()}
    parallelize_module(network, mesh, plan)
    # Ordinary and distributed parameters do not mix in one call of a foreach optimizer.
    divided = [p for name, p in network.named_parameters() if name.rpartition(".")[0] in plan]
    others = [p for name, p in network.named_parameters() if name.rpartition(".")[0] not in plan]
    optimizer = torch.optim.AdamW([{"params": divided}, {"params": others}], RATE)
    for inputs, targets in _batches():
        found = loss_of(network(inputs), targets)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        loss.value = found.item()
        yield
