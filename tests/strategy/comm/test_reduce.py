"""Gradients of CPU workers: summed in the order of the ranks through memory and through gloo, by real processes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ddpexp.errors import Failure, RefusedError, WorkerError
from ddpexp.launch import WorkerRequest
from ddpexp.launch.launchers.local import Spawn
from tests.conftest import OWN_SERVER, Ddpexp, calling, finish
from tests.points import Recipe, session

WORKER = """\
import ctypes
import dataclasses
import functools
import itertools
import logging
import os
import random
import signal
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpexp.compat import lazy_dynamo
from ddpexp.errors import DdpexpError, PeerError
from ddpexp.launch import Layout
from ddpexp.train.process import run_rank
from ddpexp.strategy.comm import reduce
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.comm.reduce import BackendReducer, SharedMemoryReducer
from ddpexp.strategy.comm.shared_memory import share
from ddpexp.distributed.world import World

OPTIONS = DDPOptions(
    kind="ddp", find_unused_parameters=False, static_graph=False, gradient_as_bucket_view=True, bucket_cap_mb=25,
    broadcast_buffers=True, reduce_through="auto", comm_hook="none", powersgd_rank=1, sync_batchnorm=False,
)
THROUGH = ("shared_memory", "backend")
CAPS = (25, 0.00001)  # a bucket of ours for a small model, and many of DDP's
LARGE, SMALL = (7, 300, 1, 140_001, 300_000), (7, 300, 1, 14_001, 500)  # for DDP's buckets, and for one of ours
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def main(case, size):
    def work(control):
        lazy_dynamo.defer()
        torch.set_num_threads(1)
        world = World.join(Layout(1, int(size), "cpu", "gloo", 1))
        globals()[case](world)
        world.barrier()

    return run_rank(work)


def options(**changed):
    return dataclasses.replace(OPTIONS, **changed)


def wide(seed, length, dtype):
    # Numbers of all magnitudes, so that the order of a sum decides its last bits.
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-3, 4, (length,), generator=generator)
    return (torch.randn(length, generator=generator) * 10.0**powers).to(dtype)


def mean(parts):
    # By hand, in the order given; 16 bits are rounded once, at the end.
    small = parts[0].dtype in (torch.float16, torch.bfloat16)
    parts = [part.float() if small else part / len(parts) for part in parts]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(parts) if small else total


class Values(nn.Module):
    # Parameters whose gradient is whatever the forward pass is given.
    def __init__(self, dtype, sizes):
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes])

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.all, gradients))


def order(world):
    # The sum is ((g0 + g1) + g2) + ..., however the parameters lie in buckets and whatever brings the gradients
    # together.
    size = world.world_size
    for dtype in DTYPES:
        for through in THROUGH:
            for cap, sizes in itertools.product((25, 0.3, 0.0001), (LARGE, SMALL)):
                model = DDP(options(reduce_through=through, bucket_cap_mb=cap), world, lambda: Values(dtype, sizes))
                for step in range(3):  # DDP makes other buckets after the first
                    given = [[wide(1000 * step + 10 * rank + i, p.numel(), dtype) for i, p in enumerate(model.modules["model"].all)]
                             for rank in range(size)]
                    with model.micro_batch(last=True):
                        model.train_model(given[world.rank]).backward()
                    for place, parameter in enumerate(model.modules["model"].all):
                        parts = [gradients[place] for gradients in given]
                        expected = mean(parts).to(dtype)
                        assert torch.equal(parameter.grad, expected), (dtype, through, cap, step, place)
                        if size > 2 and dtype in DTYPES[:2] and len(expected) > (10_000 if dtype == torch.float32 else 100_000):
                            assert not torch.equal(mean(parts[::-1]), expected)  # the comparison can fail
                    model.clear_gradient()


def plain(world):
    # Two ranks: the bits of torch's own reduction.
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 3))

    def trained(model, micro_batch=nullcontext):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(12):
            rows = wide(2 * step + world.rank, 160, torch.float32).view(8, 20)
            with micro_batch(True):
                model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return nn.utils.parameters_to_vector(model.parameters())

    expected = trained(DistributedDataParallel(net(), bucket_cap_mb=0.001))
    for through in THROUGH:
        for cap in (25, 0.001):
            model = DDP(options(reduce_through=through, bucket_cap_mb=cap), world, net)
            assert torch.equal(trained(model.train_model, model.micro_batch), expected), (through, cap)


