"""What the peers train, as a user's recipe: their models, and nothing but the loss."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import by_hand, common, gpt, on_device
from benchmarks.peers.job import EVERY, Job
from ddpexp.data.datasets import Arrays, Splits
from ddpexp.train.callbacks.base import Callback, RunView

BY_HAND = ("by hand", "by hand again")


def model(name: str) -> nn.Module:
    """Build the peers' model, with their weights."""
    return common.model(name)


class Loss:
    """Cross entropy alone, as in the peers' loops."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over the batch. Shapes: images (batch, 1, 28, 28), labels (batch,)."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="sum"), len(labels), {}


class Turns(Loss):
    """The same, and before or after every block of steps, as chance has it, as many of a hand-written loop.

    In one process both get the same share of a machine whose speed drifts. In a fixed order one of them would always
    find what the other leaves in the caches. Alone: one worker.
    """

    def __init__(self, by_hand: Iterator[None], folder: str, block: int, micro_batches: int = 1) -> None:
        """Take the other loop, which yields after each step, and how many steps a block has.

        The times go into the folder: of both loops, and of the host's work in both.
        """
        self._by_hand, self._block, self._calls = by_hand, block, 0
        self._micro_batches, self._file = micro_batches, Path(folder) / "blocks.jsonl"
        self._order = random.Random(0)
        self._theirs: tuple[float, float] | None = None  # of the block beside ours, if it came first
        self._began = 0.0

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over the batch, after a block of the other loop where it is its turn. Shapes: as in `Loss`."""
        self.take_turn()
        return super().step(model, batch)

    def take_turn(self) -> None:
        """Take a block of the other loop, if it is its turn."""
        if self._calls % (self._block * self._micro_batches) == 0:
            if self._calls:
                self._end_pair()
            else:
                self._run_block()  # the first one counts nowhere
            if self._order.random() < 0.5:
                self._theirs = self._run_block()
            self._began = _now()
        self._calls += 1

    def _end_pair(self) -> None:
        """Write the times of a block of each loop, of a step of the device and of the host."""
        host, end = time.perf_counter(), _now()
        mine = end - self._began, host - self._began
        theirs = self._theirs or self._run_block()
        self._theirs = None
        if theirs is not None:
            seconds = mine[0], theirs[0], mine[1], theirs[1]
            with self._file.open("a") as file:
                print(json.dumps([one / self._block for one in seconds]), file=file)

    def _run_block(self) -> tuple[float, float] | None:
        """Take a block of the other loop, as if this task's autocast were not around it.

        Return how long the device and the host have taken; None if the loop has come to its end.
        """
        done, begin = 0, _now()
        with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", enabled=False):
            for _ in islice(self._by_hand, self._block):
                torch.clear_autocast_cache()  # as at the end of its own autocast: the weights have changed
                done += 1
        host = time.perf_counter()
        return (_now() - begin, host - begin) if done == self._block else None


class Launches(Loss):
    """The same, and what the host asks of the device in a few steps: launches, copies, waits."""

    def __init__(self, file: str, begin: int, steps: int) -> None:
        """Take the file for the counts of one step, and which steps are watched."""
        self._file, self._begin, self._steps, self._calls = Path(file), begin, steps, 0
        self._profiler: Any = None

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over the batch. Shapes: as in `Loss`."""
        if self._calls == self._begin:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        if self._calls == self._begin + self._steps:
            self._profiler.stop()
            names = [event.name for event in self._profiler.events()]
            kinds = {"operations": "aten::", "launches": "cuLaunchKernel", "copies": "cudaMemcpyAsync",
                     "waits": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")}  # fmt: skip
            names = [name.replace("cudaLaunchKernel", "cuLaunchKernel") for name in names]
            counts = {kind: sum(name.startswith(begin) for name in names) for kind, begin in kinds.items()}
            self._file.write_text(json.dumps({kind: count / self._steps for kind, count in counts.items()}))
        self._calls += 1
        return super().step(model, batch)


class InTurn(Turns):
    """In turn with the peers' loop by hand."""

    def __init__(self, data: str, order: str, folder: str, model: str, block: int) -> None:
        """Take what that loop's program is told, and how many steps a block has."""
        job = Job(data, order, folder, model, 1)
        network = job.network()
        super().__init__(by_hand.steps(job, 0, network, network, lambda: None, None), folder, block)


class InTurnOnDevice(Turns):
    """In turn with the loop by hand that has its samples on the device."""

    def __init__(
        self,
        data: str,
        order: str,
        folder: str,
        model: str,
        block: int,
        channels_last: bool,
        compiles: bool = True,
        every: int = EVERY,
        precision: str = "bf16",
    ) -> None:
        """Take where data and order are, how many steps a block has, and from one record to the next."""
        where = (Path(data), Path(order), Path(folder))
        super().__init__(on_device.steps(*where, model, channels_last, compiles, every, precision), folder, block)


