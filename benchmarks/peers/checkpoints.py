"""A DDP loop that saves in one of several ways: what a save costs the training.

Run by torchrun; prints JSON on rank zero. `--way none|torch_save|dcp_async|ddpexp`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.distributed.world import World

SIZES = {25: (784, 4096, 4096, 1024), 100: (784, 8192, 8192, 3072)}  # millions of parameters: layers


def main() -> None:
    """Train for some steps and save on the way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--millions", type=int, default=25)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    words = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(SIZES[words.millions], SIZES[words.millions][1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    bare = nn.Sequential(*layers)
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    rows, labels = torch.randn(8, SIZES[words.millions][0]), torch.randint(0, 1000, (8,))
    save, finish = saver(words.way, bare, optimizer, words.folder)
    stalls: list[float] = []
    steps: list[float] = []
    begin = time.perf_counter()
    for step in range(1, words.steps + words.every + 1):
        if step == words.every + 1:  # the first round warms everything up, its save too
            dist.barrier()
            stalls.clear()
            steps.clear()
            begin = time.perf_counter()
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        end = time.perf_counter()
        steps.append(end - start)
        if step % words.every == 0 and words.way != "none":
            dist.barrier()  # so that a rank that comes late is no stall
            end = time.perf_counter()
            save(step)
            stalls.append(time.perf_counter() - end)
    dist.barrier()
    seconds = time.perf_counter() - begin
    finish()
    worst = torch.tensor(stalls or [0.0])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        figures = {"stall": statistics.median(worst.tolist()), "seconds": seconds, "step": statistics.median(steps)}
        print(json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)


def saver(way: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    """Return what saves at a step, and what waits for the last save.

    Each writes durably and under a name that is whole.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def torch_save(step: int) -> None:
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / ".partial"
            with temporary.open("wb") as file:
                torch.save(state(), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, folder / "checkpoint.pt")
        dist.barrier()

    if way == "none":
        return None, lambda: None
    if way == "torch_save":
        return torch_save, lambda: None
    if way == "dcp_async":
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import async_save

        pending: list[Any] = []
        own = dist.new_group(
            backend="gloo"
        )  # on the training's own group its collectives and DDP's would wait for each other

        def dcp_async(step: int) -> None:
            finish()
            weights, moments = get_state_dict(model, optimizer)
            saved = {"model": weights, "optimizer": moments}
            pending.append(async_save(saved, checkpoint_id=str(folder / str(step)), process_group=own))

        def finish() -> None:
            while pending:
                pending.pop().result()
                for old in sorted(folder.iterdir(), key=lambda path: int(path.name))[:-2] if rank == 0 else ():
                    shutil.rmtree(old)

        return dcp_async, finish
    world = World(rank, rank, 0, size, size, torch.device("cpu"))
    writer = Writer(folder, world)

    def ddpexp(step: int) -> None:
        writer.save(step, Content({"model": model.state_dict()}, {"optimizer": optimizer.state_dict()}))

    return ddpexp, lambda: writer.wait(end=True)


if __name__ == "__main__":
    main()
