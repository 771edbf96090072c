"""Recipes that live in a user's own folder: `--config-dir DIR recipe=mine`, code beside DIR."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, Ddpexp, Done, finish, python_path
from tests.listed import listed, unwrapped
from tests.refusals import command_refused

CODE = """\
import torch
from torch import nn
from torch.utils.data import Dataset

from ddpexp.data.datasets import Splits


class Points(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 4, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return {"point": point, "label": (point.sum() > 0).long()}


def load(count):
    return Splits(Points(count, 0), {"eval": Points(33, 1)})


class Net(nn.Module):
    def __init__(self, hidden, activation):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), activation, nn.Linear(hidden, 2))

    def forward(self, points):
        return self.layers(points)


class Sides:
    def step(self, model, batch):
        scores, labels = model(batch["point"]), batch["label"]
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}
"""

CONFIGS = {
    "recipe/mine.yaml": """\
# @package _global_
defaults:
  - override /model: net
  - override /data: points
  - override /optimizer: sgd
  - override /logger: none
task:
  _target_: mine.Sides
trainer:
  epochs: 2
  global_batch_size: 16
""",
    "model/net.yaml": "_target_: mine.Net\nhidden: 8\nactivation:\n  _target_: torch.nn.Tanh\n",
    "data/points.yaml": "_target_: mine.load\ncount: 64\nnum_workers: 0\n",
}


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a recipe may do is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project: conf/ with the recipe and mine.py beside it."""
    folder = tmp_path / "project"
    for name, text in CONFIGS.items():
        write(folder / "conf" / name, text)
    write(folder / "mine.py", CODE)
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def train(ddpexp: Ddpexp, configs: Path, recipe: str, *overrides: str, environ: dict[str, str] | None = None) -> Done:
    run = ddpexp.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    done = ddpexp("--config-dir", str(configs), f"recipe={recipe}", f"run.dir={run}", *overrides, environ=environ)
    return replace(done, run=run)


def test_a_users_model_data_and_task_train_with_and_without_loader_workers(ddpexp: Ddpexp, project: Path) -> None:
    overrides = ("trainer.gpus=2", "trainer.threads=1")
    alone = train(ddpexp, project / "conf", "mine", *overrides)
    assert alone.code == 0, alone.err
    assert "recipe  mine" in alone.out
    result = alone.result()
    assert (result["step"], set(result["metrics"])) == (8, {"eval/loss", "eval/accuracy"})
    assert yaml.safe_load((alone.run / "config.yaml").read_text())["run"]["code"] == str(project)
    helped = train(ddpexp, project / "conf", "mine", *overrides, "data.num_workers=2")
    assert helped.code == 0, helped.err
    assert helped.result()["weights_sha256"] == result["weights_sha256"]
    assert helped.result()["metrics"] == result["metrics"]
    write(project / "conf/experiment/other.yaml", "# @package _global_\ntrainer: {seed: 1}\n")
    other = train(ddpexp, project / "conf", "mine", *overrides, "+experiment=other")
    assert "recipe  mine +experiment=other\n" in other.out
    assert other.result()["weights_sha256"] != result["weights_sha256"]


WHOLE = """\
# @package _global_
defaults:
  - override /optimizer: sgd
  - override /logger: none
task: {_target_: mine.Sides}
model: {_target_: mine.Net, hidden: 8, activation: {_target_: torch.nn.Tanh}}
data: {_target_: mine.load, count: 64}
trainer: {epochs: 2, global_batch_size: 16}
"""


def test_a_recipe_in_one_file_trains_the_same(ddpexp: Ddpexp, project: Path) -> None:
    overrides = ("trainer.gpus=1", "trainer.threads=1")
    expected = train(ddpexp, project / "conf", "mine", *overrides).result()["weights_sha256"]
    for group in ("model", "data"):
        shutil.rmtree(project / "conf" / group)
    write(project / "conf/recipe/mine.yaml", WHOLE)
    done = train(ddpexp, project / "conf", "mine", *overrides)
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == expected


