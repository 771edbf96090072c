"""Which parameters get which settings, and what is frozen: matching and grouping as pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.optim import Optimizer

from ddpexp.config.compose import compose_command
from ddpexp.config.param_groups import check_param_groups
from ddpexp.config.parse import parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.settings.parameters import FreezeUntil, ParamGroup
from ddpexp.train.build_optimizers import build_optimizers
from ddpexp.train.freezing import LateStarts, count_text, freeze
from ddpexp.train.optimizers import group_suffixes, optimizer_state, parameter_names, restore_optimizer, settings
from ddpexp.train.param_groups import describe, group_texts, groups_of
from examples.param_groups.frozen_statistics import Classifier
from examples.param_groups.param_groups import VisionTransformer
from tests.examples import EXAMPLES
from tests.refusals import is_about, refused

TINY = ("recipe=mnist", "optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1")
ENTRIES = '[{match: ["backbone.*"], lr_scale: 0.1}, {match: "*.bias", weight_decay: 0}, {ndim: 1, betas: [0.8, 0.9]}]'


class Tied(nn.Module):
    """A table that is also the head, a backbone with normalization, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(6, 4)
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


@cache
def composed(*overrides: str) -> Mapping[str, Any]:
    result = compose_command([*TINY, *overrides])
    assert isinstance(result, ResolvedConfig)
    return result.values


def experiment_of(*overrides: str) -> Experiment:
    """Return the experiment with keys of the trainer, whose values are YAML: composing each takes too long."""
    keys = {}
    for override in overrides:
        key, _, value = override.partition("=")
        keys[key.removeprefix("trainer.")] = yaml.safe_load(value)
    values = composed()
    return parse({**values, "trainer": {**values["trainer"], **keys}})


def test_the_command_line_takes_lists_of_entries_and_changes_one() -> None:
    overrides = (
        f"trainer.param_groups={ENTRIES}",
        "trainer.freeze_until={step: 5, match: [a.*]}",
        "trainer.freeze=[b*]",
    )
    trainer = parse(composed(*overrides, "trainer.param_groups.0.lr_scale=0.2", "trainer.freeze_until.step=7")).trainer
    assert trainer.param_groups == (
        ParamGroup(match=("backbone.*",), lr_scale=0.2),
        ParamGroup(match="*.bias", settings={"weight_decay": 0}),
        ParamGroup(ndim=1, settings={"betas": [0.8, 0.9]}),
    )
    assert (trainer.freeze_until, trainer.freeze) == (FreezeUntil(7, ("a.*",)), ("b*",))
    assert experiment_of(f"trainer.param_groups={ENTRIES}").trainer.param_groups == (
        replace(trainer.param_groups[0], lr_scale=0.1), *trainer.param_groups[1:]
    )  # fmt: skip


def named(model: nn.Module, *overrides: str) -> dict[str, tuple[list[str], Mapping[str, Any]]]:
    """Return the names and the settings of each group, by its name."""
    described = list(describe({"model": model}, True).values())
    groups = groups_of(experiment_of(*overrides), described)
    assert groups is not None
    return {g.name: ([described[i].names[0] for i in g.members], g.settings) for g in groups}


def choose(model: nn.Module, *overrides: str) -> None:
    """Choose the parameters of groups, and of what is frozen."""
    experiment = experiment_of(*overrides)
    groups_of(experiment, list(describe({"model": model}, True).values()))
    freeze(model, experiment.trainer)
    LateStarts.of(experiment.trainer, {"model": model}, True)


def test_every_entry_that_matches_applies_and_later_ones_win() -> None:
    groups = named(
        Tied(),
        'trainer.param_groups=[{match: ["backbone.*"], lr_scale: 0.1}, {match: ["*.bias"], weight_decay: 0}, '
        "{match: [backbone.2.*], lr: 0.5, weight_decay: 0.3, betas: [0.8, 0.9]}]",
    )
    assert groups == {
        "other": (["scale", "embed.weight"], {}),
        "backbone": (["backbone.0.weight", "backbone.1.weight"], {"lr": 0.001}),
        "backbone-bias": (["backbone.0.bias", "backbone.1.bias"], {"lr": 0.001, "weight_decay": 0}),
        "backbone.2": (
            ["backbone.2.weight", "backbone.2.bias"], {"lr": 0.5, "weight_decay": 0.3, "betas": (0.8, 0.9)},
        ),
        "bias": (["head.bias"], {"weight_decay": 0}),
    }  # fmt: skip


