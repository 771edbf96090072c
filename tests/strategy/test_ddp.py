"""DistributedDataParallel with every option: real workers, and weights that show what the option did."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.ddp import DDP, _wrap, fixes_buckets
from tests.conftest import Ddpexp, Done
from tests.fitting import ALONE, STRATEGY, near
from tests.points import Recipe, weights
from tests.refusals import command_refused, refused

CODE = """\
class Unused(Net):
    # A layer that no forward pass reaches.
    def __init__(self, **options):
        super().__init__(**options)
        self.extra = nn.Linear(4, 4)

    def forward(self, rows):
        for name in "0123":
            rows = self.get_submodule(name)(rows)
        return rows


class Sometimes(Unused):
    calls = 0

    def forward(self, rows):
        self.calls += self.training
        return super().forward(self.extra(rows) if self.calls % 2 else rows)


class Norm(nn.Sequential):
    def __init__(self, **options):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Frozen(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.requires_grad_(False)


def half_frozen(**options):
    return {"left": Frozen(), "right": Net()}


class Left(Sides):
    def step(self, model, batch):
        return super().step(lambda rows: model["left"](rows) + model["right"](rows), batch)


class Pictures(nn.Module):
    # Needs images: the four numbers of a point as two by two pixels.
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(4, 2))

    def forward(self, rows):
        return self.layers(rows.reshape(-1, 1, 2, 2))


class Looks(Sides):
    # Says what the strategy made of the model and of the process.
    def step(self, model, batch):
        name = type(model).__name__
        weight = next(p for p in model.parameters() if p.dim() > 1)
        last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
        print(f"{name} {'train' if model.training else 'eval'} channels_last={last} "
              f"deterministic={torch.are_deterministic_algorithms_enabled()} threads={torch.get_num_threads()}")
        return super().step(model, batch)


class Encodes(Net):
    def encode(self, rows):
        return self(rows)


class Method(Sides):
    # Calls a method of the model instead of the model.
    def step(self, model, batch):
        return super().step(model.encode, batch)


class Several(Sides):
    # Two forward passes, then two backward passes, in each micro-batch.
    def train_step(self, update, batches):
        for number, (_, rows, labels) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                loss = nn.functional.cross_entropy(update.models(rows), labels, reduction="sum")
                other = update.models.encode(2 * rows).square().sum()
                micro_batch.backward(loss, len(labels))
                micro_batch.backward(other, len(labels))
        update.apply()
        return loss.detach(), len(labels), {}


class Compiled(Sides):
    def step(self, model, batch):
        import torch._dynamo

        result = super().step(model, batch)
        if model.training:
            print(f"compiled {torch._dynamo.utils.counters['frames']['ok']} frames")
        return result
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What the strategy does is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("ddp"), environ), CODE)


@pytest.fixture(scope="module")
def plain(recipe: Recipe) -> Done:
    done = recipe("trainer.gpus=2")
    assert done.code == 0, done.err
    return done


def test_buckets_are_fixed_where_their_layout_orders_a_sum() -> None:
    assert fixes_buckets(STRATEGY, 3, "cuda")
    assert not fixes_buckets(STRATEGY, 2, "cuda")
    assert not fixes_buckets(STRATEGY, 8, "cpu")
    assert fixes_buckets(replace(STRATEGY, comm_hook="fp16"), 3, "cpu")
    assert not fixes_buckets(replace(STRATEGY, find_unused_parameters=True), 8, "cuda")  # DDP does not change them


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        ("strategy.comm_hook=fp16 trainer.gpus=3", 1e-3),
        ("strategy.comm_hook=powersgd", 0.2),
        (
            "strategy.find_unused_parameters=true strategy.bucket_cap_mb=0.0001 strategy.gradient_as_bucket_view=false",
            1e-6,
        ),
        ("strategy.static_graph=true", 1e-6),
    ],
    ids=["fp16", "powersgd", "buckets", "static"],
)
def test_an_option_trains_to_nearly_the_same_weights(
    recipe: Recipe, plain: Done, overrides: str, tolerance: float
) -> None:
    done = recipe(*overrides.split(), *["trainer.gpus=2"] * ("gpus" not in overrides))
    assert done.code == 0, done.err
    warnings = re.findall(r"Warning: (\S+)", done.out + done.err)
    assert warnings == ["find_unused_parameters=True"] * ("unused" in overrides)  # that it was not needed here
    assert near(weights(done), weights(plain), tolerance)
    same = done.result()["weights_sha256"] == plain.result()["weights_sha256"]
    assert not same or "comm_hook" not in overrides  # a hook that compresses leaves its mark


