"""What is compiled, how often, and by how many processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpexp.compat.compiler import end_processes
from ddpexp.distributed.world import World
from ddpexp.strategy import compiled
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.mesh import DataRank
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.tensor.strategy import TensorParallel
from ddpexp.train.activation_checkpointing import checkpoint_activations
from ddpexp.train.compilations import Compilations, Recompilation, describe, limit_processes
from ddpexp.train.metrics import MetricAccumulator
from recipes.gpt import GPT
from tests.conftest import Ddpexp
from tests.fitting import ALONE, STRATEGY, TRAINER, Once, fit_alone
from tests.points import Recipe
from tests.refusals import refused
from tests.strategy.fsdp.ranks import OPTIONS


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("compiled"), environ)).module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    return partial(fit_alone, points, tmp_path)


@pytest.mark.parametrize(
    ("environ", "cores", "workers", "threads"),
    [({}, 8, 2, "4"), ({}, 2, 4, "1"), ({}, 7, 2, "3"), ({"TORCHINDUCTOR_COMPILE_THREADS": "5"}, 8, 2, "5")],
)
def test_the_workers_share_the_cores_unless_the_user_says_otherwise(
    environ: Mapping[str, str], cores: int, workers: int, threads: str
) -> None:
    found = dict(environ)
    limit_processes(found, cores, workers)
    assert found == {"TORCHINDUCTOR_COMPILE_THREADS": threads}


def test_the_processes_that_compile_are_ended_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    pools = SimpleNamespace(shutdown_compile_workers=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", pools)
    end_processes()
    assert ended == [True]
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile")
    end_processes()  # nothing was compiled: the module is not imported for it
    assert "torch._inductor.async_compile" not in sys.modules


def test_what_was_compiled_again_is_counted_with_the_last_reason() -> None:
    reasons = [
        Recompilation("forward", "/home/me/model.py", 12, "L['x'] is not a Tensor"),
        Recompilation("forward", "/home/me/model.py", 12, "tensor 'x' size mismatch\n at index 0"),
    ]
    assert describe(["0/0", "1/0"], []) == "torch.compile: 2 compiled, 0 compiled again"
    assert describe(["0/0", "0/1", "1/0", "!2/0/2"], reasons) == (
        "torch.compile: 2 compiled, 2 compiled again, the last one forward (model.py:12): tensor 'x' size mismatch "
        "at index 0"
    )
    assert describe(["0/0", "0/1"], []) == "torch.compile: 1 compiled, 1 compiled again"  # torch has forgotten why


def test_what_the_trainer_section_asks_for() -> None:
    assert Compilation.of(TRAINER) is None
    assert Compilation.of(replace(TRAINER, compile=True)) == Compilation("default", None)
    assert Compilation.of(replace(TRAINER, compile="max-autotune", compile_blocks="Block")) == Compilation(
        "max-autotune", "Block"
    )


@pytest.mark.parametrize(
    ("compile_", "records"),
    [(True, False), ("default", False), ("reduce-overhead", True), ("max-autotune", True),
     ("max-autotune-no-cudagraphs", False)],
)  # fmt: skip
def test_graphs_keep_the_outputs_of_a_step_until_the_next_one(
    points: Any, fit: Callable[..., Once], monkeypatch: pytest.MonkeyPatch, compile_: Any, records: bool
) -> None:
    """All micro-batches of a step belong to one run of the graphs, or they would overwrite each other's gradients."""
    steps: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(None))
    fit(points.Sides(), num_steps=3, micro_batch_size=8, compile=compile_)
    assert len(steps) == 3 * records