def test_conditions_of_an_entry_are_met_together() -> None:
    groups = named(Tied(), 'trainer.param_groups=[{match: "backbone.*", ndim: 1, weight_decay: 0, name: plain}]')
    assert groups["plain"][0] == ["backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "backbone.2.bias"]


def test_a_list_in_place_of_a_section_of_the_recipe_needs_null_first() -> None:
    example = ("--config-dir", str(EXAMPLES / "param_groups/conf"), "recipe=param_groups")
    override = "trainer.freeze_until=[{step: 1, match: [a]}]"
    with refused("trainer.freeze_until: trainer.freeze_until=null"):
        compose_command([*example, override])
    with refused("trainer.param_groups: null"):
        compose_command([*example, "trainer.param_groups={match: [a], lr: 1}"])
    accepted = compose_command([*example, "trainer.freeze_until=null", override])
    assert isinstance(accepted, ResolvedConfig)
    assert accepted.values["trainer"]["freeze_until"] == [{"step": 1, "match": ["a"]}]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Embedding", ["embed.weight"]),
        ("'*Norm*'", ["backbone.1.weight", "backbone.1.bias"]),
        ("_BatchNorm", ["backbone.1.weight", "backbone.1.bias"]),  # a base class
        ("Sequential", [f"backbone.{i}.{name}" for i in range(3) for name in ("weight", "bias")]),
        ("[Embedding, BatchNorm1d]", ["embed.weight", "backbone.1.weight", "backbone.1.bias"]),
    ],
)
def test_a_type_is_that_of_a_layer_its_base_classes_or_what_is_around_it(kind: str, expected: list[str]) -> None:
    groups = named(Tied(), f"trainer.param_groups=[{{type: {kind}, weight_decay: 0, name: it}}]")
    assert groups["it"][0] == expected


def test_a_type_is_found_behind_what_sync_batchnorm_makes_of_it() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Tied())  # type: ignore[no-untyped-call]
    groups = named(model, "trainer.param_groups=[{type: BatchNorm1d, weight_decay: 0, name: it}]")
    assert groups["it"][0] == ["backbone.1.weight", "backbone.1.bias"]


def test_a_tied_parameter_has_several_names() -> None:
    groups = named(Tied(), "trainer.param_groups=[{match: [head.weight], lr_scale: 2}]")
    assert groups["head.weight"] == (["embed.weight"], {"lr": 0.02})


def test_several_models_stand_before_the_names() -> None:
    described = list(describe({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)}, False).values())
    [other, left] = groups_of(experiment_of("trainer.param_groups=[{match: [left.bias], lr: 1}]"), described) or []
    assert (other.members, left.members) == ((0, 2, 3), (1,))


def test_rates_fall_from_layer_to_layer_towards_the_input() -> None:
    groups = named(
        VisionTransformer(8, 3),
        "trainer.layer_decay={decay: 0.5, layers: [blocks.*]}",
        "trainer.param_groups=[{match: [head.bias], lr_scale: 10}]",
    )
    assert {name: values.get("lr") for name, (_, values) in groups.items()} == {
        "input": 0.01 / 16, "blocks.0": 0.01 / 8, "blocks.1": 0.01 / 4, "blocks.2": 0.01 / 2, "other": None,
        "head.bias": 0.1,
    }  # fmt: skip
    assert groups["input"][0] == ["positions", "embed.weight", "embed.bias"]
    assert groups["other"][0] == ["norm.weight", "norm.bias", "head.weight"]