def test_a_hook_that_gloo_does_not_have_is_refused(recipe: Recipe) -> None:
    done = recipe("trainer.gpus=2", "strategy.comm_hook=bf16")
    command_refused(done, "strategy.comm_hook=bf16: trainer.backend=nccl")


TRANSPORTS = [
    "reduce_through=backend",
    "reduce_through=shared_memory",
    "gradient_as_bucket_view=false",
    "comm_hook=fp16",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        pytest.param(kind, f"trainer.gpus={gpus} strategy.{options}", marks=[pytest.mark.slow] * (number > 0))
        for number, (options, gpus, kind) in enumerate(product(TRANSPORTS, [2, 3], ["Sometimes", "Unused"]))
    ],
)
def test_an_unused_layer_needs_find_unused_parameters(recipe: Recipe, kind: str, overrides: str) -> None:
    """`Sometimes` uses it in the first micro-batch of a step and not in the second."""
    arguments = (f"model._target_=points.{kind}", *overrides.split(), "trainer.micro_batch_size=4")
    done = recipe(*arguments)
    assert done.code == 1
    assert "Traceback" not in done.err
    assert (
        "model.extra.weight, model.extra.bias got no gradient in a micro-batch, because its loss does not depend on it. "
        in done.err
    )
    assert "strategy.find_unused_parameters=true" in done.err
    done = recipe(*arguments, "strategy.find_unused_parameters=true")
    assert done.code == 0, done.err


@pytest.mark.parametrize("accumulated", [1, 2, 3])
@pytest.mark.parametrize("lacking", [0, 1, 2, None])
def test_one_worker_takes_unused_parameters_as_several_do(accumulated: int, lacking: int | None) -> None:
    """In the micro-batch `lacking` the second layer is not reached, or in none."""

    def model() -> nn.Module:
        return nn.ModuleList([nn.Linear(2, 1), nn.Linear(1, 1)])

    def train(strategy: DDP) -> None:
        for _ in range(2):  # steps
            for number in range(accumulated):
                with strategy.micro_batch(number == accumulated - 1):
                    first, second = strategy.train_model
                    out = first(torch.ones(1, 2))
                    (out if number == lacking else second(out)).sum().backward()
            strategy.clear_gradient()

    train(DDP(replace(STRATEGY, find_unused_parameters=True), ALONE, model))
    train(DDP(replace(STRATEGY, static_graph=True), ALONE, model))
    strategy = DDP(STRATEGY, ALONE, model)
    if lacking is not None and lacking < accumulated:
        with refused("model.1.weight, model.1.bias: no gradient", DdpexpError):
            train(strategy)
    else:
        train(strategy)


def test_a_model_that_a_micro_batch_does_not_reach_lacks_nothing() -> None:
    strategy = DDP(STRATEGY, ALONE, lambda: {"left": nn.Linear(2, 1), "right": nn.Linear(2, 1)})
    for name in ("left", "right"):
        for last in (False, True):
            with strategy.micro_batch(last):
                strategy.train_model[name](torch.ones(1, 2)).sum().backward()
    with strategy.micro_batch(True):
        pass


@pytest.mark.slow
def test_modules_without_anything_to_train_are_left_unwrapped(recipe: Recipe) -> None:
    done = recipe("task._target_=points.Left", "model._target_=points.half_frozen", "trainer.gpus=2")
    assert done.code == 0, done.err
    assert {name.split(".")[0] for name in weights(done)} == {"left", "right"}