def test_sums_that_graphs_overwrite_are_copied() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    correct, count = torch.tensor(5), torch.tensor(7)
    on_device = replace(ALONE, device=torch.device("meta"))
    window = MetricAccumulator(on_device, DataRank(0, 1), [0], 1, copies=True)
    window.add([(loss, count, {"accuracy": (correct, 7)})])
    for output in (loss.detach(), correct, count):
        output.fill_(0)
    [[(kept, kept_count, metrics)]] = window._steps
    assert (float(kept), int(kept_count), int(metrics["accuracy"][0]), metrics["accuracy"][1]) == (2.0, 7, 5, 7)
    assert not kept.requires_grad


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, rows: Tensor) -> Tensor:
        """Add to the rows."""
        return rows + torch.relu(self.layer(rows))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect the graphs that are compiled; a backend of the tests runs them as they are."""
    found: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda code, mode: real(code, backend=backend))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=True):
        yield found
    torch._dynamo.reset()


def train(strategy: DDP, *batches: int) -> None:
    for size in batches:
        with strategy.micro_batch(last=True):
            strategy.train_model(torch.ones(size, 4)).sum().backward()
        strategy.clear_gradient()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, of its own access
@pytest.mark.parametrize("kind", [Block, lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)])
def test_blocks_with_the_same_code_are_compiled_once_and_evaluated_as_written(graphs: list[Any], kind: Any) -> None:
    name = type(kind()).__name__
    compilation = Compilation("default", name)
    model = DDP(STRATEGY, ALONE, lambda: nn.Sequential(*(kind() for _ in range(6))), compilation=compilation)
    assert not any(key.count("_orig_mod") for key in model.eval_model.state_dict())
    batch = torch.ones(3, 2, 4)
    with model.micro_batch(last=True):
        model.train_model(batch).sum().backward()
    count = len(graphs)
    assert 0 < count <= 2  # of the first block, whose input needs no gradient, and of the others
    with model.evaluation() as evaluated:
        evaluated(torch.ones(5, 2, 4))
    assert len(graphs) == count
    with model.micro_batch(last=True):
        model.train_model(batch).sum().backward()
    assert len(graphs) == count


def test_a_check_of_the_task_compiles_no_block_again(
    points: Any, fit: Callable[..., Once], graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check for a mean in place of a sum evaluates halves of the first batch."""
    monkeypatch.setattr("tests.fitting.DDP", partial(DDP, compilation=Compilation("default", "Block")))
    fit(points.Sides(), num_steps=2, factory=lambda: nn.Sequential(Block(), nn.Linear(4, 2)), compile=True,
        compile_blocks="Block", eval_every=0)  # fmt: skip
    assert len(graphs) == 1


def test_a_block_inside_another_is_compiled_with_it(graphs: list[Any]) -> None:
    outer = Block()
    outer.layer = nn.Sequential(Block(), Block())  # type: ignore[assignment]
    assert len(compiled.compile_blocks({"model": nn.Sequential(outer, Block())}, "Block", "default")) == 2


