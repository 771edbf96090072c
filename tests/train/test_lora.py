"""Adapters: what is trained, with which first values, and what is left of them when they are merged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from ddpexp.checkpoint.export import export_adapters, export_weights
from ddpexp.checkpoint.format import newest_checkpoint
from ddpexp.checkpoint.loading import load_weights
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.config.schema import LoRA, Trainer
from ddpexp.errors import RefusedError
from ddpexp.strategy.base import Shard
from ddpexp.train.lora import LoRALinear, add_adapters
from tests.checkpoint.test_writer import ALONE
from tests.conftest import Ddpexp
from tests.points import Recipe
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
    with pytest.raises(RefusedError, match="is no empty folder: export into a new one"):
        export_weights(folder / "model.safetensors", tmp_path / "whole", 100)


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
    with pytest.raises(RefusedError, match=r"use trainer\.lora\.rank=2 trainer\.lora\.alpha=6\.$"):
        load_weights({"model": again}, folder, "x", lora=replace(LORA, alpha=1.0))
    with pytest.raises(RefusedError, match=r"alpha / rank\) is in the configuration of their run"):
        load_weights({"model": net()}, (folder / "model.safetensors").rename(tmp_path / "model.safetensors"), "x")


class Other(nn.Linear):
    """A layer that computes something of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("model", "pattern", "sentence"),
    [
        (net(), "bodi.*", r"matches no module of the model\. Its linear layers are body\.0, body\.2, head\."),
        (nn.Sequential(nn.Embedding(3, 2)), "0", r"matches no torch\.nn\.Linear, .*: 0 is a Embedding\."),
        (nn.Sequential(Other(3, 2)), "*", "0 is a Other with a forward of its own"),
        (
            nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)}),
            "*",
            "uses the weight of attention.out_proj without",
        ),
    ],
)
def test_what_cannot_have_adapters_is_refused(model: nn.Module, pattern: str, sentence: str) -> None:
    with pytest.raises(RefusedError, match=rf"^trainer\.lora\.match=\[.*\]:? ?.*{sentence}"):
        add_adapters(model, trainer(LoRA(match=pattern)))


def test_a_pattern_of_parameters_that_matches_none_is_refused() -> None:
    with pytest.raises(
        RefusedError, match=r"^trainer\.lora\.train=\[hed\.\*\] matches no parameter of the model, such"
    ):
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


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_killed_runs_with_adapters_end_like_an_undisturbed_one(recipe: Recipe, kills: int) -> None:
    expected = recipe(*RUN)
    assert expected.code == 0, expected.err
    weights = load_file(newest_checkpoint(expected.run / "checkpoints") / "model.safetensors")
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
