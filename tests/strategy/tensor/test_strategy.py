"""Tensor parallelism: against one process, its checkpoints, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddpexp.launch import Layout
from ddpexp.strategy.base import Shard
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.mesh import DataRank
from ddpexp.strategy.tensor.cut import Cut, Share
from ddpexp.strategy.tensor.options import DividedLayers
from ddpexp.strategy.tensor.plan import layers_of
from recipes.gpt import GPT
from tests.conftest import Ddpexp, Done
from tests.fitting import asked
from tests.refusals import command_refused, refused
from tests.strategy.on_ranks import works

OPTIONS = FSDPOptions(
    kind="fsdp", blocks=None, min_block_mb=0.001, reshard_after_forward=True, broadcast_buffers=True,
    reduce_through="auto", whole=(), dp_replicate_size=1, gather_in_evaluation=True, init="whole", tp_size=2,
)  # fmt: skip


@pytest.mark.variants(1)
@pytest.mark.parametrize(("case", "size"), [("equal", 2), ("equal", 4), ("inputs", 2), ("tokens", 2)])
def test_ranks_train_to_the_weights_of_one_process(case: str, size: int, tmp_path: Path, forked_servers: None) -> None:
    works("tests.strategy.tensor.ranks", case, size, tmp_path / "logs")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [(12,), (8, 2, 2), (4, 4, 4)])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_the_shares_of_all_ranks_are_the_whole_tensor(dim: int, parts: tuple[int, ...], num_shards: int) -> None:
    whole = torch.arange(144.0).view(12, 12)
    cut = Cut((12, 12), dim, parts, 2)
    built = torch.full_like(whole, -1)
    for rank in range(2):
        share = Share(cut, rank)
        own = share.take(whole)
        assert own.shape == share.shape
        first = 0
        for local in own.tensor_split(num_shards):  # as the other dimension shards it
            shard = share.shard(local, first, 0)
            first += len(local)
            assert torch.equal(shard.read(lambda begin, count: whole[begin : begin + count]), local)
            _put(built, shard)
    assert torch.equal(built, whole)


def _put(out: Tensor, shard: Shard) -> None:
    rows = [row for block in shard.blocks for row in block]
    columns = [column for block in shard.columns or (range(out.shape[1]),) for column in block]
    assert bool((out[rows][:, columns] == -1).all())
    for row, values in zip(rows, shard.tensor, strict=True):
        out[row, columns] = values


def test_ranks_of_a_group_share_the_data() -> None:
    ranks = [OPTIONS.data_rank(rank, 4) for rank in range(4)]
    assert ranks == [DataRank(0, 2), DataRank(0, 2, False), DataRank(1, 2), DataRank(1, 2, False)]


def gpt(**options: Any) -> nn.Module:
    sizes = {"vocab_size": 11, "block_size": 4, "num_layers": 2, "num_heads": 4, "width": 16, **options}
    with torch.device("meta"):
        return GPT(**sizes)


class Usual(nn.Module):
    """Has the names of transformers' decoders."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.embed_tokens, self.layer = nn.Embedding(8, 12), nn.Module()
        self.layer.head_dim = 4  # type: ignore[assignment]
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self.layer, name, nn.Linear(12, 4 * heads))
        self.layer.o_proj = nn.Linear(4 * heads, 12)
        self.layer.up_proj, self.layer.down_proj = nn.Linear(12, 8), nn.Linear(8, 12)


def test_a_plan_must_say_where_tokens_are_divided() -> None:
    styles = [layer.style for layer in layers_of({"model": gpt()}, None, 2, by_tokens=True)]
    assert styles.count("sequence") == 8
    assert {"sequence_begin", "sequence_end"} < set(styles)
    assert not any(layer.is_between for layer in layers_of({"model": gpt()}, None, 2))
    with refused("strategy.sequence_parallel=true: sequence_begin and sequence_end"):
        layers_of({"model": Usual(4)}, None, 2, by_tokens=True)