def reducers(world):
    # What carries what: memory where it can, else gloo, and DDP alone where the order is no question.
    parameter = [torch.zeros(5)]
    assert isinstance(reduce.reducer_for(parameter, OPTIONS, world), SharedMemoryReducer)
    through_backend = reduce.reducer_for(parameter, options(reduce_through="backend"), world)
    assert (type(through_backend) is BackendReducer) == (world.world_size > 2)
    elsewhere = dataclasses.replace(world, local_world_size=world.world_size - 1)
    assert not isinstance(reduce.reducer_for(parameter, OPTIONS, elsewhere), SharedMemoryReducer)
    huge = [torch.empty(10**12, device="meta")]
    memory = reduce.reducer_for(huge, OPTIONS, world).memory
    assert memory.slot_bytes == 1 << 20
    small = reduce.reducer_for(parameter, OPTIONS, world).memory
    assert small.slot_bytes == 4096


def stress(world):
    # Thousands of small sums, the ranks out of step with one another: a store that is seen late would be a wrong sum.
    memory = share(world, 4096)
    reducer = SharedMemoryReducer(memory, world)
    common, own = random.Random(0), random.Random(world.rank)
    for number in range(2000):
        expected, given = [], []
        for piece in range(common.randint(1, 3)):
            length, dtype = common.randint(1, 400), common.choice(DTYPES)
            parts = [wide(7 * number + 3 * rank + piece, length, dtype) for rank in range(world.world_size)]
            expected.append(mean(parts).to(dtype))
            given.append(parts[world.rank])
        if own.random() < 0.02:
            time.sleep(own.random() * 0.006)  # longer than a peer stays awake
        for gradient in given:
            reducer.add(gradient)
        reducer.finish()
        assert all(torch.equal(found, right) for found, right in zip(given, expected)), number
        if common.random() < 0.3:  # a record between two steps, of any length
            columns = common.randint(1, 1500)
            parts = [wide(11 * number + rank, columns, torch.float64) for rank in range(world.world_size)]
            total = dataclasses.replace(world, memory=memory).sum(parts[world.rank].view(1, -1))
            again = [wide(11 * number + rank, columns, torch.float64) for rank in range(world.world_size)]
            assert torch.equal(total[0], functools.reduce(torch.add, again)), number


def sparse(world):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))

    def gradients(model, rank):
        rows, factors = torch.tensor([[rank, 3], [4 + rank, 3]]), wide(rank, 4, torch.float32).view(2, 2)
        (model(rows) * factors).sum().backward()
        return model

    parts = [[p.grad.to_dense() for p in gradients(net(), rank).parameters()] for rank in range(world.world_size)]
    for through, cap in itertools.product(THROUGH, CAPS):
        model = DDP(options(reduce_through=through, bucket_cap_mb=cap), world, net)
        with model.micro_batch(last=True):
            gradients(model.train_model, world.rank)
        for place, parameter in enumerate(model.parameters()):
            assert parameter.grad.is_sparse == (place == 0)
            assert torch.equal(parameter.grad.to_dense(), mean([part[place] for part in parts])), (through, place)


def two_models(world):
    # One backward pass through two models, whose buckets come in between one another.
    for through, cap in itertools.product(THROUGH, CAPS):
        def pair():
            torch.manual_seed(0)
            return {"one": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "two": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))}

        model = DDP(options(reduce_through=through, bucket_cap_mb=cap), world, pair)
        for step in range(3):
            rows = wide(step + 10 * world.rank, 8, torch.float32).view(2, 4)
            with model.micro_batch(last=True):
                (model.train_model["one"](rows).sum() * model.train_model["two"](rows).sum()).backward()
            mine = torch.cat([p.grad.flatten() for p in model.parameters()])
            alone = pair()
            parts = []
            for rank in range(world.world_size):
                rows = wide(step + 10 * rank, 8, torch.float32).view(2, 4)
                (alone["one"](rows).sum() * alone["two"](rows).sum()).backward()
                parts.append(torch.cat([p.grad.flatten() for m in alone.values() for p in m.parameters()]))
                for m in alone.values():
                    m.zero_grad()
            assert torch.equal(mine, mean(parts)), (through, step)
            model.clear_gradient()


