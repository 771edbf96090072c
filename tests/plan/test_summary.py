"""`ddpexp summary`: the tree of a model, and what a pass takes, compared with counts by hand and with real passes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.cli.summary import summary
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.plan.model_tree import Module, Summary
from ddpexp.plan.show_summary import show
from ddpexp.plan.summarize import summarize
from ddpexp.run.prepare import prepare
from ddpexp.system.text import flops_text
from ddpexp.train.build import build_model
from tests.conftest import SMALL, Ddpexp
from tests.refusals import refused
from tests.test_user_recipes import write
from tests.typed import call

MODELS = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, reads=False, fails=False, lazy=False):
        super().__init__()
        self.first = nn.LazyLinear(16) if lazy else nn.Linear(784, 16)
        self.again = nn.Linear(16, 16)
        self.alias = self.again
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.again.weight
        self.norm = nn.BatchNorm1d(16)
        self.unused = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Linear(16, 10)])
        self.reads, self.fails = reads, fails
    def forward(self, images):
        hidden = self.first(images.flatten(1))
        if self.fails:
            raise ValueError("no pass\\n" + "x" * 500)
        if self.reads and hidden.sum().item() == 0.5:
            hidden = hidden + 1
        return self.layers[0](self.norm(self.tied(self.again(self.again(hidden)))))

def pair():
    return {"one": nn.Linear(2, 3), "other": nn.Linear(3, 2)}
"""
SHARED, UNUSED = 16 * 16, 12
TOTAL = 784 * 16 + 16 + SHARED + 16 + 2 * 16 + UNUSED + 170
FORWARD = 2 * (784 * 16 + 3 * SHARED + 160)


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, digits_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a user's own, and the digits."""
    monkeypatch.delitem(sys.modules, "nets", raising=False)  # another test's
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(digits_cache))
    monkeypatch.setattr("ddpexp.plan.meta.bound_memory", lambda: None)  # it would bind this process
    write(tmp_path / "project/nets.py", MODELS)
    write(tmp_path / "project/conf/model/net.yaml", "_target_: nets.Net\nreads: false\nfails: false\nlazy: false\n")


def experiment(folder: Path, *words: str) -> Any:
    small = [word for word in SMALL if not word.startswith("model=")]
    return parse(compose(["--config-dir", str(folder / "project/conf"), *small, *words]).values)


def summary_of(folder: Path, *words: str) -> Summary:
    asked = experiment(folder, *words)
    return summarize(asked, prepare(asked.data, asked.trust))


def by_path(found: Summary) -> dict[str, Module]:
    return {module.path: module for module in found.modules}


def test_a_linear_model_is_counted_as_by_hand(tmp_path: Path) -> None:
    found = summary_of(tmp_path, "model=linear")
    assert (found.trainable, found.frozen, found.shared, found.parameters_bytes) == (7850, 0, 0, 31400)
    assert (found.forward_flops, found.backward_flops) == (2 * 784 * 10, 2 * 784 * 10)  # images need no gradient
    assert found.notes == {"activations": "kept for backward"}


def test_convolutions_have_the_shapes_and_the_flops_of_a_real_pass(tmp_path: Path) -> None:
    found = summary_of(tmp_path, "model=lenet", "trainer.freeze=[0.*]")
    model = build_model(experiment(tmp_path, "model=lenet"))
    shapes: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _m, _i, output, name=name: shapes.update({name: list(output.shape)}))
    model(torch.zeros(2, 1, 28, 28))
    assert {path: module.shapes for path, module in by_path(found).items()} == {
        name: [shape] for name, shape in shapes.items()
    }
    assert found.trainable + found.frozen == sum(p.numel() for p in model.parameters())
    assert found.frozen == by_path(found)["0"].frozen == 16 * 25 + 16
    first, second = 2 * 16 * 24 * 24 * 25, 2 * 32 * 8 * 8 * 25 * 16
    assert [by_path(found)[path].flops for path in ("0", "3")] == [first, second]
    assert found.forward_flops == first + second + 2 * (512 * 128 + 128 * 10)
    assert found.backward_flops == 2 * (found.forward_flops - first) - second  # nothing goes back below the first one