def test_decoders_of_transformers_need_no_plan() -> None:
    layers = layers_of({"model": Usual(4)}, None, 2)
    styles = {layer.name.removeprefix("layer."): layer.style for layer in layers}
    assert styles == {
        "embed_tokens": "embedding_rowwise", "q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise",
        "o_proj": "rowwise", "up_proj": "colwise", "down_proj": "rowwise",
    }  # fmt: skip
    with refused("strategy.tp_size=2: strategy.tp_size=3"):
        layers_of({"model": Usual(3)}, None, 2)


@pytest.mark.parametrize(
    ("model", "size", "plan", "expected"),
    [
        (gpt(), 3, None, "strategy.tp_size=3: strategy.tp_size=2 or 4"),
        (gpt(num_kv_heads=2), 4, None, "strategy.tp_size=4: strategy.tp_size=2"),
        (gpt(tied=False), 2, None, "strategy.tp_size=2: strategy.tp_size=11"),
        (nn.Linear(2, 2), 2, None, "strategy.tp_size=2: 'strategy.tp_plan="),
        (gpt(), 2, DividedLayers("h.*.foo", "colwise"), "h.*.foo: no module"),
        (gpt(), 2, DividedLayers("h.*.ln_1", "colwise"), "h.0.ln_1: LayerNorm"),
        (gpt(), 2, DividedLayers("wte", "colwise"), "wte: Embedding"),
        (gpt(), 2, DividedLayers("h.0.mlp.c_fc", "colwise", (3, 3)), "h.0.mlp.c_fc: 3 + 3"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(
    model: nn.Module, size: int, plan: DividedLayers | None, expected: str
) -> None:
    with refused(expected):
        layers_of({"model": model}, None if plan is None else [plan], size)


@pytest.mark.parametrize(
    ("options", "trainer", "expected"),
    [
        ({"tp_size": 1, "tp_plan": (DividedLayers("a", "colwise"),)}, {}, "strategy.tp_plan: strategy.tp_size=2"),
        ({"tp_size": 1, "sequence_parallel": True}, {}, "strategy.sequence_parallel=true: strategy.tp_size=2"),
        ({"tp_plan": (DividedLayers((), "colwise"),)}, {}, "strategy.tp_plan[0].match: empty"),
        ({"tp_plan": (DividedLayers("a", "colwise", (0,)),)}, {}, "strategy.tp_plan[0]: above 0"),
        ({}, {"reduction": "exact"}, "strategy.tp_size=2: trainer.reduction=exact"),
        ({"offload": True}, {}, "strategy.tp_size=2: strategy.offload=true"),
        ({"reduce_through": "shared_memory"}, {}, "strategy.tp_size=2: strategy.reduce_through=shared_memory"),
    ],
)
def test_what_cannot_be_combined_is_refused(options: dict[str, Any], trainer: dict[str, Any], expected: str) -> None:
    with refused(expected):
        replace(OPTIONS, **options).check(asked(**trainer))


@pytest.mark.parametrize(
    ("options", "size", "expected"),
    [
        ({}, 3, "strategy.tp_size=2: use 1 or 3."),
        ({"dp_replicate_size": 2}, 4, "strategy.dp_replicate_size=2: use strategy.dp_replicate_size=1"),
        ({"dp_replicate_size": 4}, 4, "strategy.dp_replicate_size=4: use 1."),
    ],
)
def test_the_sizes_must_divide_the_workers(options: dict[str, Any], size: int, expected: str) -> None:
    with refused(expected):
        replace(OPTIONS, **options).check_layout(asked(), Layout(1, size, "cpu", "gloo", 1), 1)


MODEL = (
    "model.vocab_size=66", "model.tied=false", "model.mlp=swiglu", "model.num_kv_heads=2", "model.width=32",
    "model.num_layers=2",
)  # fmt: skip
COMMON = (
    "recipe=gpt",
    *MODEL,
    "trainer.threads=1",
    "trainer.eval_every=0",
    "trainer.ema_decay=0.9",
    "scheduler=constant",
)
TENSOR = ("strategy=fsdp", "strategy.tp_size=2")


class Train:
    """Train a small GPT on a text."""

    def __init__(self, ddpexp: Ddpexp) -> None:
        self.ddpexp, self.text = ddpexp, ddpexp.folder / "text.txt"
        self.text.write_text("".join(f"{number} is the number after {number - 1}. " for number in range(2000)))

    def __call__(self, name: str, *overrides: str, environ: dict[str, str] | None = None) -> Done:
        run = self.ddpexp.folder / name
        return replace(
            self.ddpexp(*COMMON, f"data.path={self.text}", f"run.dir={run}", *overrides, environ=environ), run=run
        )


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Train:
    return Train(Ddpexp(tmp_path_factory.mktemp("tensor"), warm_environ))


def weights(done: Done) -> dict[str, Tensor]:
    [*_, newest] = sorted((done.run / "checkpoints").glob("step-*"))
    files = ("model.safetensors", "model.ema.safetensors", "state.optimizers.safetensors")
    return {f"{file}/{name}": tensor for file in files for name, tensor in load_file(newest / file).items()}


@pytest.mark.slow
def test_every_strategy_resumes_its_checkpoints_and_it_resumes_theirs(train: Train) -> None:
    whole = train("whole", "trainer.max_steps=6", "trainer.gpus=1")
    assert whole.code == 0, whole.err
    for steps, gpus, strategy in (
        (2, 2, TENSOR), (4, 2, ("strategy=ddp", "strategy.shard_optimizer=true")),
        (6, 4, (*TENSOR, "strategy.init=replay", "strategy.sequence_parallel=true")),
    ):  # fmt: skip
        done = train("in turn", f"trainer.max_steps={steps}", f"trainer.gpus={gpus}", *strategy)
        assert done.code == 0, done
    expected, found = weights(whole), weights(done)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-5, msg=name)
    assert "the last digits of the weights differ" in done.out


@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_same_bits(train: Train) -> None:
    overrides = (*TENSOR, "trainer.gpus=2", "trainer.max_steps=6", "trainer.checkpoint_every=2")
    whole = train("undisturbed", *overrides)
    killed = train("killed", *overrides, environ={"DDPEXP_FAULT": "step:kill:1:5"})
    assert (whole.code, killed.code) == (0, 1), whole.err + killed.err
    done = train("killed", *overrides)
    assert "resumed after step" in done.out
    assert done.result()["weights_sha256"] == whole.result()["weights_sha256"]
    assert {name: tensor.tolist() for name, tensor in weights(done).items()} == {
        name: tensor.tolist() for name, tensor in weights(whole).items()
    }


@pytest.mark.slow
def test_a_layer_that_does_not_divide_is_named_before_workers_start(train: Train) -> None:
    done = train("refused", "strategy=fsdp", "strategy.tp_size=3", "trainer.gpus=3")
    command_refused(done, "strategy.tp_size=3: 4 heads", out=None)
    assert not (done.run / "ranks").exists()


@pytest.mark.slow
def test_the_plan_counts_what_a_rank_of_a_group_holds(train: Train) -> None:
    words = ("--json", "trainer.gpus=2", "trainer.max_steps=1", "trainer.ema_decay=null")
    planned = train.ddpexp("plan", *COMMON, *TENSOR, f"data.path={train.text}", *words)
    assert planned.code == 0, planned.err
    facts = json.loads(planned.out)
    parts = {part["name"]: part["num_bytes"] for part in facts["memory"]["parts"]}
    with torch.device("meta"):
        model = GPT(66, 64, 2, 4, 32, num_kv_heads=2, mlp="swiglu", tied=False)
    whole = ("wpe.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    bytes_of_a_rank = sum(4 * p.numel() // (1 if name.endswith(whole) else 2) for name, p in model.named_parameters())
    assert parts["parameters"] == bytes_of_a_rank
    assert parts["optimizer"] == pytest.approx(2 * bytes_of_a_rank, rel=0.01)
    options = (*TENSOR, "strategy.sequence_parallel=true")
    planned = train.ddpexp("plan", *COMMON, *options, f"data.path={train.text}", *words)
    fewer = {part["name"]: part["num_bytes"] for part in json.loads(planned.out)["memory"]["parts"]}
    assert fewer["parameters"] == parts["parameters"]
    assert fewer["activations"] < 0.9 * parts["activations"]