@pytest.mark.slow
def test_batch_norm_keeps_rank_zeros_statistics_with_and_without_broadcast(recipe: Recipe) -> None:
    runs = {
        value: recipe("model._target_=points.Norm", "trainer.gpus=2", f"strategy.broadcast_buffers={value}")
        for value in ("true", "false")
    }
    assert [done.code for done in runs.values()] == [0, 0]
    # Each rank normalises by its own batch, so the parameters agree; the evaluation uses rank zero's statistics on all
    # ranks.
    assert near(weights(runs["true"]), weights(runs["false"]), 1e-6)
    assert runs["true"].result()["metrics"] == pytest.approx(runs["false"].result()["metrics"], rel=1e-6)
    alone = runs["false"].run.parent / "alone"
    shutil.copytree(runs["false"].run, alone)
    seen = recipe.ddpexp("evaluate", str(alone), "--config-dir", str(recipe.folder / "conf"), "trainer.gpus=1")
    assert seen.code == 0, seen.err
    for name, value in runs["false"].result()["metrics"].items():
        assert f"{name} {value:.6g}" in seen.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "overrides", "wrapped"),
    [
        (1, "", "Pictures"),
        (2, "strategy.static_graph=true", "LateDDP"),
        pytest.param(2, "", "Pictures", marks=pytest.mark.slow),
    ],
)
def test_what_a_task_trains_and_evaluates_is_what_the_strategy_made(
    recipe: Recipe, size: int, overrides: str, wrapped: str
) -> None:
    done = recipe(
        *overrides.split(),
        "task._target_=points.Looks", "model._target_=points.Pictures", "trainer.channels_last=true",
        "trainer.deterministic=true",
        "trainer.threads=2", f"trainer.gpus={size}", "trainer.max_steps=4",
    )  # fmt: skip
    assert done.code == 0, done.err
    seen = {line for line in done.out.splitlines() if "channels_last=" in line}
    rest = "channels_last=True deterministic=True threads=2"
    assert seen == {f"{wrapped} train {rest}", f"Pictures eval {rest}"}


ENCODES = ("model._target_=points.Encodes", "trainer.gpus=2")
WRAPPED = "strategy.reduce_through=backend"  # DDP also for a small model


@pytest.mark.slow
def test_ddp_reduces_the_gradients_of_several_backward_passes(recipe: Recipe) -> None:
    overrides = (*ENCODES, "task._target_=points.Several", "trainer.micro_batch_size=6")
    bucket, wrapped = recipe(*overrides), recipe(*overrides, WRAPPED)
    assert wrapped.result()["weights_sha256"] == bucket.result()["weights_sha256"]


def test_a_method_of_a_wrapped_model_trains_as_the_model_does(recipe: Recipe, plain: Done) -> None:
    done = recipe(*ENCODES, "task._target_=points.Method", WRAPPED)
    assert done.result()["weights_sha256"] == plain.result()["weights_sha256"]


@pytest.mark.parametrize("find_unused", [False, True])
def test_gradients_are_reduced_once_after_the_backward_passes(fake_group: World, find_unused: bool) -> None:
    model = nn.Embedding(5, 2)
    wrapped = _wrap(model, replace(STRATEGY, find_unused_parameters=find_unused), fake_group, fixed=False)
    seen: list[list[float]] = []

    def note(bucket: Any) -> Any:
        seen.append(bucket.buffer().tolist())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer() / 4)
        return future

    wrapped.register_comm_hook(None, lambda _, bucket: note(bucket))
    wrapped.begin(last=True, overlaps=False)
    with wrapped.no_sync():
        both = [wrapped(torch.tensor([number, 3])).sum() for number in (1, 2)]
        for loss in both:
            loss.backward()
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 0.0])[:, None].expand(5, 2)
    for _ in range(2):  # nothing is new the second time
        wrapped.finish()
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, expected / 4)
        wrapped.begin(last=True, overlaps=False)
    assert seen == [expected.flatten().tolist()]


def test_a_static_graph_has_one_backward_pass_through_the_model(fake_group: World) -> None:
    wrapped = _wrap(nn.Linear(2, 1), replace(STRATEGY, static_graph=True), fake_group, fixed=False)
    with refused("strategy.static_graph=true: train_step", DdpexpError):
        wrapped.begin(last=True, overlaps=False)
    wrapped.begin(last=True, overlaps=True)
    wrapped.module(torch.ones(1, 2)).sum().backward()
    with refused("strategy.static_graph=true: calls a", DdpexpError):
        wrapped.finish()