def test_layers_may_be_named_one_by_one_in_their_own_order() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    groups = named(model, "trainer.layer_decay={decay: 0.5, layers: ['2', '1']}")
    rates = {name: values.get("lr") for name, (_, values) in groups.items()}
    assert rates == {"input": 0.00125, "1": 0.005, "2": 0.0025, "other": None}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "trainer.param_groups=[{match: [backbon.*], lr: 1}]",
            "trainer.param_groups[0].match=[backbon.*]",
        ),
        (
            "trainer.param_groups=[{match: [backbone], lr: 1}]",
            "trainer.param_groups[0].match=[backbone]",
        ),
        (
            "trainer.param_groups=[{match: ['*.bias', '*.gama'], lr: 1}]",
            "trainer.param_groups[0].match=[*.gama]",
        ),
        (
            "trainer.param_groups=[{match: [model.head.bias], lr: 1}]",
            "trainer.param_groups[0].match=[model.head.bias]",
        ),
        (
            "trainer.param_groups=[{type: LayerNorm, lr: 1}]",
            "trainer.param_groups[0].type=[LayerNorm]",
        ),
        (
            "trainer.param_groups=[{type: BatchNorm2d, lr: 1}]",
            "trainer.param_groups[0].type=[BatchNorm2d]",
        ),
        (
            "trainer.param_groups=[{ndim: [3, 4], lr: 1}]",
            "trainer.param_groups[0].ndim=[3,4]",
        ),
        (
            "trainer.param_groups=[{match: [scale], ndim: 1, lr: 1}]",
            "trainer.param_groups[0]",
        ),
        (
            "trainer.param_groups=[{match: ['*'], lr_scale: 0.1, weight_decay: 0}]",
            "trainer.param_groups[0]",
        ),
        (
            "trainer.layer_decay={decay: 0.5, layers: [blocks.*]}",
            "trainer.layer_decay.layers=[blocks.*]",
        ),
        (
            "trainer.layer_decay={decay: 0.5, layers: [backbone]}",
            "trainer.layer_decay.layers=[backbone]",
        ),
        (
            "trainer.freeze=[hed.*]",
            "trainer.freeze=[hed.*]",
        ),
        (
            "trainer.freeze=['*']",
            "trainer.freeze=[*]",
        ),
        (
            "trainer.freeze_until={step: 5, match: ['*']}",
            "trainer.freeze_until",
        ),
        (
            "trainer.freeze_until=[{step: 5, match: [back*]}, {step: 9, match: [embed]}]",
            "trainer.freeze_until[1].match=[embed]",
        ),
    ],
)  # fmt: skip
def test_what_matches_nothing_or_everything_is_refused_with_what_may_be_meant(override: str, expected: str) -> None:
    with refused(expected):
        choose(Tied(), override)


def test_what_is_frozen_for_the_run_cannot_begin_later() -> None:
    overrides = ("trainer.freeze=[backbone.*]", "trainer.freeze_until={step: 5, match: [backbone.0.*]}")
    with refused("trainer.freeze_until.match=[backbone.0.*]"):
        choose(Tied(), *overrides)


def test_a_layer_without_a_shape_is_chosen_by_name_only() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with refused("trainer.param_groups[0].ndim=[1]"):
        choose(model, "trainer.param_groups=[{ndim: 1, lr: 1}]")
    assert named(model, "trainer.param_groups=[{match: ['0.*'], lr: 1}]")["0"][0] == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("param_groups=[{match: [a], lr_scale: -1}]", "param_groups[0].lr_scale=-1"),
        ("param_groups=[{match: [a], weight_decay: low}]", "param_groups[0].weight_decay=low"),
        (
            "param_groups=[{match: [a], weight_decya: 0}]",
            "param_groups[0].weight_decya: did you mean trainer.param_groups[0].weight_decay?",
        ),
        (
            "param_groups=[{macth: [a], lr: 1}]",
            "param_groups[0].macth: did you mean trainer.param_groups[0].match?",
        ),
        (
            "param_groups=[{ndim: 1, momentum: 0.9}]",
            "param_groups[0].momentum: match, ndim, type, name, lr_scale, lr, weight_decay, foreach, maximize, "
            "differentiable, betas, eps, capturable, amsgrad, fused.",
        ),
        ("param_groups=[{lr: 1}]", "param_groups[0]: match=[...]"),
        ("param_groups=[{match: [a], name: b}]", "param_groups[0]: changes nothing"),
        ("param_groups=[{match: [a], lr: 1, lr_scale: 2}]", "param_groups[0]: lr=1 and lr_scale=2.0"),
        ("layer_decay={decay: 1, layers: [a]}", "layer_decay.decay=1"),
        ("layer_decay={decay: 0.5}", "layer_decay.layers: is missing"),
        ("freeze_until={steps: 5, match: [a]}", "freeze_until.steps: did you mean trainer.freeze_until.step?"),
        ("freeze_until=[{step: 0, match: [a]}]", "freeze_until[0].step=0"),
    ],
)
def test_values_that_mean_nothing_are_refused_before_any_worker_starts(override: str, expected: str) -> None:
    with refused(f"trainer.{expected}"):
        experiment_of(f"trainer.{override}")


def optimizers_of(model: nn.Module, task: Any, *overrides: str) -> Mapping[str, Optimizer]:
    return build_optimizers(experiment_of(*overrides), task, {"model": model}, True, model.parameters)