def test_the_default_run_directory_is_named_after_the_users_recipe_and_needs_the_folder_again(
    ddpexp: Ddpexp, project: Path
) -> None:
    ddpexp.folder = project
    done = ddpexp("--config-dir", "conf", "recipe=mine")
    assert done.code == 0, done.err
    [run] = (project / "outputs/mine").iterdir()
    again = ddpexp("evaluate", str(run), "--config-dir", "conf")
    assert (again.code, "eval/accuracy" in again.out) == (0, True)
    untrusted = ddpexp("evaluate", str(run))
    assert untrusted.code == 2
    said, command = untrusted.err.rsplit(": ", 1)
    assert said.endswith(
        "names code of its own (data._target_=mine.load), which runs only when it is restated. If it is yours"
    )
    assert command == f"python -m ddpexp evaluate {run} --config-dir conf\n"
    pasted = finish(ddpexp.paste(command), run)
    assert (pasted.code, pasted.out) == (0, again.out)


def test_without_the_config_dir_the_code_is_a_strangers(ddpexp: Ddpexp, project: Path) -> None:
    write(project / "mine.py", f"open({str(project / 'imported')!r}, 'w').close()\n" + CODE)
    ddpexp.folder = project  # Python itself would find mine.py here
    done = ddpexp("model._target_=mine.Net")
    command_refused(done, "model._target_=mine.Net: not allowed")
    assert not (project / "imported").exists()
    assert not (project / "outputs").exists()


def test_a_prefix_in_run_trust_trusts_an_installed_package(ddpexp: Ddpexp, project: Path) -> None:
    library = project / "library/shapes"
    write(library / "__init__.py", "")
    write(library / "nets.py", CODE)
    environ = {"PYTHONPATH": python_path(ROOT, library.parent)}
    write(project / "conf/recipe/shapes.yaml", SHAPES)
    done = train(ddpexp, project / "conf", "shapes", "run.trust=[shapes]", environ=environ)
    assert done.code == 0, done.err
    done = train(ddpexp, project / "conf", "shapes", environ=environ)
    command_refused(done, "data._target_=shapes.nets.load: run.trust=[shapes]")
    assert not done.run.exists()


SHAPES = """\
# @package _global_
defaults:
  - override /model: net
  - override /data: points
  - override /optimizer: sgd
  - override /logger: none
task:
  _target_: shapes.nets.Sides
model:
  _target_: shapes.nets.Net
  hidden: 8
  activation: {_target_: torch.nn.Tanh}
data:
  _target_: shapes.nets.load
  count: 64
trainer:
  epochs: 1
  global_batch_size: 16
"""


def test_for_a_typo_in_the_recipes_name_the_nearest_is_suggested(ddpexp: Ddpexp, project: Path) -> None:
    done = ddpexp("--config-dir", str(project / "conf"), "recipe=mien")
    command_refused(done, "recipe=mien: recipe=mine?")
    done = ddpexp("--config-dir", str(project / "conf"), "recipe=mine", "model._target_=mien.Net")
    command_refused(done, "model._target_=mien.Net: mine.Net?")


def test_help_shows_the_users_options_and_keys_beside_ours(ddpexp: Ddpexp, project: Path) -> None:
    done = ddpexp("--help", "recipe=mine", "--config-dir", str(project / "conf"), "trainer.seed=41")
    assert (done.code, done.err) == (0, "")
    for names in (listed("model", "net", chosen="net"), listed("recipe", "mine", chosen="mine")):
        assert f" {names} " in unwrapped(done.out)
    for line in (
        "  model._target_=mine.Net",
        "  trainer.seed=41",
    ):
        assert f"\n{line}" in done.out
    wrong = ddpexp("--help", "recipe=mien", "--config-dir", str(project / "conf"))
    command_refused(wrong, "recipe=mien: recipe=mine?")


def test_a_name_of_ours_draws_a_warning_and_stays_ours(ddpexp: Ddpexp, project: Path) -> None:
    write(project / "conf/optimizer/adam.yaml", "_target_: torch.optim.SGD\nlr: 123.0\n")
    done = train(ddpexp, project / "conf", "mine")
    assert done.code == 0, done.err
    place = project / "conf/optimizer/adam.yaml"
    assert (
        f"ddpexp: warning: {place} is not used: ddpexp has its own optimizer/adam. Give yours another name.\n"
        in done.err
    )
    assert yaml.safe_load((done.run / "config.yaml").read_text())["optimizer"]["lr"] != 123.0


