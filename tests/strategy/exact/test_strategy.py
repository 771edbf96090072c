"""Exact reduction: real workers of any number against one, to the bit; and what has no sum is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpexp.errors import DdpexpError, WorkerError
from ddpexp.launch import WorkerRequest
from ddpexp.launch.launchers.local import Spawn
from ddpexp.strategy.exact.strategy import Exact
from tests.conftest import OWN_SERVER, Ddpexp, Done, calling, finish
from tests.fitting import ALONE, STRATEGY
from tests.launch.starters import STARTERS
from tests.points import ITEMS, Recipe
from tests.records import timeless
from tests.refusals import refused

WORKER = """\
import dataclasses

import torch
from torch import nn

from ddpexp.compat import lazy_dynamo
from ddpexp.launch import Layout
from ddpexp.train.process import run_rank
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.exact.exchange import OverBackend, OverMemory
from ddpexp.distributed.world import World
from tests.fitting import ALONE, STRATEGY
from tests.records import timeless


def main(size, num_leaves):
    def work(control):
        lazy_dynamo.defer()
        torch.set_num_threads(1)
        world = World.join(Layout(1, int(size), "cpu", "gloo", 1))
        for name, case in CASES.items():
            compare(name, case, world, int(num_leaves))
        world.barrier()

    return run_rank(work)


class Case:
    # Models and a loss that depends on the place of a micro-batch alone.
    options = {}
    steps = 4

    def build(self, world):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))

    def loss(self, model, step, leaf, rows):
        return model(rows).square().sum()


class Unused(Case):
    # One of three experts for each micro-batch, one for the second step alone, and one for none.
    options = {"find_unused_parameters": True}

    def build(self, world):
        return nn.ModuleList([nn.Linear(6, 2) for _ in range(5)])

    def loss(self, model, step, leaf, rows):
        total = model[leaf % 3](rows).square().sum()
        return total + model[3](rows).sum() if step == 2 and leaf == 1 else total


class Counts(nn.Module):
    # Buffers of all kinds: some move at last, some in one micro-batch alone, some are put in another's place.
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("big", torch.full((3,), 2**40))
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("last", torch.zeros(6))
        self.register_buffer("least", torch.full((6,), float("inf")))
        self.register_buffer("short", torch.zeros(6, dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, rows, step, leaf):
        self.seen += 1
        self.big = self.big + 3
        self.mask.copy_(torch.full((4, 4), float("-inf")).triu(1))
        if step >= 1 and leaf == 5:
            self.last = self.last + rows.mean(0)
        if step >= 2:
            self.short.mul_(0.9).add_(rows.mean(0), alpha=0.1)
            self.least = torch.minimum(self.least, rows.amin(0))
        self.flag = self.flag | (step >= 3)
        return rows * self.weight


class Buffers(Case):
    def build(self, world):
        return Counts()

    def loss(self, model, step, leaf, rows):
        return model(rows, step, leaf).square().sum()


class Two(Case):
    # The second model is in some steps alone, and so are its buffers.
    def build(self, world):
        return {"one": super().build(world), "two": super().build(world)}

    def loss(self, model, step, leaf, rows):
        loss = model["one"](rows).square().sum()
        return loss * model["two"](rows).sum() if step % 2 else loss


class Bfloat16(Case):
    def build(self, world):
        return super().build(world).bfloat16()

    def loss(self, model, step, leaf, rows):
        return super().loss(model, step, leaf, rows.bfloat16())


class Double(Case):
    def build(self, world):
        return nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 2).double())

    def loss(self, model, step, leaf, rows):
        return model[1](model[0](rows).double()).square().sum()


class Large(Case):
    # More than fits into a slot, and so much that each rank sums a part.
    steps = 2

    def build(self, world):
        return nn.Sequential(nn.Linear(6, 700), nn.Linear(700, 900), nn.Linear(900, 2))


class Pictures(Case):
    def build(self, world):
        net = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (2, 1)), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 2))
        return net.to(memory_format=torch.channels_last)


