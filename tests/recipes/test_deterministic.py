"""`trainer.deterministic=true` on a GPU, for every shipped recipe: steps call nothing that torch refuses there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ddpexp
from tests.recipes.test_recipes import RECIPES, SHORT, environ, made

__all__ = ["environ", "made"]  # fixtures

CODE = """\
import json
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddpexp.train.callbacks.base import Callback


class Walk(Callback, TorchDispatchMode):
    # Writes which operations a run calls, with the kind of their numbers and the names of their arguments.
    rank_zero_only = True

    def __init__(self, path):
        super().__init__()
        self.path, self.calls = Path(path), set()

    def on_start(self, run):
        self.__enter__()

    def on_end(self, run):
        self.__exit__(None, None, None)
        self.path.write_text(json.dumps(sorted(self.calls)))

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        given = [argument.name for argument, value in zip(function._schema.arguments, arguments) if value is not None]
        texts = [value for value in (*arguments, *(named or {}).values()) if isinstance(value, str)]
        kind = "float" if any(value.is_floating_point() for value in tensors) else "int"
        self.calls.add((str(function), kind, " ".join([*given, *(named or {}), *texts])))
        return function(*arguments, **(named or {}))
"""

Call = tuple[str, str, str]  # operation, kind of numbers, arguments that it is given


def always(_: Call) -> bool:
    return True


REFUSED: Mapping[str, Callable[[Call], bool]] = {
    **dict.fromkeys(
        (
            "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
            "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
            "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
            "_upsample_bilinear2d_aa_backward", "upsample_bicubic2d_backward", "_upsample_bicubic2d_aa_backward",
            "upsample_trilinear3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
            "reflection_pad3d_backward", "nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward", "put_",
            "histc", "kthvalue", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
        ),
        always,
    ),
    "bincount": lambda call: "weights" in call[2].split(),
    "median.dim": always,
    "nanmedian.dim": always,
    "cumsum": lambda call: call[1] == "float",
    "scatter_reduce": lambda call: "prod" in call[2].split(),
    "_embedding_bag_dense_backward": always,
}  # fmt: skip
"""What raises on CUDA: torch.use_deterministic_algorithms, by the names of the operations below the functions there."""


def refused(calls: list[Call]) -> list[str]:
    """Return the operations that torch refuses on a GPU. Overloads of a name are the same, but where one is named."""
    found = []
    for call in calls:
        name, _, overload = call[0].removeprefix("aten.").partition(".")
        test = REFUSED.get(f"{name}.{overload}") or REFUSED.get(name) or REFUSED.get(name.removesuffix("_"))
        if test is not None and test(call):
            found.append(call[0])
    return found


DIGITS = ("data.source=embedded", "data.embedded_train=160", "data.embedded_test=32")
GPT = (
    "data.path=flowers.csv",
    "model.width=16",
    "model.num_layers=1",
    "data.block_size=16",
    "trainer.micro_batch_size=2",
)
WALKED: Mapping[str, tuple[str, ...]] = {**RECIPES, "gpt": GPT, "mnist": DIGITS}
ONE = tuple(word for word in SHORT if not word.startswith("trainer.gpus"))


@pytest.fixture
def command(ddpexp: Ddpexp, made: Path) -> Ddpexp:
    shutil.copytree(made, ddpexp.folder, dirs_exist_ok=True)
    (ddpexp.folder / "project/conf/callbacks").mkdir(parents=True)
    (ddpexp.folder / "project/conf/callbacks/walk.yaml").write_text("walk:\n  _target_: walk.Walk\n  path: ???\n")
    (ddpexp.folder / "project/walk.py").write_text(CODE)
    return ddpexp


@pytest.mark.variants(2)
@pytest.mark.parametrize("name", sorted(WALKED, key=lambda name: name != "segment"))
def test_a_step_calls_nothing_without_a_deterministic_kernel(command: Ddpexp, name: str) -> None:
    path = command.folder / "calls.json"
    walk = ("callbacks=walk", f"callbacks.walk.path={path}")
    keys = ("trainer.gpus=1", "trainer.max_steps=1", "trainer.eval_every=1", *walk)
    done = command("--config-dir", "project/conf", f"recipe={name}", *WALKED[name], *ONE, *keys)
    assert done.code == 0, done.err
    calls: list[Any] = json.loads(path.read_text())
    assert any("backward" in call[0] for call in calls)
    assert not refused([tuple(call) for call in calls]), f"recipe={name} calls what torch refuses on a GPU"


def test_the_list_knows_the_forms_of_an_operation() -> None:
    calls: list[Call] = [
        ("aten.nll_loss2d_forward.default", "float", "self target"), ("aten.nll_loss_forward.default", "float", "self"),
        ("aten.bincount.default", "int", "self minlength"), ("aten.bincount.default", "int", "self weights"),
        ("aten.cumsum.default", "int", "self dim"), ("aten.cumsum_.default", "float", "self dim"),
        ("aten.median.default", "float", "self"), ("aten.median.dim", "float", "self dim"),
    ]  # fmt: skip
    assert refused(calls) == [
        "aten.nll_loss2d_forward.default", "aten.bincount.default", "aten.cumsum_.default", "aten.median.dim",
    ]  # fmt: skip
    assert all(hasattr(torch.ops.aten, name.split(".")[0]) for name in REFUSED)