def new(world):
    # What backward has made since the last sum is summed, and nothing else is touched.
    size = world.world_size

    def pair():
        torch.manual_seed(0)
        return {"one": nn.Linear(3, 2), "two": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))}

    def backward(model, number, rank):
        model(wide(10 * number + rank, 12, torch.float32).view(4, 3)).sum().backward()

    def gradients(model):
        return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()

    def expected(name, *numbers):
        parts = []
        for rank in range(size):
            alone = pair()[name]
            for number in numbers:
                backward(alone, number, rank)
            parts.append(gradients(alone))
        return mean(parts)

    model = DDP(OPTIONS, world, pair)
    assert len(model._buckets) == 2
    one, two = model.train_model["one"], model.train_model["two"]
    for number in range(3):  # micro-batches of one step
        with model.micro_batch(last=number == 2):
            backward(one, number, world.rank)
    first = expected("one", 0, 1, 2)
    assert torch.equal(gradients(one), first)
    with model.micro_batch(last=True):  # another loss: the first model's gradient stays as it is
        backward(two, 3, world.rank)
    assert torch.equal(gradients(one), first)
    assert torch.equal(gradients(two), expected("two", 3))
    with model.micro_batch(last=False):  # on top of what is summed already
        backward(two, 4, world.rank)
    with model.micro_batch(last=True):
        pass
    both = mean([expected("two", 3) + own for own in (expected_of(pair, backward, gradients, 4, rank) for rank in range(size))])
    assert torch.allclose(gradients(two), both, rtol=1e-5, atol=1e-6)
    assert len({p.grad.untyped_storage().data_ptr() for p in two.parameters()}) == 1
    for p in two.parameters():
        p.grad.zero_()  # as zero_grad(set_to_none=False)
    with model.micro_batch(last=True):
        backward(two, 5, world.rank)
    assert torch.equal(gradients(two), expected("two", 5))
    model.clear_gradient()
    two[0].requires_grad_(False)  # frozen on the way
    with model.micro_batch(last=True):
        backward(two, 6, world.rank)
    assert [p.grad is None for p in two.parameters()] == [True, True, False, False]
    parts = []
    for rank in range(size):
        alone = pair()["two"]
        backward(alone, 6, rank)
        parts.append(alone[1].weight.grad)
    assert torch.equal(two[1].weight.grad, mean(parts))
    model.clear_gradient()
    with model.micro_batch(last=True):  # nothing at all
        pass
    assert all(p.grad is None for p in model.parameters())


def expected_of(pair, backward, gradients, number, rank):
    alone = pair()["two"]
    backward(alone, number, rank)
    return gradients(alone)