class RanksOwn(Case):
    # Each rank builds something else: rank zero's counts.
    def build(self, world):
        torch.manual_seed(world.rank)
        return super().build(world)


CASES = {case.__name__: case() for case in (Case, Unused, Buffers, Two, Bfloat16, Double, Large, Pictures, RanksOwn)}


def trained(case, world, num_leaves, **options):
    def build():
        torch.manual_seed(1)
        return case.build(world)

    each = num_leaves // world.world_size
    model = Exact(dataclasses.replace(STRATEGY, **case.options, **options), world, build, gradient_accumulation_steps=each)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    left = []
    for step in range(case.steps):
        for number in range(each):
            leaf = world.rank * each + number
            torch.manual_seed(1000 * step + leaf)
            rows = torch.randn(5, 6) * 10.0 ** torch.randint(-2, 2, (5, 6))
            with model.micro_batch(last=number == each - 1):
                case.loss(model.train_model, step, leaf, rows).backward()
        left += [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        model.clear_gradient()
        left += [one.detach().clone() for module in model.modules.values() for one in (*module.parameters(), *module.buffers())]
    return model, left


def same(found, expected):
    return found is expected or (found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan())
                                 and torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)))


def compare(name, case, world, num_leaves):
    _, expected = trained(case, ALONE, num_leaves)
    for through, kind in (("shared_memory", OverMemory), ("backend", OverBackend)):
        model, found = trained(case, world, num_leaves, reduce_through=through)
        assert type(model.round.exchange) is kind and (model.memory is not None) == (kind is OverMemory)
        assert len(found) == len(expected)
        for place, (one, other) in enumerate(zip(found, expected)):
            assert (one is None) == (other is None) and (one is None or same(one, other)), (name, through, place, one, other)
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """The numbers of runs are compared, however their processes start."""
    return warm_environ


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_servers: None) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/exacts.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path / "code")
    return tmp_path


@pytest.mark.variants(1)
@pytest.mark.parametrize(("size", "num_leaves"), [(2, 6), (3, 12), (4, 8), (8, 8)])
def test_any_number_of_workers_leaves_the_same_gradients_and_buffers_as_one(
    folder: Path, size: int, num_leaves: int
) -> None:
    try:
        Spawn().launch(calling("exacts:main", [str(size), str(num_leaves)], folder / "logs", WorkerRequest(gpus=size)))
    except WorkerError as error:
        pytest.fail(f"{error.failure.message}\n{error.failure.traceback}")


def alone(factory: Callable[[], Any], num_leaves: int = 4, **options: Any) -> Exact:
    return Exact(replace(STRATEGY, **options), ALONE, factory, gradient_accumulation_steps=num_leaves)


def turn(model: Exact, loss: Callable[[Any, int], Tensor], num_leaves: int = 4) -> None:
    """Go through the micro-batches once."""
    for leaf in range(num_leaves):
        with model.micro_batch(last=leaf == num_leaves - 1):
            loss(model.train_model, leaf).backward()  # type: ignore[no-untyped-call]


def gradients(model: Exact) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def rows(leaf: int) -> Tensor:
    generator = torch.Generator().manual_seed(leaf)
    return torch.randn(8, 3, generator=generator) * 10.0 ** torch.randint(-2, 3, (8, 3), generator=generator)


def test_the_gradient_is_the_tree_of_the_micro_batches_own() -> None:
    torch.manual_seed(0)
    model = alone(lambda: nn.Linear(3, 4), num_leaves=6)
    turn(model, lambda net, leaf: net(rows(leaf)).square().sum(), num_leaves=6)
    twin, own = model.eval_model, []
    found = gradients(model)
    for leaf in range(6):
        model.clear_gradient()
        twin(rows(leaf)).square().sum().backward()
        own.append(gradients(model))
    for place, gradient in enumerate(found):
        g = [part[place] for part in own]
        assert torch.equal(gradient, ((g[0] + g[1]) + (g[2] + g[3])) + (g[4] + g[5]))
    assert not all(
        torch.equal(one, torch.stack(parts).cumsum(0)[-1])
        for one, parts in zip(found, zip(*own, strict=True), strict=True)
    )