class Blocks(Callback):
    """Blocks of steps of this run, and as many of a hand-written loop and of the same once more, in a random order.

    Alone: one worker. The CPU time of each block goes into a file, so that other programs of the machine count little.
    """

    def __init__(self, folder: str, block: int) -> None:
        """Take the folder for the times, and how many steps a block has."""
        self._folder, self._block, self._count = Path(folder), block, 0
        # Which one is made first is left to chance: where the memory of each is makes a difference, too.
        names = random.sample(BY_HAND, len(BY_HAND))
        self._loops = {name: self.by_hand(self._folder / name) for name in names}
        self._order = self._shuffled()
        self._began = 0.0

    def by_hand(self, folder: Path) -> Iterator[None]:
        """Return the loop, which leaves its records in a folder."""
        raise NotImplementedError

    def on_step(self, run: RunView) -> None:
        """Take the other loops' blocks where they come next."""
        self._count += 1
        if self._count % self._block:
            return
        self._note("ddpexp", time.process_time() - self._began)
        while (name := next(self._order)) != "ddpexp":
            began = time.process_time()
            if sum(1 for _ in islice(self._loops[name], self._block)) == self._block:
                self._note(name, time.process_time() - began)
        self._began = time.process_time()

    def _shuffled(self) -> Iterator[str]:
        draw = random.Random(0)
        while True:
            yield from draw.sample(("ddpexp", *BY_HAND), 1 + len(BY_HAND))

    def _note(self, name: str, seconds: float) -> None:
        with (self._folder / "blocks.jsonl").open("a") as file:
            print(json.dumps([name, seconds / self._block]), file=file)


class ImageBlocks(Blocks):
    """Blocks of the peers' loop by hand."""

    def __init__(self, data: str, order: str, folder: str, model: str, block: int) -> None:
        """Take what that loop's program is told, and how many steps a block has."""
        self._told = data, order, model
        super().__init__(folder, block)

    def by_hand(self, folder: Path) -> Iterator[None]:
        """Return the loop."""
        data, order, model = self._told
        job = Job(data, order, str(folder), model, 1)
        network = job.network()
        return by_hand.steps(job, 0, network, network, lambda: None, None)


class TokenBlocks(Blocks):
    """Blocks of the GPT's loop by hand, in fp32 and without compilation."""

    def __init__(self, order: str, folder: str, size: str, samples: int, block: int) -> None:
        """Take the order, what model and data are, and how many steps a block has."""
        self._told = Path(order), size, samples
        super().__init__(folder, block)

    def by_hand(self, folder: Path) -> Iterator[None]:
        """Return the loop."""
        order, size, samples = self._told
        return gpt.steps(order, folder, size, samples, EVERY, lowers=False)


class NextToken:
    """Cross entropy of the next token, as in the loop by hand."""

    def step(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over all tokens. Shapes: (batch, context + 1)."""
        return gpt.loss_of(model, batch, "sum"), batch[:, 1:].numel(), {}


class NextTokenInTurn(NextToken):
    """In turn with the GPT's loop by hand."""

    def __init__(
        self,
        order: str,
        folder: str,
        block: int,
        size: str,
        samples: int,
        every: int,
        micro_batches: int,
        clip: float | None,
        compiles: bool,
    ) -> None:
        """Take the order, the folder for the times, what model and data are, and how the loop by hand trains."""
        by_hand = gpt.steps(Path(order), Path(folder), size, samples, every, micro_batches, clip, compiles)
        self._turns = Turns(by_hand, folder, block, micro_batches)

    def step(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over all tokens, after a block of the other loop where it is its turn. Shapes: as above."""
        self._turns.take_turn()
        return super().step(model, batch)


def language_model(size: str) -> nn.Module:
    """Build the GPT of a loop by hand, with its weights."""
    return gpt.model(size)


def tokens(size: str, samples: int) -> Splits:
    """Return random tokens, some more frequent than others: something to learn."""
    return Splits(train=Arrays([gpt.tokens(size, samples)], lambda rows: rows.long()), evals={})


class Wide(nn.Module):
    """Many parameters and little to compute: what a checkpoint of it costs is not hidden behind the step."""

    def __init__(self, millions: float) -> None:
        """Make square layers of up to 67 million weights each."""
        super().__init__()
        count = math.ceil(millions * 1e6 / 8192**2)
        width = int((millions * 1e6 / count) ** 0.5)
        self.first, self.last = nn.Linear(784, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, images: Tensor) -> Tensor:
        """Return scores. Shapes: (batch, 1, 28, 28) to (batch, 10)."""
        values: Tensor = self.first(images.flatten(1))
        for layer in self.layers:
            values = values + layer(values)
        return self.last(values)  # type: ignore[no-any-return]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