def buffers(world):
    # Rank zero's statistics come when DDP's do: at the begin of each step, and after an evaluation's pass not again.
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def trained(cap):
        model, found = DDP(options(bucket_cap_mb=cap), world, net), []
        assert bool(model._buckets) == (cap == 25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            for number in range(1 + step % 3):
                torch.manual_seed(100 * step + 10 * number + world.rank)
                rows = wide(7 * step + 3 * number + world.rank, 32, torch.float32).view(8, 4)
                with model.micro_batch(last=number == step % 3):
                    model.train_model(rows).square().mean().backward()
                found += [buffer.clone() for buffer in model.modules["model"].buffers()]
            optimizer.step()
            model.clear_gradient()
            if step == 3:
                with torch.no_grad():
                    model.train_model(torch.ones(3, 4))
                with model.evaluation() as bare:
                    assert torch.equal(world.sum(bare[1].running_mean.clone()) / world.world_size, bare[1].running_mean)
        return [*found, *(p.detach() for p in model.parameters())]

    for one, other in zip(trained(25), trained(0.00001), strict=True):
        assert torch.equal(one, other)
    apart = DDP(options(broadcast_buffers=False), world, net)
    assert type(apart.train_model) is nn.Sequential
    assert len(apart.local_buffers()) == 6


def outside(world):
    model = DDP(OPTIONS, world, lambda: nn.Linear(2, 2))
    with model.evaluation() as bare:  # where each rank looks at what it likes
        bare(torch.ones(1, 2)).sum().backward()
    model.clear_gradient()
    model.train_model(torch.ones(1, 2)).sum().backward()


def other_model(world):
    DDP(OPTIONS, world, lambda: nn.Linear(2, 2 + world.rank))


class Interrupted(BaseException):
    pass


def interrupt(world):
    # A signal's exception ends the wait for a peer at once, and comes out of backward as it is.
    model = DDP(OPTIONS, world, lambda: nn.Linear(2, 2))
    if world.rank == 1:
        time.sleep(600)

    def handler(*_):
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with model.micro_batch(last=True):
            model.train_model(torch.ones(1, 2)).sum().backward()
    except Interrupted:
        raise DdpexpError("interrupted in time") from None
    raise AssertionError("nothing happened")


def stopped(world):
    world = dataclasses.replace(world, timeout_seconds=4)
    model = DDP(OPTIONS, world, lambda: nn.Linear(2, 2))
    for step in range(3):
        if step == 2 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with model.micro_batch(last=True):
            model.train_model(torch.ones(1, 2)).sum().backward()


def different(world):
    # A rank that trains something else must not be summed with the others.
    ranks_own = nn.Linear(2, 2) if world.rank else nn.Linear(2, 3)
    reducer = reduce.reducer_for([torch.zeros(100)], OPTIONS, world)
    reducer.add(torch.cat([p.detach().flatten() for p in ranks_own.parameters()]).repeat(20))
    reducer.finish()


def without_capability():
    # A root user's process may look into every other one; take that away from this process, if it is root's.
    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    header, data = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(ctypes.byref(header), data) == 0
    for word in (0, 1):
        data[word] &= ~(1 << 19)  # CAP_SYS_PTRACE, effective and permitted
    assert libc.capset(ctypes.byref(header), data) == 0


def hide(world):
    if world.rank == 0:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: only root may look into this process now
    if world.rank == 1:
        without_capability()


def fallback(world):
    warnings = []

    class Keep(logging.Handler):
        def emit(self, record):
            warnings.append(record.getMessage())

    logging.getLogger("ddpexp").addHandler(Keep())
    hide(world)
    reducer = reduce.reducer_for([torch.zeros(100)], OPTIONS, world)
    assert type(reducer) is BackendReducer, reducer  # on every rank, also on those that could have mapped it
    gradient = torch.full((10,), float(world.rank))
    reducer.add(gradient)
    reducer.finish()
    assert torch.equal(gradient, mean([torch.full((10,), float(rank)) for rank in range(world.world_size)]))
    assert len(warnings) == (world.rank == 0)
    for text in warnings:
        assert "rank 1: [Errno 13] Permission denied: '/proc/" in text, text


def impossible(world):
    hide(world)
    DDP(options(reduce_through="shared_memory"), world, lambda: nn.Linear(2, 2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_servers: None) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/reduces.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path / "code")
    return tmp_path


def run(folder: Path, case: str, size: int) -> None:
    Spawn().launch(calling("reduces:main", [case, str(size)], folder / "logs", WorkerRequest(gpus=size)))


def works(folder: Path, case: str, size: int) -> None:
    try:
        run(folder, case, size)
    except WorkerError as error:
        pytest.fail(f"{error.failure.message}\n{error.failure.traceback}")


def fails(folder: Path, case: str, size: int) -> Failure:
    with pytest.raises(WorkerError) as caught:
        run(folder, case, size)
    return caught.value.failure


@pytest.mark.variants(1)
@pytest.mark.parametrize("size", [3, 2, 4])
def test_gradients_are_summed_in_the_order_of_the_ranks(folder: Path, size: int) -> None:
    works(folder, "order", size)


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    ("case", "size"),
    [("sparse", 3), ("two_models", 3), ("buffers", 2), ("plain", 2), ("reducers", 2), ("reducers", 3)],
)
def test_it_carries(folder: Path, case: str, size: int) -> None:
    works(folder, case, size)


def test_only_what_backward_has_made_since_the_last_sum_is_summed(folder: Path) -> None:
    works(folder, "new", 2)


@pytest.mark.slow
def test_two_thousand_small_sums_of_ranks_out_of_step_are_exact(folder: Path) -> None:
    works(folder, "stress", 4)


def test_when_one_rank_cannot_map_the_memory_none_does(folder: Path) -> None:
    works(folder, "fallback", 3)


def test_shared_memory_that_cannot_be_shared_is_refused_with_the_reason(folder: Path) -> None:
    with pytest.raises(RefusedError) as caught:
        run(folder, "impossible", 3)
    assert str(caught.value).startswith("strategy.reduce_through=shared_memory ")
    assert re.search(r"\(rank 1: \[Errno 13\] Permission denied: '/proc/\d+/fd/\d+'\)", str(caught.value))


def test_a_signal_ends_the_wait_for_a_peer(folder: Path) -> None:
    failure = fails(folder, "interrupt", 2)
    assert (failure.rank, failure.message) == (0, "interrupted in time")


@pytest.mark.slow
def test_a_rank_that_is_silent_is_named_when_the_time_is_up(folder: Path) -> None:
    failure = fails(folder, "stopped", 3)
    assert failure.kind == "PeerError"
    assert failure.rank in (0, 2)
    assert re.match(
        r"rank 1 \(process \d+\) did not come to where ranks add up within 4 s, for which rank \d waited: ",
        failure.message,
    )


def test_ranks_that_bring_different_gradients_are_refused(folder: Path) -> None:
    failure = fails(folder, "different", 2)
    assert re.match(r"rank \d brought \d+ bytes of gradients where rank \d brought \d+: ", failure.message)


def test_a_backward_pass_whose_gradient_no_worker_would_sum_is_refused(folder: Path) -> None:
    failure = fails(folder, "outside", 2)
    assert failure.message.startswith(
        "the task's train_step runs backward outside of `with update.micro_batch(last):`, at whose "
    )