class Plain:
    """A task without optimizers of its own."""


def test_an_optimizer_has_the_groups_and_their_rates_are_recorded_by_name() -> None:
    override = 'trainer.param_groups=[{match: ["backbone.*"], lr_scale: 0.1}, {ndim: [0, 1], weight_decay: 0}]'
    model = Tied()
    optimizers = optimizers_of(model, Plain(), override)
    groups = [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizers["optimizer"].param_groups]
    assert groups == [
        ("ndim0-ndim1", 0.01, 0, 2), ("other", 0.01, 0.1, 1), ("backbone", 0.001, 0.1, 2),
        ("backbone-ndim0-ndim1", 0.001, 0, 4),
    ]  # fmt: skip
    assert group_suffixes(optimizers) == {
        "/ndim0-ndim1": 0, "/other": 1, "/backbone": 2, "/backbone-ndim0-ndim1": 3,
    }  # fmt: skip
    assert group_texts(experiment_of(override), {"model": model}, True) == [
        "ndim0-ndim1 7 (weight_decay=0)", "other 24", "backbone 32 (lr=0.001)",
        "backbone-ndim0-ndim1 16 (lr=0.001, weight_decay=0)",
    ]  # fmt: skip


def test_parameters_that_no_model_has_keep_the_settings_of_the_optimizer() -> None:
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    override = "trainer.param_groups=[{ndim: 1, weight_decay: 0}]"
    [optimizer] = build_optimizers(
        experiment_of(override), Plain(), {"model": model}, True, lambda: [*model.parameters(), temperature]
    ).values()
    groups = {group["name"]: group["params"] for group in optimizer.param_groups}
    assert [len(groups["other"]), len(groups["ndim1"])] == [2, 1]
    assert groups["other"][1] is temperature


def test_a_setting_that_the_optimizer_does_not_accept_is_refused() -> None:
    with refused("trainer.param_groups[0]: betas=[2, 0.9]"):
        optimizers_of(Tied(), Plain(), "trainer.param_groups=[{ndim: 1, betas: [2, 0.9]}]")


class Makes:
    """A task with two optimizers, one of which it may build itself."""

    def __init__(self, own: str) -> None:
        self.own = own

    def optimizers(self, model: Any, make: Any) -> dict[str, Optimizer]:
        head = list(model.head.parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in head)]
        by_itself = torch.optim.SGD(head, lr=0.1) if self.own == "itself" else None
        parameters = [{"params": head, "lr": 0.1}] if self.own == "groups" else head
        return {"rest": make(iter(rest)), "head": by_itself or make(parameters)}


def test_entries_apply_to_what_a_task_passes_to_make() -> None:
    override = "trainer.param_groups=[{match: ['*.bias'], weight_decay: 0}]"
    optimizers = optimizers_of(Tied(), Makes("make"), override)
    groups = {name: [g["name"] for g in optimizer.param_groups] for name, optimizer in optimizers.items()}
    assert groups == {"rest": ["other", "bias"], "head": ["other", "bias"]}
    for own in ("itself", "groups"):
        with pytest.raises(RefusedError) as caught:
            optimizers_of(Tied(), Makes(own), override)
        assert is_about(caught.value, "trainer.param_groups[0]")
    assert optimizers_of(Tied(), Makes("itself"), "trainer.param_groups=[{match: ['backbone.*'], weight_decay: 0}]")


def step(model: nn.Module, optimizer: Optimizer) -> None:
    loss = torch.stack([(p - 1).square().sum() for p in model.parameters()]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def test_a_run_resumes_with_other_groups_of_the_same_parameters() -> None:
    torch.manual_seed(0)
    model, override = Tied(), "trainer.param_groups=[{match: ['backbone.*'], lr_scale: 0.1}]"
    before = optimizers_of(model, Plain(), override)["optimizer"]
    built, names = settings(before), parameter_names({"model": model})
    step(model, before)
    saved = {**optimizer_state(before, names), "built": built}
    same = optimizers_of(model, Plain(), override)["optimizer"]
    assert restore_optimizer(same, saved, names, "optimizer") == ""
    other = optimizers_of(model, Plain(), "trainer.param_groups=[{ndim: 1, weight_decay: 0}]")["optimizer"]
    assert restore_optimizer(other, saved, names, "optimizer") == (
        "the checkpoint's optimizer has 2 parameter groups, and this run's 2, of the same parameters: their state is "
        "kept, with the settings of the new groups"
    )
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in other.param_groups] == [
        ("other", 0.01, 0.1), ("ndim1", 0.01, 0),
    ]  # fmt: skip
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], before.state[parameter]["exp_avg"])