def test_alone_the_model_is_not_wrapped() -> None:
    strategy = DDP(STRATEGY, ALONE, lambda: nn.Linear(2, 2))
    assert strategy.train_model is strategy.eval_model
    assert isinstance(strategy.train_model, nn.Linear)


def test_several_modules_keep_their_names() -> None:
    strategy = DDP(STRATEGY, ALONE, lambda: {"left": nn.Linear(2, 2), "right": nn.Linear(2, 3)})
    assert list(strategy.train_model) == ["left", "right"]
    assert len(list(strategy.parameters())) == 4


def test_the_weights_are_prepared_before_the_model_is_wrapped() -> None:
    def zero(models: dict[str, nn.Module]) -> None:
        nn.init.zeros_(models["model"].get_parameter("weight"))

    strategy = DDP(STRATEGY, ALONE, lambda: nn.Linear(2, 2), prepare=zero)
    assert torch.equal(strategy.eval_model.weight, torch.zeros(2, 2))


@pytest.fixture
def fake_group() -> Iterator[World]:
    """The first of four ranks whose collectives do nothing: for DDP's own decisions."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield replace(ALONE, world_size=4, local_world_size=1)
    dist.destroy_process_group()


def layouts(wrapped: nn.Module, num_steps: int) -> list[list[list[int]]]:
    """Return the buckets that DDP reduces in each step: the sizes of their gradients."""
    found: list[list[list[int]]] = []

    def note(bucket: Any) -> Any:
        found[-1].append([gradient.numel() for gradient in bucket.gradients()])
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # A lambda has no annotations: torch compares them with classes.
    wrapped.register_comm_hook(None, lambda _, bucket: note(bucket))  # type: ignore[operator]
    for _ in range(num_steps):
        found.append([])
        wrapped(torch.ones(1, 2)).sum().backward()
    return found


@pytest.mark.parametrize("static", [False, True])
def test_fixed_buckets_are_the_same_in_every_step_of_every_start(fake_group: World, static: bool) -> None:
    def wrap(fixed: bool) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(size, size + 1) for size in range(2, 9)))
        options = replace(STRATEGY, bucket_cap_mb=0.0002, static_graph=static)
        return _wrap(model, options, fake_group, fixed)

    first, *others = layouts(wrap(fixed=True), 3)
    assert others == [first, first]
    assert len(first) > 2
    assert [size for bucket in first for size in bucket][:2] == [9, 72]  # those that are ready first
    start, *later = layouts(wrap(fixed=False), 3)
    assert later[-1] == first  # as many messages overlap with the backward pass
    assert start != first  # the comparison can fail


def test_fixed_buckets_do_not_hide_an_unused_parameter(fake_group: World) -> None:
    wrapped = _wrap(Holds(nn.Linear(2, 1)), STRATEGY, fake_group, fixed=True)
    wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="did not receive grad"):
        wrapped(torch.ones(1, 2))


class Holds(nn.Module):
    """A layer that is used, and one that is not."""

    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used, self.unused = used, nn.Linear(2, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Use one of them."""
        found: torch.Tensor = self.used(rows)
        return found


@pytest.mark.slow
def test_compile_compiles_a_model_that_is_made_of_torchs_own_modules(recipe: Recipe, plain: Done) -> None:
    words = ("task._target_=points.Compiled", "trainer.gpus=2", "trainer.compile=true")
    done = recipe(*words, environ={"TORCHINDUCTOR_COMPILE_THREADS": "2"})  # in processes, which a fixture looks for
    assert done.code == 0, done.err
    assert "\ntorch.compile: 1 compiled, 0 compiled again\n" in done.out
    assert "fp32, compiled\n" in done.out
    counts = [int(line.split()[1]) for line in done.out.splitlines() if line.startswith("compiled ")]
    assert len(counts) == 8
    assert min(counts) > 0
    assert near(weights(done), weights(plain), 1e-5)  # under the same names, too