def test_batch_norm_moves_once_a_step_by_the_mean_over_its_micro_batches() -> None:
    model = alone(lambda: nn.BatchNorm1d(3))
    net: Any = model.eval_model
    for step in range(3):
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        turn(model, lambda net, leaf: net(rows(leaf)).sum())
        means = torch.stack([rows(leaf).mean(0) for leaf in range(4)]).mean(0)
        assert torch.allclose(net.running_mean, 0.9 * before["running_mean"] + 0.1 * means, rtol=1e-5)
        assert int(net.num_batches_tracked) == step + 1


def test_16_bit_gradients_are_summed_in_32() -> None:
    torch.manual_seed(0)
    model = alone(lambda: nn.Linear(3, 1, bias=False, dtype=torch.bfloat16))
    parts = [torch.tensor([[1.0, 256.0, 0.5]], dtype=torch.bfloat16) * (1 if leaf else 256) for leaf in range(4)]
    turn(model, lambda net, leaf: (net.weight * parts[leaf]).sum())
    [gradient] = gradients(model)
    total = parts[0].float() + parts[1].float() + (parts[2].float() + parts[3].float())
    assert torch.equal(gradient, total.bfloat16())
    assert not torch.equal(gradient, parts[0] + parts[1] + (parts[2] + parts[3]))  # the comparison can fail


def test_a_second_round_adds_to_what_the_first_has_left() -> None:
    model = alone(lambda: nn.Linear(3, 1, bias=False))
    turn(model, lambda net, leaf: (net.weight * (leaf + 1)).sum())
    turn(model, lambda net, leaf: (net.weight * 100).sum())
    [gradient] = gradients(model)
    assert gradient.tolist() == [[410.0] * 3]


class WithMask(nn.Linear):
    def __init__(self, rewrites: bool) -> None:
        super().__init__(3, 3)
        self.rewrites = rewrites
        self.count: Tensor
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, rows: Tensor) -> Tensor:
        if self.rewrites:
            self.mask = torch.full((3, 3), -torch.inf).triu(1)
        self.count += torch.tensor([1.0, torch.inf])
        return super().forward(rows)


@pytest.mark.parametrize("rewrites", [False, True])
def test_what_is_infinite_stays_infinite_and_does_not_become_nan(rewrites: bool) -> None:
    model = alone(lambda: WithMask(rewrites))
    net: Any = model.eval_model
    for step in range(3):
        turn(model, lambda net, leaf: net(rows(leaf)).sum())
        assert torch.equal(net.mask, torch.full((3, 3), -torch.inf).triu(1))
        assert net.count.tolist() == [step + 1.0, torch.inf]


def test_a_buffer_that_is_loaded_between_steps_is_where_the_next_step_begins() -> None:
    model = alone(lambda: nn.BatchNorm1d(3))
    net: Any = model.eval_model
    for _ in range(2):
        turn(model, lambda net, leaf: net(rows(leaf)).sum())
        net.num_batches_tracked += 10
    assert int(net.num_batches_tracked) == 22


def test_a_parameter_that_no_micro_batch_uses_has_no_gradient() -> None:
    model = alone(
        lambda: nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)]), find_unused_parameters=True
    )
    turn(model, lambda net, leaf: net[leaf // 2](rows(leaf)).sum())
    assert [p.grad is not None for p in model.parameters()] == [True, True, True, True, False, False]


def test_a_frozen_parameter_is_no_unused_one() -> None:
    model = alone(lambda: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3), nn.Linear(3, 1)))
    turn(model, lambda net, leaf: net(rows(leaf)).sum())
    model.clear_gradient()
    model.eval_model[1].requires_grad_(False)  # on the way, too
    turn(model, lambda net, leaf: net(rows(leaf)).sum())
    assert [p.grad is not None for p in model.parameters()] == [False, False, False, False, True, True]