def test_what_is_computed_again_is_around_a_compiled_block_and_not_inside(graphs: list[Any]) -> None:
    models: dict[str, nn.Module] = {"model": nn.Sequential(Block(), Block())}
    compiled.compile_blocks(models, "Block", "default")
    with refused("trainer.activation_checkpointing=[Linear]: trainer.activation_checkpointing=[Block]"):
        checkpoint_activations(models, ["Linear"])
    checkpoint_activations(models, ["Block"])
    models["model"](torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(graphs) == 1


def test_a_class_that_the_model_does_not_have_is_refused_with_those_that_it_has() -> None:
    with refused("trainer.compile_blocks=Blok"):
        compiled.compile_blocks({"model": nn.Sequential(Block(), Block())}, "Blok", "default")


def test_recompilations_are_noticed(graphs: list[Any]) -> None:
    compilations = Compilations.watched()
    model = DDP(STRATEGY, ALONE, lambda: nn.Sequential(Block()), compilation=Compilation())
    train(model, 3, 3)
    assert compilations.summary() == "torch.compile: 1 compiled, 0 compiled again"
    train(model, 7)
    assert compilations.summary().startswith("torch.compile: 1 compiled, 1 compiled again, the last one ")
    assert "size mismatch" in compilations.summary()


def done(result: Tensor) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return future


@pytest.fixture
def world() -> Iterator[World]:
    """The first of two workers, whose collectives torch does not carry out."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield replace(ALONE, world_size=2, local_world_size=1)
    dist.destroy_process_group()


def noted(begun: list[str], name: str, result: Any, _gradients: Any = None) -> Any:
    begun.append(name)
    return None if isinstance(result, nn.Module) else result


def train_in_ddp(world: World, factory: Callable[[], nn.Module], compilation: Compilation) -> list[str]:
    """Do two steps of a model of width 512 in DDP; return which backward passes of blocks and reductions begin."""
    options, begun = replace(STRATEGY, bucket_cap_mb=1, reduce_through="backend"), list[str]()
    model = DDP(options, world, factory, compilation=compilation)
    model.train_model.register_comm_hook(None, lambda _, bucket: noted(begun, "reduction", done(bucket.buffer())))
    for name, layer in model.eval_model.named_children() if compilation.blocks else ():
        layer.register_full_backward_pre_hook(partial(noted, begun, name))
    for _ in range(2):  # DDP cuts its buckets in the first step
        begun.clear()
        model.train_model.begin(last=True, overlaps=True)
        model.train_model(torch.ones(2, 512, requires_grad=True)).sum().backward()
    return begun


def test_a_compiled_model_in_ddp_is_cut_where_buckets_end(graphs: list[Any], world: World) -> None:
    """So that they are reduced during backward."""
    train_in_ddp(world, lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), Compilation())
    assert len(graphs) == 4  # a bucket each


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # as above
def test_a_compiled_block_in_ddp_is_not_cut(graphs: list[Any], world: World) -> None:
    """Although its parameters fill two buckets."""

    def block() -> nn.Module:
        two = Block()
        two.layer = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))  # type: ignore[assignment]
        return two

    begun = train_in_ddp(world, lambda: nn.Sequential(*(block() for _ in range(3))), Compilation("default", "Block"))
    assert len(graphs) == 1
    before = begun[: begun.index("0")]
    assert before[0] == "2"
    assert "reduction" in before[: before.index("1")]  # of the last block's gradients: it overlaps with what follows
    assert before[-1] == "reduction"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # as above
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own, of its own functions
@pytest.mark.parametrize("by_tokens", [False, True])
def test_blocks_whose_layers_are_divided_are_one_graph_with_their_collectives(
    graphs: list[Any], world: World, by_tokens: bool
) -> None:
    options = replace(OPTIONS, tp_size=2, sequence_parallel=by_tokens)
    sizes: dict[str, Any] = {"vocab_size": 12, "block_size": 8, "num_layers": 3, "num_heads": 2, "width": 8}
    model = TensorParallel(
        options, world, lambda: GPT(**sizes, tied=False), compilation=Compilation("default", "Block")
    )
    for _ in range(2):
        with model.micro_batch(last=True):
            model.train_model(torch.ones(2, 8, dtype=torch.int64)).sum().backward()
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # as above
@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, []), ({"init": "replay"}, ["Block"]), ({"reshard_after_forward": False}, ["Block"]),
        ({"blocks": ("Block",), "reduce_each_micro_batch": True}, []),
    ],
)  # fmt: skip
def test_blocks_that_are_gathered_are_compiled_once(
    graphs: list[Any], world: World, options: dict[str, Any], again: list[str]
) -> None:
    """Hooks of a block stay outside of its graph, and nothing inside of it is gathered by itself."""
    sharding = replace(OPTIONS, reduce_through="backend", **options)
    model = FSDP(sharding, world, lambda: nn.Sequential(nn.Linear(4, 32), *(Block(32) for _ in range(4))),
                 compilation=Compilation("default", "Block"), prepare=partial(checkpoint_activations, classes=again)
                 )  # fmt: skip
    for number in range(4):
        with model.micro_batch(last=number % 2 == 1):
            model.train_model(torch.ones(3, 4)).sum().backward()
    assert len(graphs) == 1
    with model.evaluation() as evaluated:
        evaluated(torch.ones(5, 4))
    assert len(graphs) == 1
    assert not any("_orig_mod" in key for key in model.eval_model.state_dict())
