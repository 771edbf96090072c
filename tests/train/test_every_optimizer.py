"""Every optimizer of the configuration: with each strategy, with accumulation, in low precision, saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ddpexp.config.compose import compose
from ddpexp.config.folders import conf_folder, options
from ddpexp.config.parse import parse
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.settings.node import Node
from ddpexp.strategy.sharded_optimizer import can_be_cut
from ddpexp.train.build_optimizers import build_optimizers
from ddpexp.train.combined_optimizer import Combined
from ddpexp.train.optimizers import optimizer_state, parameter_names, restore_optimizer, settings
from ddpexp.train.precision import Precision
from tests.fitting import ALONE
from tests.refusals import is_about, refused
from tests.strategy.fsdp.ranks import OPTIONS as SHARDED

OPTIMIZERS = options("optimizer", [conf_folder()])
STEPS = 3


class Net(nn.Module):
    """An embedding, a matrix, a norm and a head."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, sparse=sparse)
        self.hidden = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        """Shapes: (samples, 4) to (samples, 3)."""
        result: Tensor = self.head(self.norm(torch.tanh(self.hidden(self.embedding(rows).mean(1)))))
        return result


@pytest.fixture(scope="module")
def experiments() -> Mapping[str, Experiment]:
    found = {}
    for name in OPTIMIZERS:
        made = compose(["recipe=mnist", f"optimizer={name}"])
        found[name] = parse(made.values)
    return found


def net(name: str) -> Net:
    torch.manual_seed(0)
    return Net(sparse=name == "sparse_adam")


def build(experiment: Experiment, model: nn.Module, task: Any = None) -> Optimizer:
    made = build_optimizers(experiment, task, {"model": model}, True, model.parameters)
    return made["optimizer"]