class Odd(nn.Linear):
    """A layer whose buffer is changed by `change(buffer, leaf)`."""

    def __init__(self, change: Callable[[Tensor, int], Tensor], start: Tensor) -> None:
        super().__init__(3, 1)
        self.change = change
        self.leaf = 0
        self.odd: Tensor
        self.register_buffer("odd", start)

    def forward(self, rows: Tensor) -> Tensor:
        self.odd = self.change(self.odd, self.leaf)
        self.leaf += 1
        return super().forward(rows)


class Grows(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        if not list(self.buffers()):
            self.register_buffer("late", torch.zeros(1))
        return super().forward(rows)


def thawed(net: Any, leaf: int) -> Tensor:
    net[0].requires_grad_(True)
    return net(rows(leaf)).sum()  # type: ignore[no-any-return]


def plain(net: Any, leaf: int) -> Tensor:
    return net(rows(leaf)).sum()  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Tensor], str]] = {
    "unused": (
        lambda: nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]),
        lambda net, leaf: net[leaf // 3](rows(leaf)).sum(),
        "model.1.weight, model.1.bias: strategy.find_unused_parameters=true",
    ),
    "a model in some": (
        lambda: {"one": nn.Linear(3, 1), "two": nn.Linear(3, 1)},
        lambda net, leaf: sum(net[name](rows(leaf)).sum() for name in ("one", "two")[: 1 + leaf // 2]),
        "two got gradients: strategy.find_unused_parameters=true",
    ),
    "sparse": (
        lambda: nn.Embedding(5, 2, sparse=True),
        lambda net, leaf: net(torch.tensor([leaf])).sum(),
        "model.weight is sparse: sparse=False, or use trainer.reduction=fast",
    ),
    "thawed": (
        lambda: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)),
        thawed,
        "model.0.weight: requires_grad=True",
    ),
    "whole numbers": (
        lambda: Odd(lambda now, leaf: now + leaf, torch.tensor(3)),
        plain,
        "the buffer model.odd: 4 micro-batches",
    ),
    "truths": (
        lambda: Odd(lambda now, leaf: now | (leaf == 2), torch.tensor(False)),
        plain,
        "the buffer model.odd: whole numbers",
    ),
    "shape": (
        lambda: Odd(lambda now, leaf: torch.cat([now, now]), torch.zeros(1)),
        plain,
        "the buffer model.odd: (2,) of torch.float32",
    ),
    "new": (lambda: Grows(3, 1), plain, "0 buffers: __init__"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_sum_is_refused_in_a_sentence(name: str) -> None:
    factory, loss, expected = REFUSED[name]
    with refused(expected, DdpexpError):
        turn(alone(factory), loss)


@pytest.mark.parametrize("lasts", [(False, True), (False, False, False, False, False)])
def test_a_round_of_another_length_is_refused(lasts: tuple[bool, ...]) -> None:
    model = alone(lambda: nn.Linear(3, 1))

    def goes() -> None:
        for leaf, last in enumerate(lasts):
            with model.micro_batch(last):
                plain(model.train_model, leaf).backward()  # type: ignore[no-untyped-call]

    with refused(f"{len(lasts)} micro-batches: 4 on each worker", DdpexpError):
        goes()


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (lambda: nn.LazyLinear(2), "model.weight: no shape"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "model.weight: complex"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_that_cannot_be_summed_is_refused_when_it_is_built(
    factory: Callable[[], nn.Module], expected: str
) -> None:
    with refused(expected):
        alone(factory)


CODE = """\
class Deep(nn.Sequential):
    def __init__(self, **options):
        super().__init__(
            nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(),
            nn.Dropout(0.1), nn.Linear(64, 2),
        )


class Noisy(Items):
    # Augments with random numbers of torch, in whatever process.
    def __getitem__(self, index):
        place, row, label = super().__getitem__(index)
        return place, row + 0.1 * torch.randn(4), label


def load_noisy(**options):
    return Splits(Noisy(96, 0), {"eval": Noisy(33, 1)})


class Masked(Sides):
    # Counts that depend on the data.
    def step(self, model, batch):
        ids, rows, labels = batch
        kept = (ids % 16 < 4) | (ids % 7 == 0)
        losses = nn.functional.cross_entropy(model(rows), labels, reduction="none")
        return (losses * kept).sum(), kept.sum(), {"kept": (kept.sum(), len(ids))}


def pair(**options):
    return {"left": Deep(), "right": Deep()}


class Pair:
    # Two networks under manual optimization, in two rounds of micro-batches a step, of which the first leaves `right` alone.
    def optimizers(self, model, make):
        return {name: make(module.parameters()) for name, module in model.items()}

    def train_step(self, update, batches):
        models, total = update.models, 0
        for name in ("left", "right"):
            for number, (_, rows, labels) in enumerate(batches):
                with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                    scores = models["left"](rows) + (models["right"](rows) if name == "right" else 0)
                    loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
                    micro_batch.backward(loss, len(labels))
                total = total + loss.detach()
            update.apply(name)
        return total, 2 * sum(len(labels) for _, _, labels in batches), {}

    def step(self, model, batch):
        _, rows, labels = batch
        return nn.functional.cross_entropy(model["left"](rows), labels, reduction="sum"), len(labels), {}


class Outside(Pair):
    def train_step(self, update, batches):
        _, rows, labels = batches[0]
        micro_batch = update.micro_batch(last=True)
        micro_batch.backward(update.models["left"](rows).sum(), len(labels))


class TooEarly(Pair):
    def train_step(self, update, batches):
        _, rows, labels = batches[0]
        with update.micro_batch(last=True) as micro_batch:
            micro_batch.backward(update.models["left"](rows).sum(), len(labels))
            update.apply("left")
"""
DEEP = ("model._target_=points.Deep", "trainer.global_batch_size=48", "trainer.micro_batch_size=2",
    "trainer.log_every=1",
        "trainer.threads=1")  # fmt: skip
EXACT = "trainer.reduction=exact"
ADAMW = ("optimizer=adamw", "trainer.precision=bf16", "trainer.clip_grad_norm=1.0", "trainer.ema_decay=0.9")
SIZES = (1, 2, 3)
MORE = (4, 8)
"""Of the longer run."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("exact"), environ), CODE)


@dataclass(frozen=True)
class Numbers:
    """Everything that a run computes."""

    weights_sha256: str
    records: list[dict[str, Any]]

    @classmethod
    def of(cls, done: Done) -> Numbers:
        assert done.code == 0, done.err
        records = [timeless(record) for record in done.metrics()]
        assert len(records) > 4
        return cls(done.result()["weights_sha256"], records)


def numbers(recipe: Recipe, size: int, *words: str) -> Numbers:
    environ = OWN_SERVER if size == 1 else {}  # another seed of Python's hashes than the others have
    return Numbers.of(recipe(*DEEP, f"trainer.gpus={size}", *words, environ=environ))


@pytest.fixture(scope="module")
def exact(recipe: Recipe) -> dict[int, Numbers]:
    return {size: numbers(recipe, size, EXACT) for size in SIZES}


def test_every_world_size_gives_the_same_weights_and_records_to_the_bit(
    recipe: Recipe, exact: dict[int, Numbers]
) -> None:
    fast = {size: numbers(recipe, size) for size in SIZES}
    print("\n\n| workers | trainer.reduction=fast | trainer.reduction=exact |\n|---|---|---|")
    for size in SIZES:
        print(f"| {size} | `{fast[size].weights_sha256[:12]}` | `{exact[size].weights_sha256[:12]}` |")
    assert all(found == exact[1] for found in exact.values())
    assert {"train/loss", "train/accuracy", "train/grad_norm"} < exact[1].records[0].keys()
    assert len({one.weights_sha256 for one in fast.values()}) > 1  # the comparison can fail


@pytest.mark.slow
def test_more_workers_give_them(recipe: Recipe, exact: dict[int, Numbers]) -> None:
    assert [numbers(recipe, size, EXACT) for size in MORE] == [exact[1]] * len(MORE)


@pytest.mark.slow
def test_adamw_in_bf16_with_clipping_and_averaged_weights_too(recipe: Recipe, exact: dict[int, Numbers]) -> None:
    found = [numbers(recipe, size, EXACT, *ADAMW) for size in (1, 8)]
    assert found[0] == found[1] != exact[1]


@pytest.mark.slow
def test_torchrun_gives_them(recipe: Recipe, exact: dict[int, Numbers]) -> None:
    [torchrun] = [starter for starter in STARTERS if starter.name == "torchrun"]
    assert Numbers.of(torchrun(recipe, 3, *DEEP[:-1], EXACT)) == exact[1]


def test_the_backend_gives_them(recipe: Recipe, exact: dict[int, Numbers]) -> None:
    assert numbers(recipe, 4, EXACT, "strategy.reduce_through=backend") == exact[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [(4, ("strategy.dp_replicate_size=2",)), (3, ("strategy.gather_in_evaluation=false",)), (1, ())],
)
def test_sharded_models_give_them(
    recipe: Recipe, exact: dict[int, Numbers], size: int, options: tuple[str, ...]
) -> None:
    assert numbers(recipe, size, EXACT, "strategy=fsdp", "strategy.min_block_mb=0.001", *options) == exact[1]


WAYS = {
    "manual": ("task._target_=points.Pair", "model._target_=points.pair"),
    "counts of the data": ("task._target_=points.Masked",),
    "augmented items": (*ITEMS, "data._target_=points.load_noisy"),
}


@pytest.mark.slow
def test_manual_optimization_of_sharded_models_has_them(recipe: Recipe) -> None:
    alone, two = (
        numbers(recipe, size, EXACT, *WAYS["manual"], f"strategy={strategy}")
        for size, strategy in ((1, "ddp"), (2, "fsdp"))
    )
    assert two.weights_sha256 == alone.weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_task_and_data_has_them(recipe: Recipe, way: str) -> None:
    alone, four = (numbers(recipe, size, EXACT, *WAYS[way]) for size in (1, 4))
    assert four.weights_sha256 == alone.weights_sha256
    if way != "manual":  # whose training loss is what each rank reports of all its micro-batches
        assert four == alone


def test_a_run_resumes_at_another_world_size_with_the_same_result(recipe: Recipe, exact: dict[int, Numbers]) -> None:
    typed, run = recipe.words(*DEEP, EXACT)
    for size, steps in ((2, 2), (4, 4)):
        process, _ = recipe.ddpexp.start(*typed, f"trainer.gpus={size}", f"trainer.max_steps={steps}")
        done = finish(process, run)
        assert done.code == 0, done.err
    assert "resumed after step 2 of 4" in done.out
    assert Numbers.of(done).weights_sha256 == exact[1].weights_sha256


@pytest.mark.parametrize(
    ("task", "reduction", "size", "said"),
    [
        ("Outside", "exact", 2, "calls backward outside of `with update.micro_batch(last):`"),
        ("Outside", "fast", 1, "calls backward outside of `with update.micro_batch(last):`"),
        ("TooEarly", "fast", 2, "calls update.apply inside of `with update.micro_batch(last):`"),
    ],
)
def test_what_is_not_where_micro_batches_want_it_is_refused(
    recipe: Recipe, task: str, reduction: str, size: int, said: str
) -> None:
    words = (f"trainer.gpus={size}", f"task._target_=points.{task}", "model._target_=points.pair")
    done = recipe(*DEEP, *words, f"trainer.reduction={reduction}")
    assert done.code == 1
    assert said in done.err


@pytest.mark.parametrize(
    "words",
    [
        "trainer.micro_batch_size=auto",
        "strategy.comm_hook=fp16",
        "strategy.sync_batchnorm=true",
        "strategy.static_graph=true",
        "strategy.broadcast_buffers=false",
    ],
)
def test_what_cannot_be_exact_is_refused_before_anything_starts(recipe: Recipe, words: str) -> None:
    done = recipe(*DEEP, EXACT, words)
    assert done.code == 2
    assert "trainer.reduction=exact" in done.err
    assert words.partition("=")[0] in done.err