@pytest.mark.parametrize("word", ["model.reads=false", "model.reads=true", "model.lazy=true"])
def test_tied_repeated_unused_and_lazy_modules_are_counted_once_with_memory_or_without(
    tmp_path: Path, word: str
) -> None:
    found = summary_of(tmp_path, "model=net", word)
    assert (found.trainable, found.forward_flops, found.samples) == (TOTAL, FORWARD, 2)
    assert found.shared == 2 * SHARED + 16  # `alias`, which is `again`, and the weight of `tied`
    modules = by_path(found)
    assert (modules["again"].calls, modules["again"].flops, modules["again"].shared) == (2, 4 * SHARED, 0)
    assert (modules["tied"].trainable, modules["tied"].shared, modules["tied"].shared_with) == (256, 256, ["again"])
    assert (modules["alias"].same_as, modules["alias"].shapes) == ("again", None)
    assert (modules["unused"].calls, modules["layers"].calls, modules["layers.0"].calls) == (0, None, 1)
    assert ("shapes" in found.notes) == (word == "model.reads=true")


def test_a_model_that_cannot_compute_is_shown_without_shapes_and_with_the_reason(tmp_path: Path) -> None:
    found = summary_of(tmp_path, "model=net", "model.fails=true")
    assert (found.trainable, found.samples, found.forward_flops, found.activations_bytes) == (TOTAL, None, None, None)
    assert "is not possible (ValueError: no pass" in found.notes["shapes"]
    assert len(found.notes["shapes"]) < 300
    without = summarize(experiment(tmp_path, "model=net", "model.lazy=true"), None, "no data")
    assert without.trainable == TOTAL - 784 * 16 - 16
    assert without.notes["shapes"].endswith(": no data")
    assert without.notes["parameters"].endswith(": first.weight, first.bias")


def test_models_by_name_stand_side_by_side(tmp_path: Path) -> None:
    words = ("model._target_=nets.pair", "~model.reads", "~model.fails", "~model.lazy")
    found = summarize(experiment(tmp_path, "model=net", *words), None, "no data")
    assert [(module.path, module.depth, module.trainable) for module in found.modules] == [
        ("one", 0, 9),
        ("other", 0, 8),
    ]


def test_the_table_says_what_is_below_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summary_of(tmp_path, "model=net")
    assert Summary.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    show(found, 1)
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line}
    assert "256 shared with again" in rows["tied"]
    assert "2 calls" in rows["again"]
    assert "the module again" in rows["alias"]
    assert "not called" in rows["unused"]
    assert f"{TOTAL:,}; 528 shared ones are counted once" in rows["parameters"]
    assert lines[-1] == "note: 1 module further below: --depth 2 shows all"


@pytest.mark.parametrize(
    ("flops", "text"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (999_999, "1 M"), (1_234_567, "1.23 M"), (10**16, "10 P")],
)
def test_flops_are_printed_with_three_digits(flops: int, text: str) -> None:
    assert flops_text(flops) == text


@pytest.mark.parametrize("typed", ["0", "-1", "two", "1.5"])
def test_a_wrong_depth_is_refused_before_anything_is_built(typed: str) -> None:
    with refused(f"summary --depth={typed}"):
        summary(call("summary", "recipe=mnist", f"--depth={typed}"))


def test_the_command_prints_what_is_found_for_programs_too(ddpexp: Ddpexp) -> None:
    done = ddpexp("summary", "recipe=mnist", "model=linear", "data.source=files", "data.root=nowhere", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["trainable"], found["samples"], len(found["modules"])) == (7850, None, 3)
    assert "nowhere does not exist" in found["notes"]["shapes"]