def take_steps(model: nn.Module, optimizer: Optimizer, count: int, parts: int = 1, fp16: bool = False) -> None:
    """Train on a batch of integers, in `parts` micro-batches."""
    precision = Precision("fp16" if fp16 else "fp32", ALONE.device, False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        rows, labels = (torch.randint(0, top, shape, generator=generator) for top, shape in ((11, (8, 4)), (3, (8,))))
        for part, targets in zip(rows.chunk(parts), labels.chunk(parts), strict=True):
            loss = functional.cross_entropy(model(part).float(), targets, reduction="sum")
            precision.backward(loss, torch.tensor(1 / 8))
        precision.unscale(optimizer)
        assert precision.step(optimizer)
        precision.update()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_is_saved_and_restored(experiments: Mapping[str, Experiment], name: str) -> None:
    model = net(name)
    optimizer, before = build(experiments[name], model), weights(model)
    built = settings(optimizer)
    take_steps(model, optimizer, STEPS)
    middle = weights(model)
    assert all(not torch.equal(before[key], tensor) for key, tensor in middle.items())
    saved = deepcopy({**optimizer_state(optimizer, parameter_names({"model": model})), "built": built})
    again = net(name)
    again.load_state_dict(middle)
    other = build(experiments[name], again)
    restore_optimizer(other, saved, parameter_names({"model": again}), "optimizer")
    for one, through in ((model, optimizer), (again, other)):
        take_steps(one, through, STEPS)
    assert same(weights(model), weights(again))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulation_and_fp16s_scale_change_no_more_than_rounding(
    experiments: Mapping[str, Experiment], name: str
) -> None:
    ends = []
    for parts, fp16 in ((1, False), (4, False), (1, True)):
        model = net(name)
        take_steps(model, build(experiments[name], model), 1, parts, fp16)
        ends.append(weights(model))
    first, *others = ends
    for other in others:
        for key, tensor in first.items():
            assert torch.allclose(other[key], tensor, rtol=1e-3, atol=2e-4), key


def test_muon_gets_the_matrices_of_hidden_layers_and_adamw_the_rest(experiments: Mapping[str, Experiment]) -> None:
    experiment, model = experiments["muon"], net("muon")
    optimizer = build(experiment, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["name"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups}
    assert groups == {
        "adamw": ["embedding.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"],
        "muon": ["hidden.weight"],
    }
    reference = net("muon")
    both: tuple[Any, ...] = (
        torch.optim.Muon([reference.hidden.weight], 0.001, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [p for p in reference.parameters() if p is not reference.hidden.weight], 0.001, (0.9, 0.95), 1e-8, 0.1
        ),
    )
    take_steps(model, optimizer, STEPS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        rows, labels = (torch.randint(0, top, shape, generator=generator) for top, shape in ((11, (8, 4)), (3, (8,))))
        torch.autograd.backward(functional.cross_entropy(reference(rows), labels, reduction="sum").mul(1 / 8))
        for one in both:
            one.step()
            one.zero_grad()
    assert same(weights(model), weights(reference))


def test_the_parts_of_a_combined_optimizer_follow_the_groups_and_rates_of_the_configuration(
    experiments: Mapping[str, Experiment],
) -> None:
    made = compose([
        "recipe=mnist", "optimizer=muon", "trainer.param_groups=[{match: ['hidden.*'], lr_scale: 0.1}]",
    ])  # fmt: skip
    model = net("muon")
    optimizer = build(parse(made.values), model)
    assert [(group["name"], group["lr"], len(group["params"])) for group in optimizer.param_groups] == [
        ("other-adamw", 0.001, 5), ("hidden-muon", 0.0001, 1), ("hidden-adamw", 0.0001, 1),
    ]  # fmt: skip

    class Task:
        def optimizers(self, model: Any, make: Callable[[Any], Optimizer]) -> Mapping[str, Optimizer]:
            slow = {"params": model.hidden.parameters(), "lr": 0.5}
            return {"optimizer": make([slow, {"params": model.head.parameters()}])}

    optimizer = build(experiments["muon"], model, Task())
    assert [(group["name"], group["lr"]) for group in optimizer.param_groups] == [
        ("muon", 0.5), ("adamw", 0.5), ("adamw", 0.001),
    ]  # fmt: skip


def test_sparse_adam_gets_the_sparse_gradients(experiments: Mapping[str, Experiment]) -> None:
    optimizer = build(experiments["sparse_adam"], net("sparse_adam"))
    assert {group["name"]: len(group["params"]) for group in optimizer.param_groups} == {"sparse_adam": 1, "adamw": 6}


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("sparse_adam", {}, "optimizer=sparse_adam"),
        ("muon", {"adamw": ("*",)}, "optimizer=muon"),
    ],
)
def test_a_model_that_an_optimizer_is_not_for_is_refused(
    experiments: Mapping[str, Experiment], name: str, keys: Mapping[str, Any], sentence: str
) -> None:
    node = experiments[name].optimizer
    experiment = replace(experiments[name], optimizer=Node(node.target, {**node.kwargs, **keys}))
    with pytest.raises(RefusedError) as caught:
        build(experiment, Net(sparse=False))
    assert is_about(caught.value, sentence)


def test_torchs_muon_alone_is_refused_with_what_to_use(experiments: Mapping[str, Experiment]) -> None:
    experiment = replace(experiments["muon"], optimizer=Node("torch.optim.Muon", {"lr": 0.1}))
    with refused("optimizer._target_=torch.optim.Muon"):
        build(experiment, net("muon"))


@pytest.mark.parametrize("name", ["adafactor", "rprop", "sparse_adam"])
def test_what_sharded_gradients_cannot_serve_is_refused(experiments: Mapping[str, Experiment], name: str) -> None:
    with refused("optimizer._target_"):
        SHARDED.check(experiments[name])
    experiments[name].strategy.check(experiments[name])


ELEMENTWISE = set(OPTIMIZERS) - {"lbfgs", "muon", "sparse_adam", "adafactor"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_cut_between_rows_where_that_gives_the_same_bits(
    experiments: Mapping[str, Experiment], name: str
) -> None:
    model = net(name)
    optimizer = build(experiments[name], model)
    assert can_be_cut(optimizer) == (name in ELEMENTWISE)
    assert isinstance(optimizer, Combined) == (name in ("muon", "sparse_adam"))