PREPARE = """\
import sys

from ddpexp.errors import RefusedError


def prepare(count):
    print("half a line", end="")
    if count == 1:
        raise RefusedError("data.count=1 is one point: use 2 or more.")
    if count == 2:
        raise ValueError("no luck")
    if count == 3:
        return "nothing"
    import torch

    return {"name": "points", "count": int(torch.tensor(count)), "program": sys.argv[0]}
"""

LOAD = """

def load_prepared(prepared):
    return load(prepared["count"])
"""


@pytest.fixture
def prepared(project: Path) -> Path:
    write(project / "mine.py", CODE + LOAD)
    write(project / "ready.py", PREPARE)
    write(project / "conf/data/points.yaml", "_target_: mine.load_prepared\nprepare: ready.prepare\ncount: 64\n")
    return project / "conf"


def test_a_users_prepare_runs_once_in_a_process_of_its_own(ddpexp: Ddpexp, prepared: Path) -> None:
    done = train(ddpexp, prepared, "mine", "trainer.gpus=2")
    assert done.code == 0, done.err
    assert done.out.count("half a line") == 1
    assert done.manifest()["data"] == {"name": "points", "count": 64, "program": "-c"}
    assert done.result()["data"] == "points"


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("count", "traceback", "sentence"),
    [
        (1, None, "ddpexp: data.count=1 is one point: use 2 or more.\n"),
        (
            2,
            "ValueError: no luck\n",
            "ddpexp: data.prepare=ready.prepare failed with exit code 1: see its output above.\n",
        ),
        (3, None, "ddpexp: data.prepare=ready.prepare must return a mapping with at least a `name`, not 'nothing'.\n"),
    ],
)
def test_what_a_users_prepare_refuses_or_breaks_ends_the_command_with_2(
    ddpexp: Ddpexp, prepared: Path, count: int, traceback: str | None, sentence: str
) -> None:
    done = train(ddpexp, prepared, "mine", f"data.count={count}")
    assert done.code == 2
    assert done.err.endswith(sentence)
    assert ("Traceback" in done.err) == (traceback is not None)
    assert traceback is None or traceback in done.err
    assert not done.run.exists()


def test_a_prepare_that_is_not_there_is_refused_with_the_nearest(ddpexp: Ddpexp, prepared: Path) -> None:
    done = ddpexp("--config-dir", str(prepared), "recipe=mine", "data.prepare=ready.prepar")
    command_refused(done, "data.prepare=ready.prepar: prepare?")


def test_an_error_in_the_users_code_shows_its_traceback_and_ends_with_1(ddpexp: Ddpexp, project: Path) -> None:
    write(
        project / "mine.py",
        CODE.replace('scores, labels = model(batch["point"])', 'scores, labels = model(batch["pont"])'),
    )
    done = train(ddpexp, project / "conf", "mine")
    assert done.code == 1
    assert "mine.py" in done.err
    assert "KeyError: 'pont'" in done.err


IMPORTS = """

import torch.export
import torch.func
import torch.utils.checkpoint


class Deep(Net):
    @torch.compiler.disable(recursive=False)
    def forward(self, points):
        return torch.utils.checkpoint.checkpoint(super().forward, points, use_reentrant=False)


class Late(Sides):
    # What a library imports when it is first needed.
    def step(self, model, batch):
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.pipelining
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.distributed.tensor.parallel import parallelize_module

        return super().step(torch.compiler.disable()(model), batch)
"""


def test_a_recipe_may_import_any_module_of_torch_at_its_top_and_late(ddpexp: Ddpexp, project: Path) -> None:
    overrides = ("trainer.gpus=2", "trainer.threads=1", "trainer.max_steps=3")
    plain = train(ddpexp, project / "conf", "mine", *overrides).result()
    write(project / "mine.py", CODE + IMPORTS)
    write(project / "conf/model/net.yaml", CONFIGS["model/net.yaml"].replace("mine.Net", "mine.Deep"))
    done = train(ddpexp, project / "conf", "mine", *overrides, "task._target_=mine.Late")
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == plain["weights_sha256"]