def test_ranks_that_build_different_models_are_refused(folder: Path) -> None:
    failure = fails(folder, "other_model", 3)
    assert re.match(
        r"rank [12] has built a different model than rank zero: its parameters or buffers have other names, ",
        failure.message,
    )


CODE = """\
class Layers(nn.Sequential):
    # Enough parameters for several small buckets, and statistics besides.
    def __init__(self, **options):
        super().__init__(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 2))


class Unused(Layers):
    def __init__(self, **options):
        super().__init__(**options)
        self.extra = nn.Linear(4, 4)

    def forward(self, rows):
        for name in "012345":
            rows = self.get_submodule(name)(rows)
        return rows


def pair(**options):
    return {"left": Layers(), "right": Layers()}


class Pair:
    # Two networks and two optimizers, each trained by a backward pass of its own.
    def optimizers(self, model, make):
        return {name: make(module.parameters()) for name, module in model.items()}

    def train_step(self, update, batches):
        models = update.models
        for name in ("left", "right"):
            for number, (_, rows, labels) in enumerate(batches):
                with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                    scores = sum(model(rows) for model in models.values())
                    loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
                    micro_batch.backward(loss, len(labels))
            update.apply(name)
        return loss.detach(), len(labels), {}

    def step(self, model, batch):
        _, rows, labels = batch
        return nn.functional.cross_entropy(model["left"](rows), labels, reduction="sum"), len(labels), {}


class Marked(Sides):
    # Records which process is which rank.
    def __init__(self, folder):
        open(f"{folder}/{RANK}-{os.getpid()}", "w").close()
"""


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """How gradients travel between ranks is tested, not how these start: they are forks."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("reduce"), environ), CODE)


WAYS = {
    "layers": "model._target_=points.Layers",
    "unused": "model._target_=points.Unused strategy.find_unused_parameters=true",
    "static": "model._target_=points.Layers strategy.static_graph=true strategy.gradient_as_bucket_view=false",
    "accumulated": "model._target_=points.Layers trainer.micro_batch_size=2",
    "two models": "model._target_=points.pair task._target_=points.Pair trainer.micro_batch_size=4",
}


def digest(recipe: Recipe, *overrides: str) -> str:
    done = recipe(*overrides, "trainer.threads=1")
    assert done.code == 0, done.err
    found: str = done.result()["weights_sha256"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "size"),
    [
        ("layers", 3),
        ("two models", 2),
        *(pytest.param("layers", size, marks=pytest.mark.slow) for size in (2, 4)),
        *(pytest.param(way, 3, marks=pytest.mark.slow) for way in WAYS if way not in ("layers", "two models")),
    ],
)
def test_the_weights_are_the_same_through_memory_and_gloo_and_with_any_buckets(
    recipe: Recipe, way: str, size: int
) -> None:
    overrides = (*WAYS[way].split(), f"trainer.gpus={size}")
    small = "strategy.bucket_cap_mb=0.001"
    found = digest(recipe, *overrides, "strategy.reduce_through=shared_memory")
    assert digest(recipe, *overrides, "strategy.reduce_through=backend", small) == found
    if way == "layers":
        assert digest(recipe, *overrides, "strategy.reduce_through=shared_memory", small) == found
        assert digest(recipe, *overrides, "strategy.reduce_through=backend") == found


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_the_run_at_once_and_leaves_no_memory(recipe: Recipe, tmp_path: Path, victim: int) -> None:
    before = set(os.listdir("/dev/shm"))
    process, run = recipe.start(
        "task._target_=points.Marked", f"+task.folder={tmp_path}", "trainer.gpus=3", "trainer.epochs=100000",
        "trainer.log_every=200", "trainer.eval_every=0", "trainer.checkpoint_every=0",
        environ={**OWN_SERVER, "DDPEXP_FAULT": f"backward:kill:{victim}:300"},  # so the others wait for its gradients
    )  # fmt: skip
    done = finish(process, run)
    [pid] = [int(path.name.partition("-")[2]) for path in tmp_path.glob(f"{victim}-*")]
    assert (done.code, json.loads((run / "error.json").read_text())["rank"]) == (1, victim)
    assert re.search(rf"rank {victim} on \S+ failed \(.*killed by SIGKILL", done.err)
    assert session(process.pid) == {}
    others = "".join((run / f"ranks/{rank}.log").read_text() for rank in range(3) if rank != victim)
    assert f"PeerError: rank {victim} (process {pid}) ended in the middle of the training, so" in others
    assert set(os.listdir("/dev/shm")) <= before
