"""Adapters: what is trained, with which first values, and what is left of them when they are merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.checkpoint.loading import load_weights
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.export.weights import export_adapters, export_weights
from ddpexp.settings.parameters import LoRA
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Shard
from ddpexp.train.lora import LoRALinear, add_adapters
from tests.checkpoint.test_writer import ALONE
from tests.conftest import Ddpexp
from tests.points import Recipe
from tests.refusals import refused
from tests.test_interruptions import CODE, has_steps, kill_everything, same, wait_for

LORA = LoRA(match=("body.*",), rank=2, alpha=6.0, train=("head.bias",))


def trainer(lora: LoRA | None = LORA, seed: int = 0) -> Trainer:
    composed = compose(["recipe=mnist"])
    assert composed is not None
    return replace(parse(composed.values).trainer, lora=lora, seed=seed)


def net() -> nn.ModuleDict:
    torch.manual_seed(1)
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), "head": nn.Linear(3, 2)})


def forward(model: nn.ModuleDict, rows: Tensor) -> Tensor:
    scores: Tensor = model["head"](model["body"](rows))
    return scores


def adapted(lora: LoRA = LORA, seed: int = 0) -> nn.ModuleDict:
    model = net()
    add_adapters(model, trainer(lora, seed))
    return model


def moved() -> nn.ModuleDict:
    """Return a model whose adapters add something."""
    model = adapted()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def test_adapters_and_what_is_named_are_trained_and_nothing_else() -> None:
    model, rows = adapted(), torch.randn(7, 4)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == [
        "body.0.lora_A.weight", "body.0.lora_B.weight", "body.2.lora_A.weight", "body.2.lora_B.weight", "head.bias",
    ]  # fmt: skip
    assert torch.equal(forward(model, rows), forward(net(), rows))  # they add nothing yet
    assert model.get_parameter("body.0.lora_A.weight").shape == (2, 4)
    assert model.get_submodule("body.0").extra_repr() == net().get_submodule("body.0").extra_repr()


def test_first_values_depend_on_the_seed_and_the_name_alone() -> None:
    name = "body.2.lora_A.weight"
    torch.rand(3)
    first = adapted().get_parameter(name)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    other = adapted(LoRA(match=("body.2",), rank=2)).get_parameter(name)
    assert torch.equal(first, other)
    assert not torch.equal(first, adapted(seed=1).get_parameter(name))
    torch.set_rng_state(state)
    plain = net()
    before = torch.get_rng_state()
    add_adapters(plain, trainer())
    assert torch.equal(torch.get_rng_state(), before)


def saved(folder: Path, model: nn.Module, lora: LoRA = LORA) -> Path:
    writer = Writer(folder, ALONE)
    text = yaml.safe_dump({"trainer": {"lora": {"match": list(lora.patterns), "rank": lora.rank, "alpha": lora.alpha,
                                                "train": list(lora.trained)}}}).encode()  # fmt: skip
    writer.save(4, Content({"model": model.state_dict()}, {"progress": {"step": 4}}, texts={"config.yaml": text}))
    writer.wait(end=True)
    return folder / "step-00000004"


def test_merged_weights_compute_the_same(tmp_path: Path) -> None:
    model, rows = moved(), torch.randn(9, 4)
    folder = saved(tmp_path / "checkpoints", model)
    expected = forward(model, rows)
    plain = net()
    load_weights({"model": plain}, folder, "run.init_from=x")  # into a model without adapters
    assert (forward(plain, rows) - expected).abs().max() < 1e-5
    assert (forward(plain, rows) - forward(net(), rows)).abs().max() > 1e-2
    files = export_weights(folder / "model.safetensors", tmp_path / "whole", 100)
    assert files[-1].name == "model.safetensors.index.json"
    exported = net()
    load_weights({"model": exported}, tmp_path / "whole", "x")
    assert torch.equal(forward(exported, rows), forward(plain, rows))
    parts = net()
    load_weights({"model": parts}, folder, "x", held=lambda tensor: Shard(tensor[1:], tuple(tensor.shape), 1))
    assert torch.equal(parts.get_parameter("body.2.weight")[1:], plain.get_parameter("body.2.weight")[1:])
    with refused("whole"):
        export_weights(folder / "model.safetensors", tmp_path / "whole", 100)


def filled(model: nn.Module, bits: int) -> nn.Module:
    """Give every parameter fractions of so many binary digits, whose products are exact in the dtype of a sum."""
    numbers = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = numbers.integers(-(2**bits) + 1, 2**bits, parameter.shape) / 2**bits
            parameter.copy_(torch.from_numpy(values))
    return model


def merged_plainly(model: nn.Module, layer: str, scale: float) -> Tensor:
    """Return W + (B A) scale, a number at a time, in fp64 for a weight in fp64 and else in fp32, rounded at the end."""
    weight = model.get_parameter(f"{layer}.weight")
    number = np.float64 if weight.dtype == torch.float64 else np.float32
    before, first, second = (
        model.get_parameter(f"{layer}.{name}").detach().to(torch.float64).tolist()
        for name in ("weight", "lora_A.weight", "lora_B.weight")
    )
    rows = [
        [
            number(value) + number(sum(b * a[column] for b, a in zip(second[row], first, strict=True))) * number(scale)
            for column, value in enumerate(values)
        ]
        for row, values in enumerate(before)
    ]
    assert all(isinstance(value, number) for row in rows for value in row)
    return torch.from_numpy(np.array(rows)).to(weight.dtype)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float64, 25), (torch.float32, 11), (torch.bfloat16, 8), (torch.float16, 10)], ids=str
)
def test_merged_weights_are_rounded_once_to_their_own_dtype(tmp_path: Path, dtype: torch.dtype, bits: int) -> None:
    lora = replace(LORA, rank=3, alpha=1.0)  # a scale of a third, which fp32 rounds otherwise than fp64
    model = net().to(dtype)
    add_adapters(model, trainer(lora))
    folder = saved(tmp_path / "checkpoints", filled(model, bits), lora)
    plain = net().to(dtype)
    load_weights({"model": plain}, folder, "run.init_from=x")
    export_weights(folder / "model.safetensors", tmp_path / "whole", 1 << 30)
    exported = load_file(tmp_path / "whole/model.safetensors")
    for layer in ("body.0", "body.2"):
        expected = merged_plainly(model, layer, 1 / 3)
        assert torch.equal(plain.get_parameter(f"{layer}.weight"), expected)
        assert exported[f"{layer}.weight"].dtype == dtype
        assert torch.equal(exported[f"{layer}.weight"], expected)


@pytest.mark.parametrize(
    ("weight", "first", "expected"),
    [
        # Half an ulp of 1 and a little more: fp32 would lose the little and round to even, which is 1.
        (torch.ones(1, 1), torch.full((1, 1), 2.0**-24 + 2.0**-50, dtype=torch.float64), 1 + 2.0**-23),
        (torch.full((1, 1), 1 + 2.0**-40, dtype=torch.float64), torch.full((1, 1), 0.5), 1.5 + 2.0**-40),
        (torch.full((1, 1), 1j), torch.full((1, 1), 1 + 2j), 1 + 3j),
    ],
    ids=["fp64 factors", "fp64 weight", "complex"],
)
def test_factors_and_weights_of_other_dtypes_lose_nothing(
    tmp_path: Path, weight: Tensor, first: Tensor, expected: complex
) -> None:
    model = nn.ModuleDict({"head": nn.Linear(1, 1, bias=False, dtype=weight.dtype)})
    add_adapters(model, trainer(lora := LoRA(match="head", rank=1, alpha=1.0)))
    layer = model["head"]
    assert isinstance(layer, LoRALinear)
    layer.weight.data, layer.lora_A.weight.data, layer.lora_B.weight.data = weight, first, torch.ones_like(first)
    plain = nn.ModuleDict({"head": nn.Linear(1, 1, bias=False, dtype=weight.dtype)})
    load_weights({"model": plain}, saved(tmp_path, model, lora), "x")
    assert plain.get_parameter("head.weight").item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_some_rows_of_a_merged_weight_have_the_bits_of_the_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    lora, name = LoRA(match="head", rank=8), "head.weight"
    torch.manual_seed(3)
    model = nn.ModuleDict({"head": nn.Linear(32, 64)}).to(dtype)
    add_adapters(model, trainer(lora))
    torch.nn.init.normal_(model.get_parameter("head.lora_B.weight"))
    folder = saved(tmp_path, model, lora)
    whole = nn.ModuleDict({"head": nn.Linear(32, 64)}).to(dtype)
    load_weights({"model": whole}, folder, "x")
    for begin, end in ((0, 1), (1, 2), (1, 64), (21, 23)):
        part = nn.ModuleDict({"head": nn.Linear(32, 64)}).to(dtype)
        load_weights({"model": part}, folder, "x", held=rows_between(begin, end))
        assert torch.equal(part.get_parameter(name)[begin:end], whole.get_parameter(name)[begin:end]), (begin, end)


def rows_between(begin: int, end: int) -> Callable[[Tensor], Shard]:
    return lambda tensor: Shard(tensor[begin:end], tuple(tensor.shape), begin)


def test_adapters_alone_have_the_names_of_peft(tmp_path: Path) -> None:
    model = moved()
    folder = saved(tmp_path / "checkpoints", model)
    export_adapters(folder / "model.safetensors", tmp_path / "adapters")
    tensors = load_file(tmp_path / "adapters/adapter_model.safetensors")
    layers = [f"base_model.model.body.{number}.lora_{letter}.weight" for number in (0, 2) for letter in "AB"]
    assert sorted(tensors) == sorted([*layers, "base_model.model.head.bias"])
    assert torch.equal(tensors[layers[1]], model.get_parameter("body.0.lora_B.weight"))
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 6.0, ["body.0", "body.2"])


def test_adapters_are_continued_with_the_same_scale_alone(tmp_path: Path) -> None:
    model = moved()
    folder = saved(tmp_path / "checkpoints", model)
    again = adapted()
    load_weights({"model": again}, folder, "x", lora=LORA)
    assert torch.equal(again.get_parameter("body.0.lora_B.weight"), model.get_parameter("body.0.lora_B.weight"))
    with refused("x: trainer.lora.rank=2 trainer.lora.alpha=6"):
        load_weights({"model": again}, folder, "x", lora=replace(LORA, alpha=1.0))
    with refused("model.safetensors: the configuration of their run"):
        load_weights({"model": net()}, (folder / "model.safetensors").rename(tmp_path / "model.safetensors"), "x")


class Other(nn.Linear):
    """A layer that computes something of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("model", "pattern", "sentence"),
    [
        (net(), "bodi.*", "body.0, body.2, head"),
        (nn.Sequential(nn.Embedding(3, 2)), "0", "0 is a Embedding"),
        (nn.Sequential(Other(3, 2)), "*", "a Other with a forward"),
        (
            nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)}),
            "*",
            "attention.out_proj",
        ),
    ],
)
def test_what_cannot_have_adapters_is_refused(model: nn.Module, pattern: str, sentence: str) -> None:
    with refused(f"trainer.lora.match=[{pattern}]: {sentence}"):
        add_adapters(model, trainer(LoRA(match=pattern)))


