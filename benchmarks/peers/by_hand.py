"""The best hand-written loop we know for the races' job: alone, under torchrun, or with torch's mp.spawn."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.common import Report
from benchmarks.peers.job import EVERY, Job, Whole, parser


def main() -> None:
    """Train as one rank, or start the ranks."""
    typed = parser()
    typed.add_argument("--reduce", choices=["ddp", "tuned", "flat", "shared", "none"], default="tuned")
    typed.add_argument("--spawn", action="store_true", help="start the ranks with mp.spawn, as the tutorials do")
    typed.add_argument("--threads", type=int, default=1, help="of a rank; 0 leaves torch's own number")
    words = typed.parse_args()
    if words.spawn:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        torch.multiprocessing.spawn(run, (words,), words.workers)  # type: ignore[attr-defined, no-untyped-call]
    else:
        run(int(os.environ.get("RANK", "0")), words)


def run(rank: int, words: argparse.Namespace) -> None:
    """Train as one rank."""
    if words.threads:
        torch.set_num_threads(words.threads)
    job = Job(words.data, words.order, words.folder, words.model, words.workers)
    network = job.network()
    if job.workers > 1:
        dist.init_process_group("gloo", rank=rank, world_size=job.workers)
    called, reduce, clear = reduction(network, words.reduce, rank, job.workers)
    report = Report()
    for _ in steps(job, rank, network, called, reduce, clear):
        report.step()
    if rank == 0:
        job.keep(network, report)
    if job.workers > 1:
        dist.barrier()
        dist.destroy_process_group()


def steps(
    job: Job,
    rank: int,
    network: nn.Module,
    called: nn.Module,
    reduce: Callable[[], None],
    clear: Callable[[], None] | None,
) -> Iterator[None]:
    """Take every step of the order, and yield after each."""
    data, optimizer, loss_of = Whole(job.data), job.optimizer(network), nn.CrossEntropyLoss()
    clear = clear or optimizer.zero_grad
    writer = None
    if rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(job.folder)
    for step, rows in enumerate(job.rows(rank), start=1):
        images, labels = data[rows]
        loss = loss_of(called(images), labels)
        loss.backward()
        reduce()
        optimizer.step()
        clear()
        if writer is not None and step % EVERY == 0:
            writer.add_scalar("loss", loss.item(), step)
        yield
    if writer is not None:
        writer.close()  # its thread in the interpreter's end aborts the process now and then


def reduction(
    network: nn.Module, how: str, rank: int, workers: int
) -> tuple[nn.Module, Callable[[], None], Callable[[], None] | None]:
    """Return what to call, what reduces after backward, and what clears the gradients if it is not the optimizer."""
    if workers == 1 or how == "none":
        return network, lambda: None, None
    if how == "flat":
        return network, *flat(network, workers)
    if how == "ddp":
        return DistributedDataParallel(network), lambda: None, None
    if how == "tuned":
        return DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=True), lambda: None, None
    return network, shared(network, rank, workers), None


def shared(network: nn.Module, rank: int, workers: int) -> Callable[[], None]:
    """Return ddpexp's own reduction through shared memory, called by hand."""
    from ddpexp.distributed.world import World
    from ddpexp.strategy.bucket import Bucket
    from ddpexp.strategy.comm.reduce import SharedMemoryReducer, reducer_for
    from ddpexp.strategy.ddp_options import DDPOptions

    world = World(rank, rank, 0, workers, workers, torch.device("cpu"))
    options = DDPOptions("ddp", False, False, True, 25, True, "shared_memory", "none", 1, False)
    reducer = reducer_for(list(network.parameters()), options, world)
    assert isinstance(reducer, SharedMemoryReducer)
    bucket = Bucket(dict(network.named_parameters()), reducer, world)
    bucket.last = True

    @torch.no_grad()
    def reduce() -> None:
        bucket.fill()
        reducer.finish()
        bucket.assign()

    return reduce


def flat(network: nn.Module, workers: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make every gradient a part of one tensor; return what reduces that, and what clears it."""
    parameters = list(network.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    whole = torch.zeros(sum(sizes))
    for parameter, part in zip(parameters, torch.split(whole, sizes), strict=True):
        parameter.grad = part.view_as(parameter)

    def reduce() -> None:
        dist.all_reduce(whole)
        whole.div_(workers)

    def clear() -> None:
        whole.zero_()

    return reduce, clear


if __name__ == "__main__":
    main()