def test_what_an_optimizer_changes_in_its_groups_is_not_mixed() -> None:
    model = nn.Linear(2, 2)
    names = parameter_names({"model": model})
    each: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    before = torch.optim.SGD(each, lr=0.1)
    built = settings(before)
    before.param_groups[0]["momentum"] = 0.5  # as optimizers do that adapt themselves
    saved = {**optimizer_state(before, names), "built": built}
    with refused("optimizer: momentum"):
        restore_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), saved, names, "optimizer")
    before.param_groups[1]["momentum"] = 0.5
    saved = {**optimizer_state(before, names), "built": built}
    after = torch.optim.SGD(model.parameters(), lr=0.1)
    restore_optimizer(after, saved, names, "optimizer")
    assert after.param_groups[0]["momentum"] == 0.5


def test_another_model_is_still_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    saved = {**optimizer_state(optimizer := torch.optim.SGD(model.parameters()), parameter_names({"m": model}))}
    with refused("o: state for m.bias"):
        restore_optimizer(
            torch.optim.SGD(other.parameters()),
            {**saved, "built": settings(optimizer)},
            parameter_names({"m": other}),
            "o",
        )


def test_what_is_frozen_is_counted() -> None:
    model = Tied()
    trainer = experiment_of(
        "trainer.freeze=backbone.0.*", "trainer.freeze_until={step: 500, match: [head.bias]}"
    ).trainer
    freeze(model, trainer)
    assert count_text(trainer, {"model": model}, True) == (
        "79 parameters (316 bytes; 59 trained, 20 frozen; 6 frozen until step 500)"
    )
    assert count_text(experiment_of().trainer, {"model": nn.Linear(2, 2)}, True) == "6 parameters (24 bytes)"


def test_a_late_start_beyond_the_end_is_remarked_upon() -> None:
    late = LateStarts.of(
        experiment_of("trainer.freeze_until={step: 5, match: [embed.*]}").trainer, {"model": Tied()}, True
    )
    assert late.never_reached(6) == []
    assert late.never_reached(5) == [
        "trainer.freeze_until.step=5 is not reached in 5 steps: embed.* will not be trained, as with "
        "trainer.freeze=[embed.*], which costs less."
    ]


def test_groups_count_what_is_trained_and_with_adapters_name_no_others() -> None:
    model = Tied()
    model.backbone.requires_grad_(False)
    overrides = ("trainer.param_groups=[{match: ['backbone.*'], lr_scale: 0.1}]",)
    texts = group_texts(experiment_of(*overrides), {"model": model}, True)
    assert [text.partition(" (")[0] for text in texts] == ["other 31", "backbone 0"]
    texts = group_texts(experiment_of(*overrides, "trainer.lora={match: [head]}"), {"model": model}, True)
    assert [text.partition(" (")[0] for text in texts] == ["other 31"]


def test_gradients_are_dropped_until_the_step() -> None:
    model = Tied()
    entries = "trainer.freeze_until=[{step: 2, match: [backbone.*]}, {step: 3, match: [backbone.0.*, scale]}]"
    late = LateStarts.of(experiment_of(entries).trainer, {"model": model}, True)
    trained = []
    for number in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        late.drop_gradients(number)
        trained.append(sorted({n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None}))
    assert trained == [["embed", "head"]] * 2 + [["backbone", "embed", "head"], ["backbone", "embed", "head", "scale"]]


def test_statistics_of_a_frozen_backbone_stay() -> None:
    model = Classifier(nn.Sequential(nn.BatchNorm2d(1), nn.Flatten()), nn.Linear(4, 2)).train()
    model(torch.randn(8, 1, 2, 2))
    assert torch.equal(model.get_buffer("backbone.0.running_mean"), torch.zeros(1))
    assert model.head.training


def test_no_weight_decay_is_accepted_of_an_optimizer_that_has_none() -> None:
    check_param_groups([ParamGroup(ndim=1, settings={"weight_decay": 0.0})], ["lr", "etas"])
    with refused("trainer.param_groups[0].weight_decay: lr"):
        check_param_groups([ParamGroup(ndim=1, settings={"weight_decay": 0.1})], ["lr", "etas"])