def test_a_pattern_of_parameters_that_matches_none_is_refused() -> None:
    with refused("trainer.lora.train=[hed.*]"):
        adapted(LoRA(match="body.*", train="hed.*"))


def test_the_fast_path_of_evaluation_does_not_pass_over_adapters() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    rows = torch.randn(2, 3, 8)
    with torch.no_grad():
        before = model(rows)
        add_adapters(model, trainer(LoRA(match="*.linear1")))
        assert torch.allclose(model(rows), before, atol=1e-6)
        layer = model[0].linear1
        assert isinstance(layer, LoRALinear)
        layer.lora_B.weight.normal_()
        assert not torch.allclose(model(rows), before, atol=1e-2)


RUN = (
    "model._target_=points.Deep", "model.dropout=0.2", "task._target_=points.Drawing", "trainer.gpus=2", "trainer.epochs=null", "trainer.max_steps=40",
    "trainer.checkpoint_every=5", "trainer.ema_decay=0.9", "trainer.lora={match:['*'],rank:2,dropout:0.1}",
)  # fmt: skip


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What training does is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("lora"), environ), CODE)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_killed_runs_with_adapters_end_like_an_undisturbed_one(recipe: Recipe, kills: int) -> None:
    expected = recipe(*RUN)
    assert expected.code == 0, expected.err
    weights = load_file(complete_checkpoints(expected.run / "checkpoints")[0] / "model.safetensors")
    assert any("lora_B" in name and tensor.any() for name, tensor in weights.items())
    while kills:
        run = None
        for step in (7, 18, 29):
            process, run = recipe.start(*RUN, run=run, environ={"PACE": "0.02"})
            wait_for(has_steps(run, step), process)
            kill_everything(process, run)
            if not (kills := kills - 1):
                break
        same(recipe(*RUN, "strategy=fsdp", run=run), expected)
