"""What Hydra composes, what it refuses, and what of it is written down."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from ddpexp.compat.omegaconf import register_resolver
from ddpexp.config.arguments import Arguments
from ddpexp.config.compose import compose, compose_command
from ddpexp.config.folders import conf_folder
from ddpexp.config.parse import load, parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.schema import Experiment
from ddpexp.config.stored import override_file
from ddpexp.config.sweeps import JobComposer, compose_sweep
from ddpexp.errors import RefusedError, StoppedError
from ddpexp.settings.node import Node
from tests.listed import options
from tests.refusals import refused


def composed(*overrides: str) -> ResolvedConfig:
    found = compose(list(overrides))
    assert found is not None
    return found


def experiment(*overrides: str) -> Experiment:
    return parse(composed(*overrides).values)


def refusal(*overrides: str) -> str:
    with pytest.raises(RefusedError) as caught:
        parse(composed(*overrides).values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's config folder with a module beside it."""
    write(tmp_path / "conf/recipe/mine.yaml", MINE)
    write(
        tmp_path / "conf/model/net.yaml", "_target_: mine.Net\nhidden: 8\nrate: 0.5\nwords: [a, b]\ninner: {depth: 2}\n"
    )
    write(
        tmp_path / "mine.py", "raise RuntimeError('composing must not import this')\nclass Net: ...\nclass Task: ...\n"
    )
    return tmp_path / "conf"


MINE = """\
# @package _global_
defaults:
  - override /model: net
  - override /data: mnist
task:
  _target_: mine.Task
  weight: 1.5
trainer:
  max_steps: 7
  micro_batch_size: 32
  clip_grad_norm: 1
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


WHOLE = """\
# @package _global_
task: {_target_: mine.Task}
model: {_target_: mine.Net, hidden: 8}
data: {_target_: mine.load, samples: 64}
trainer: {max_steps: 7, global_batch_size: 16}
"""


def test_a_recipe_may_hold_its_model_and_its_data(mine: Path) -> None:
    (mine.parent / "mine.py").write_text("class Net: ...\nclass Task: ...\ndef load(): ...\n")
    write(mine / "recipe/whole.yaml", WHOLE)
    typed = (f"--config-dir={mine}", "recipe=whole")
    made = experiment(*typed, "model.hidden=16", "data.num_workers=2")
    assert (made.model.target, dict(made.model.kwargs)) == ("mine.Net", {"hidden": 16})
    assert (made.data.target, dict(made.data.options), made.data.num_workers) == ("mine.load", {"samples": 64}, 2)
    assert load(composed(*typed, "model.hidden=16", "data.num_workers=2").text) == made
    assert refusal(*typed, "model.hidden=big") == "model.hidden=big is not a number (its default is 8)."
    assert refusal(*typed, "model.hiden=9") == "model.hiden is not a known key. Did you mean model.hidden?"
    other = experiment(*typed, "model._target_=torch.nn.Linear", "model.in_features=2", "model.out_features=2")
    assert dict(other.model.kwargs) == {"in_features": 2, "out_features": 2}


def test_a_recipe_that_names_no_model_or_no_data_is_refused(mine: Path) -> None:
    (mine.parent / "mine.py").write_text("class Net: ...\nclass Task: ...\ndef load(): ...\n")
    write(
        mine / "recipe/part.yaml",
        "".join(line for line in WHOLE.splitlines(True) if line[:5] not in ("model", "data:")),
    )
    typed = (f"--config-dir={mine}", "recipe=part")
    assert refusal(*typed) == (
        "model is missing: recipe=part names none. Write model: {_target_: mine.Net} in the recipe, or choose an "
        "option: " + " or ".join(f"model={name}" for name in options("model")) + "."
    )
    assert refusal(*typed, "model=linear", "data.num_workers=2") == (
        "data is missing: recipe=part names none. Write data: {_target_: mine.load} in the recipe, or choose an "
        "option: data=arrays or data=cifar10 or data=hf or data=image_folder or data=images or data=mixture or "
        "data=mnist or data=tar_shards or data=text."
    )
    assert refusal(*typed, "model.hidden=3") == (
        "model.hidden: No model is chosen, by the recipe or by model=... Available: "
        f"{', '.join(f'model={name}' for name in options('model'))}."
    )
    made = experiment(*typed, "model=linear", "data._target_=mine.load", "data.samples=64")
    assert (made.model.target, dict(made.data.options)) == ("ddpexp.recipes.mnist.Linear", {"samples": 64})


def test_loggers_are_chosen_as_a_list() -> None:
    board = {"tensorboard": Node("tensorboard", {})}
    for overrides, expected in (
        ([], board),
        (["logger=[tensorboard,none]"], board),
        (["logger=[]"], {}),
        (["logger=none"], {}),
        (["logger.tensorboard=null"], {}),
        (["~logger.tensorboard"], {}),
    ):
        made = composed(*overrides)
        assert parse(made.values).logger == load(made.text).logger == expected, overrides


def test_what_a_recipe_sets_of_callbacks_and_loggers_that_are_not_chosen_is_left_out(mine: Path) -> None:
    keys = "callbacks: {early_stopping: {patience: 2}}\nlogger: {tensorboard: {}}\n"
    chosen = "  - override /callbacks: [early_stopping, lr_monitor]\n"
    write(mine / "recipe/ends.yaml", MINE.replace("task:", f"{chosen}task:") + keys)
    typed = ("--config-dir", str(mine), "recipe=ends")
    made = composed(*typed).values["callbacks"]
    assert (list(made), made["early_stopping"]["patience"]) == (["early_stopping", "lr_monitor"], 2)
    none = composed(*typed, "callbacks=none", "logger=none")
    assert (none.values["callbacks"], none.values["logger"]) == ({}, {"alert_url": None})
    assert yaml.safe_load(none.text)["callbacks"] == {}
    assert list(experiment(*typed, "callbacks=lr_monitor").callbacks) == ["lr_monitor"]
    assert refusal(*typed, "callbacks=none", "callbacks.early_stopping.patience=3") == (
        "callbacks.early_stopping has keys and is not chosen. Choose it as callbacks=early_stopping."
    )
    write(mine / "recipe/ends.yaml", MINE + keys.replace("early_stopping", "early_stoping"))
    assert refusal(*typed) == (
        "callbacks.early_stoping is not a known callback. Did you mean callbacks.early_stopping?"
    )


# Nothing is composed wrongly


NEEDED = {"distill": ["run.init_from=teacher"]}
LIBRARIES = ("timm", "torchvision", "transformers")  # whose models are named by options


def check_choice(recipe: str, choice: Mapping[str, str]) -> None:
    typed = [*NEEDED.get(recipe, ()), *(f"{group}={option}" for group, option in choice.items())]
    typed += [f"run.trust=[{choice['model']}]"] if choice.get("model") in LIBRARIES else []
    if choice.get("strategy") in ("local_sgd", "diloco"):  # which refuse an average over all workers
        typed.append("trainer.ema_decay=null")
    made = composed(f"recipe={recipe}", *typed)
    for group, option in choice.items():
        section = {name: value for name, value in made.values[group].items() if name != "alert_url"}
        assert section == yaml.safe_load((conf_folder() / group / f"{option}.yaml").read_text()), choice
    assert parse(made.values).recipe.name == recipe


def turns(*groups: str) -> Iterator[dict[str, str]]:
    """Yield choices of an option of each group until every option of all of them has had its turn."""
    names = {group: options(group) for group in groups}
    for number in range(max(map(len, names.values()))):
        yield {group: found[number % len(found)] for group, found in names.items()}


def test_every_shipped_recipe_and_every_optimizer_schedule_and_model_composes() -> None:
    for choice in turns("recipe", "optimizer", "scheduler", "model"):
        check_choice(choice.pop("recipe"), choice)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", options("recipe"))
def test_every_shipped_recipe_composes_with_every_optimizer_schedule_and_model(recipe: str) -> None:
    for choice in turns("optimizer", "scheduler", "model"):
        check_choice(recipe, choice)


@pytest.mark.variants(1)
@pytest.mark.parametrize("recipe", options("recipe"))
def test_every_shipped_recipe_composes_with_every_strategy_logger_and_launcher(recipe: str) -> None:
    for group in ("strategy", "logger", "launcher"):
        for option in options(group):
            check_choice(recipe, {group: option})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", options("recipe"))
def test_every_shipped_recipe_composes_with_every_pair_of_optimizer_schedule_and_model(recipe: str) -> None:
    groups = {group: options(group) for group in ("optimizer", "scheduler", "model")}
    first, second, third = sorted(groups, key=lambda group: len(groups[group]), reverse=True)
    for (i, one), (j, other) in itertools.product(enumerate(groups[first]), enumerate(groups[second])):
        last = groups[third][(i + j) % len(groups[third])]  # the shortest list: each of it meets each of the others
        check_choice(recipe, {first: one, second: other, third: last})


def test_every_shipped_data_option_composes() -> None:
    needed = {"mixture": ["+data@data.sources.a=mnist"], "tar_shards": ["data.path=shards-*.tar"]}
    for option in options("data"):
        assert experiment(f"data={option}", *needed.get(option, ())).data.target


def test_another_optimizer_inherits_nothing_from_the_recipes_tuned_one() -> None:
    tuned = experiment("recipe=mnist").optimizer
    other = experiment("recipe=mnist", "optimizer=adamw").optimizer
    assert tuned.target == "torch.optim.SGD"
    keys = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.01, "fused": "auto"}
    assert other == Node("torch.optim.AdamW", keys)


GENERAL = {
    "validation_fraction": 0.0, "test_set": None, "num_workers": 0,
    "on_device": "auto", "stratify": None, "group_by": None, "fold": None,
    "folds": None, "weights": None, "samples_per_epoch": None, "lengths": None,
    "batch_tokens": None,
    "transform": None, "eval_transform": None, "transform_of": "input", "collate": None,
}  # fmt: skip
"""What every kind of data understands."""


@pytest.mark.parametrize(
    ("overrides", "section", "expected"),
    [
        ("model._target_=zoo.resnet", "model", {}),
        ("model.classes=10 model._target_=zoo.resnet +model.width=8", "model", {"classes": 10, "width": 8}),
        ("model._target_=zoo.resnet ~model.width", "model", {}),
        ("model=linear model._target_=zoo.resnet model.classes=10", "model", {"classes": 10}),
        ("task._target_=zoo.Task", "task", {}),
        ("data._target_=zoo.load data.num_workers=2", "data", {**GENERAL, "num_workers": 2}),
        (
            "data._target_=zoo.load data.prepare=zoo.prepare data.root=x",
            "data",
            {**GENERAL, "prepare": "zoo.prepare", "root": "x"},
        ),
        ("optimizer._target_=torch.optim.Adam optimizer.lr=1", "optimizer", {"lr": 1}),
        ("scheduler._target_=zoo.Stable scheduler.decay=0.2", "scheduler", {"decay": 0.2}),
        (
            "model._target_=zoo.resnet model.act._target_=torch.nn.ReLU model.act.inplace=true",
            "model",
            {"act": {"_target_": "torch.nn.ReLU", "inplace": True}},
        ),
        ("optimizer._target_=torch.optim.SGD optimizer.momentum=0", "optimizer", "as in the file"),
    ],
)
def test_an_overridden_target_inherits_no_keys_of_another_one(
    overrides: str, section: str, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["run.trust=[zoo]", *overrides.split()]
    made = composed(*typed)
    if expected == "as in the file":
        expected = {"lr": 0.1, "momentum": 0, "nesterov": True, "weight_decay": 5e-4, "fused": "auto"}
    target = next(word.partition("=")[2] for word in typed if word.startswith(f"{section}._target_="))
    assert made.values[section] == {"_target_": target, **expected}
    assert yaml.safe_load(made.text)[section] == made.values[section]
    assert made.overrides == tuple(typed)
    parse(made.values)
    assert compose_command([*typed, "--cfg", "job"]) is None
    assert yaml.safe_load(capsys.readouterr().out)[section] == made.values[section]


def test_an_overridden_target_of_an_inner_node_inherits_no_keys_of_another_one(mine: Path) -> None:
    write(mine / "model/net.yaml", "_target_: mine.Net\nhidden: 8\nact: {_target_: torch.nn.ELU, alpha: 2.0}\n")
    typed = (f"--config-dir={mine}", "recipe=mine", "model.act._target_=torch.nn.ReLU", "model.act.inplace=true")
    assert composed(*typed).values["model"] == {
        "_target_": "mine.Net", "hidden": 8, "act": {"_target_": "torch.nn.ReLU", "inplace": True},
    }  # fmt: skip


OWN_TARGETS = """
optimizer: {_target_: torch.optim.Adam, lr: 0.01}
scheduler: {_target_: linear}
strategy: {kind: local_sgd, sync_every: 4}
callbacks: {early_stopping: {_target_: mine.Task, patience: 2}}
logger: {tensorboard: {_target_: mine.Net}}
model: {act: {_target_: torch.nn.ReLU}}
"""


def test_a_target_that_a_file_gives_inherits_no_keys_of_another_one(mine: Path) -> None:
    net = "_target_: mine.Net\nhidden: 8\nact: {_target_: torch.nn.ELU, alpha: 2.0}\n"
    write(mine / "model/net.yaml", net)
    recipe = mine / "recipe/mine.yaml"
    write(recipe, recipe.read_text() + OWN_TARGETS)
    typed = [f"--config-dir={mine}", "recipe=mine"]
    values = composed(*typed, "callbacks=early_stopping", "scheduler.floor=0.5").values
    assert values["optimizer"] == {"_target_": "torch.optim.Adam", "lr": 0.01}
    assert values["scheduler"] == {"_target_": "linear", "floor": 0.5}
    assert values["strategy"] == {"kind": "local_sgd", "sync_every": 4}
    assert values["callbacks"] == {"early_stopping": {"_target_": "mine.Task", "patience": 2}}
    assert values["logger"]["tensorboard"] == {"_target_": "mine.Net"}
    assert values["model"] == {"_target_": "mine.Net", "hidden": 8, "act": {"_target_": "torch.nn.ReLU"}}
    assert composed(*typed, "optimizer._target_=torch.optim.SGD", "optimizer.lr=1").values["optimizer"] == {
        "_target_": "torch.optim.SGD", "lr": 1,
    }  # fmt: skip
    assert refusal(*typed, "optimizer=adamw").startswith(
        f"optimizer=adamw has no effect: {recipe} itself sets optimizer._target_ to torch.optim.Adam. Leave optimizer="
    )


def test_a_file_keeps_the_keys_of_the_same_target_in_the_file_that_it_builds_on(mine: Path) -> None:
    recipe = mine / "recipe/mine.yaml"
    write(recipe, recipe.read_text() + "optimizer: {_target_: torch.optim.Adam, lr: 0.01, eps: 0.1}\n")
    later = "# @package _global_\ndefaults: [mine]\noptimizer: {_target_: torch.optim.Adam, lr: 0.02}\n"
    write(mine / "recipe/later.yaml", later)
    expected = {"_target_": "torch.optim.Adam", "lr": 0.02, "eps": 0.1}
    assert composed(f"--config-dir={mine}", "recipe=later").values["optimizer"] == expected


def test_an_optimizer_without_a_rate_of_its_own_is_refused_with_what_to_type() -> None:
    assert refusal("optimizer._target_=torch.optim.Adam").endswith(" Type it, for example optimizer.lr=0.01.")


def test_the_jobs_of_a_sweep_inherit_no_keys_of_another_target() -> None:
    typed = ["-m", "run.trust=[zoo]", "model._target_=ddpexp.recipes.mnist.LeNet,zoo.resnet", "model.classes=10,20"]
    composer = JobComposer(compose_sweep(Arguments.of(typed)))
    job = composer.compose(["run.trust=[zoo]", "model._target_=zoo.resnet", "model.classes=20"], Path("/x"))
    assert job.values["model"] == {"_target_": "zoo.resnet", "classes": 20}
    with refused("model.classes: known key"):
        composer.compose(
            ["run.trust=[zoo]", "model._target_=ddpexp.recipes.mnist.LeNet", "model.classes=20"], Path("/x")
        )


def test_a_schedule_of_ones_own_is_left_to_the_workers() -> None:
    assert "add run.trust=[zoo]" in refusal("scheduler._target_=zoo.Stable")
    made = experiment("scheduler._target_=zoo.Stable", "scheduler.decay=0.2", "run.trust=[zoo]")
    assert made.scheduler == Node("zoo.Stable", {"decay": 0.2})


def test_the_command_line_overrides_the_recipe_and_the_recipe_the_defaults(mine: Path) -> None:
    assert experiment().trainer.epochs == experiment("recipe=mnist").trainer.epochs  # the default recipe
    by_recipe = experiment(f"--config-dir={mine}", "recipe=mine")
    assert (by_recipe.trainer.max_steps, by_recipe.model.target) == (7, "mine.Net")
    typed = experiment("trainer.max_steps=9", "model=linear", "recipe=mine", f"--config-dir={mine}", "trainer.seed=3")
    assert (typed.trainer.max_steps, typed.model.target, typed.trainer.seed) == (9, "ddpexp.recipes.mnist.Linear", 3)


def test_a_recipe_without_a_name_is_named_after_its_file(mine: Path) -> None:
    assert experiment(f"--config-dir={mine}", "recipe=mine").recipe.name == "mine"
    assert experiment(f"--config-dir={mine}", "recipe=mine", "+recipe.name=other").recipe.name == "other"


def test_a_list_a_null_and_a_quoted_string_arrive_as_given() -> None:
    made = experiment("model.width=[4,8]", "trainer.epochs=null", "trainer.max_steps=3", "run.dir='a b=c'")
    assert (made.model.kwargs["width"], made.trainer.epochs, made.run.dir) == ((4, 8), None, "a b=c")


def test_the_parsed_experiment_cannot_be_changed() -> None:
    made = experiment("recipe=mnist")
    with pytest.raises(AttributeError):
        made.trainer.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.model.kwargs["hidden"] = 1  # type: ignore[index]


# Sweeps


def test_ranges_of_values_are_known_wherever_they_stand(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=interval(0,1)", "trainer.seed=tag(a,b,interval(2,3))", "model.hidden=choice(3,4)"]
    assert compose_sweep(Arguments.of(overrides)).composed.intervals == tuple(overrides[:2])
    params = "hydra: {sweeper: {params: {optimizer.lr: 'interval(0.1,0.2)', trainer.seed: '1,2'}}}\n"
    write(tmp_path / "conf/recipe/searched.yaml", f"# @package _global_\n{params}")
    assert compose_sweep(Arguments.of([f"--config-dir={tmp_path}/conf", "recipe=searched"])).composed.intervals == (
        "optimizer.lr=interval(0.1,0.2)",
    )


# Refusals

MODELS = ", ".join(options("model"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("trainer.gpu=2", "trainer.gpu is not a known key. Did you mean trainer.gpus?"),
        ("optimizer.lrr=1", "optimizer.lrr is not a known key. Did you mean optimizer.lr?"),
        ("model.hiden=3", "model.hiden is not a known key. Did you mean model.hidden?"),
        ("data.rot=x", "data.rot is not a known key. Did you mean data.root?"),
        ("scheduler.peak=0.1", "scheduler.peak is not a known key. Did you mean scheduler.peak_at?"),
        ("trainr.gpus=2", "trainr.gpus is not a known key. Did you mean trainer.gpus?"),
        ("modle=linear", "modle is not a known key. Did you mean model?"),
        ("recipe=mnsit", "recipe=mnsit is not a known option. Did you mean recipe=mnist?"),
        ("optimizer=adamww", "optimizer=adamww is not a known option. Did you mean optimizer=adamw?"),
        ("scheduler=one_cycle", "scheduler=one_cycle is not a known option. Did you mean scheduler=onecycle?"),
        ("model=[linear2]", "model=linear2 is not a known option. Did you mean model=linear?"),
        ("launcher=torchrun", "launcher=torchrun is not a known option. Did you mean launcher=torchrun-env?"),
        (
            "recipe=",
            f"recipe= is not a known option. Available: {', '.join(options('recipe'))}.",
        ),
        (
            "model=null",
            f"model=null: Every run needs an option of this group. Available: {MODELS}.",
        ),
        ("+trainr.gpus=2", "trainr is not a known section. Did you mean trainer?"),
        ("+zzz=2", "zzz is not a known section. Available: recipe, task, model, data, optimizer,"),
        ("+trainer.gpu=2", "trainer.gpu is not a known key. Did you mean trainer.gpus?"),
        ("+strategy.static=true", "strategy.static is not a known key. Did you mean strategy.static_graph?"),
        ("+data.rot=x", "data.rot is not a known key. Did you mean data.root?"),
        ("~model", f"~model: Every run needs an option of this group. Available: {MODELS}."),
        ("trainer.gpus", "trainer.gpus has no value. Write trainer.gpus=... ."),
        ("trainer.gpus=[", "trainer.gpus=[ has a bracket without its other half."),
        ("=1", "=1 is not an override. Write key=value, for example trainer.gpus=2."),
        (
            "trainer.gpus=1,2",
            "trainer.gpus=1,2 gives several values. Add -m for a run with each.",
        ),
        ("optimizer.lr=fast", "optimizer.lr=fast is not a number (its default is "),
        ("optimizer.nesterov=1", "optimizer.nesterov=1 is not true or false (its default is true)."),
        ("optimizer.lr=true", "optimizer.lr=true is not a number (its default is "),
        ("model.hidden=1.5", "model.hidden=1.5 is not a whole number (its default is 128)."),
        ("model.hidden=[1]", "model.hidden=[1] is not a number (its default is 128)."),
        ("model.width=16", "model.width=16 is not a list (its default is [16, 32]). Type model.width=[16] for"),
        ("model.width=[16,wide]", "model.width[1]=wide is not a number (its default is 16)."),
        ("task.label_smoothing=much", "task.label_smoothing=much is not a number (its default is 0.0)."),
        ("data=images data.flip=maybe", "data.flip=maybe is not true or false (its default is false)."),
        ("data=images data.crop=half", "data.crop=half is not a number (its default is 0)."),
        ("data.embedded_train=many", "data.embedded_train=many is not a number (its default is 60000)."),
        (
            "--conf x",
            "ambiguous option: --conf could match --config-path, --config-name, --config-dir. --help shows what "
            "can be typed.",
        ),
        ("-m --cfg job", "--cfg job shows one run. Leave -m out, and give each key one value."),
        ("sweep.slots=2", "sweep.slots=2 is for sweeps. Add -m, or leave it out."),
        ("model=1", f"model=1 is not a known option. Available: {MODELS}."),
        ("optimizer=adamw,true", "optimizer=true is not a known option. Available: adadelta,"),
        (
            "hydra.run.dir=x",
            "hydra.run.dir=x: Hydra's own settings have no effect here. run.dir=... names the run directory.",
        ),
        ("+hydra.searchpath=[x]", "+hydra.searchpath=[x]: Hydra's own settings have no effect here."),
        ("hydra/launcher=joblib", "hydra/launcher=joblib: Hydra's own settings have no effect here."),
        (
            "--config-name=x",
            "--config-path, --config-name and --experimental-rerun do not apply. Use --config-dir DIR recipe=NAME. "
            "The experiment of a run is trained again with python -m ddpexp rerun RUN_DIR.",
        ),
        ("--config-dir=/not/there", "--config-dir /not/there is not a directory."),
        ("--config-dir", "argument --config-dir/-cd: expected one argument."),
        ("--gpus=2", "--gpus=2 is not an option. Write key=value, for example trainer.gpus=2."),
        ("run.code=/", "run.code=/ cannot be set. Type --config-dir DIR to use the code beside DIR."),
        ("run=null", "run=null is not a section. Set its keys, such as run.dir=... ."),
        ("optimizer.lr=${nope}", "optimizer.lr is invalid: Interpolation key 'nope' not found"),
        (
            "optimizer.lr=${oc.env:DDPEXP_NOT_SET}",
            "optimizer.lr is read from the environment, and DDPEXP_NOT_SET is not set there. Export DDPEXP_NOT_SET=... "
            "first.",
        ),
        ("task._target_=os.system", "task._target_=os.system is not allowed: a configuration may name"),
        ("+model.a={b:[{_target_:os.system}]}", "model.a.b[0]._target_=os.system is not allowed"),
        ("launcher._target_=subprocess.run", "launcher._target_=subprocess.run is not allowed"),
        ("scheduler._target_=builtins.eval", "scheduler._target_=builtins.eval is not allowed"),
        ("data.prepare=os.system", "data.prepare=os.system is not allowed"),
        ("data.prepare=torch.hub.load", "data.prepare=torch.hub.load is not allowed"),
        ("data._target_=ddpexp.data.order.os.system", "data._target_=ddpexp.data.order.os.system is not allowed"),
        (
            "launcher._target_=ddpexp.launch.workers.server.call",
            "launcher._target_=ddpexp.launch.workers.server.call is not allowed",
        ),
        (
            "launcher._target_=ddpexp.launch.workers.client.Server",
            "launcher._target_=ddpexp.launch.workers.client.Server is not allowed",
        ),
        ("launcher._target_=ddpexp.launch.Layout", "launcher._target_=ddpexp.launch.Layout is not allowed"),
        (
            "model._target_=ddpexp.launch.workers.server.call",
            "model._target_=ddpexp.launch.workers.server.call is not allowed",
        ),
        ("scheduler._target_=ddpexp.task.Schedule", "scheduler._target_=ddpexp.task.Schedule is not allowed"),
        ("+hydra.x._target_=os.system", "+hydra.x._target_=os.system: Hydra's own settings have no effect here."),
    ],
)
def test_for_a_wrong_argument_one_sentence_suggests_the_right_one(overrides: str, sentence: str) -> None:
    assert refusal(*overrides.split()).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            'a: 1\nb: "2\n',
            "bad.yaml, line 3 is not valid YAML: found unexpected end of stream (a quote is not closed).",
        ),
        ("_target_: mine.Net\na: 1\na: 2\n", "bad.yaml, line 3 is not valid YAML: found duplicate key a."),
        (
            '_target_: mine.Net\na: !!python/object/apply:os.system ["x"]\n',
            "bad.yaml, line 2 is not valid YAML: could not determine a constructor",
        ),
        ("- a\n- b\n", "model=['a', 'b'] is not a section with keys."),
        ("", "model._target_ is missing: it names the class or function to call."),
        ("_target_: mine.Net\na: ???\n", "model.a is missing. Give it a value, for example as model.a=... ."),
        ("_target_: mine.Net\na: ${model.a}\n", "model.a is invalid: Recursive interpolation detected"),
    ],
)
def test_a_broken_config_file_is_refused_with_its_place(mine: Path, text: str, sentence: str) -> None:
    write(mine / "model/bad.yaml", text)
    assert sentence in refusal(f"--config-dir={mine}", "recipe=mine", "model=bad")


def test_a_config_file_that_is_no_text_is_refused(mine: Path) -> None:
    (mine / "model/bad.yaml").write_bytes(b"_target_: '\xff\xfe'\n")
    assert refusal(f"--config-dir={mine}", "model=bad").startswith("A config file is not UTF-8 text")


def test_the_users_options_get_their_types_from_their_own_defaults(mine: Path) -> None:
    overrides = (f"--config-dir={mine}", "recipe=mine")
    assert refusal(*overrides, "model.hidden=big") == "model.hidden=big is not a number (its default is 8)."
    assert refusal(*overrides, "model.inner.depth=deep") == "model.inner.depth=deep is not a number (its default is 2)."
    assert refusal(*overrides, "task.weight=heavy") == "task.weight=heavy is not a number (its default is 1.5)."
    fine = experiment(*overrides, "model.rate=1", "model.words=[c]", "model.hidden=null")
    assert dict(fine.model.kwargs)["words"] == ("c",)


def test_a_value_that_a_recipe_sets_can_be_any_of_its_keys_values(mine: Path) -> None:
    overrides = (f"--config-dir={mine}", "recipe=mine")
    made = experiment(*overrides, "trainer.micro_batch_size=auto", "trainer.clip_grad_norm=0.5")
    assert (made.trainer.micro_batch_size, made.trainer.clip_grad_norm) == ("auto", 0.5)


def test_for_an_unknown_users_option_the_nearest_of_both_folders_is_suggested(mine: Path) -> None:
    assert (
        refusal(f"--config-dir={mine}", "recipe=mien") == "recipe=mien is not a known option. Did you mean recipe=mine?"
    )
    assert (
        refusal(f"--config-dir={mine}", "model=lenett")
        == "model=lenett is not a known option. Did you mean model=lenet?"
    )


# Trust


def test_a_file_cannot_trust_itself(mine: Path) -> None:
    write(mine / "recipe/sly.yaml", MINE + "run:\n  trust: [os]\n")
    overrides = (f"--config-dir={mine}", "recipe=sly")
    assert refusal(*overrides) == "run.trust=['os'] is set in a file, and counts only on the command line."
    assert refusal(*overrides, "trainer.seed=1").startswith("run.trust=['os'] is set in a file")
    assert experiment(*overrides, "run.trust=[mine]").run.trust == ("mine",)


def test_a_file_cannot_name_the_folder_of_its_code(mine: Path) -> None:
    write(mine / "recipe/sly.yaml", MINE + "run:\n  code: /\n")
    assert refusal(f"--config-dir={mine}", "recipe=sly").startswith("run.code=/ cannot be set")


def test_typing_the_config_folder_is_what_trusts_the_code_beside_it(mine: Path) -> None:
    for overrides in ((f"--config-dir={mine}",), ("--config-dir", str(mine)), ("-cd", str(mine))):
        made = experiment(*overrides, "recipe=mine")
        assert made.trust.code == mine.parent
    assert "model._target_=mine.Net is not allowed" in refusal("model._target_=mine.Net")


def test_a_relative_config_folder_is_written_down_as_an_absolute_one(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine.parent)
    assert experiment("--config-dir", "conf", "recipe=mine").run.code == str(mine.parent)


def test_a_colliding_name_draws_a_warning_that_names_the_file(mine: Path) -> None:
    write(mine / "model/lenet.yaml", "_target_: mine.Net\n")
    assert composed(f"--config-dir={mine}", "recipe=mine").warnings == (
        f"{mine}/model/lenet.yaml is not used: ddpexp has its own model/lenet. Give yours another name.",
    )


def test_a_colliding_name_that_is_chosen_is_refused_with_both_files(mine: Path) -> None:
    write(mine / "model/lenet.yaml", "_target_: mine.Net\n")
    write(mine / "logger/csv.yaml", "csv: {_target_: mine.Csv}\n")
    for override, group, option in (
        ("model=lenet", "model", "lenet"),
        ("logger=csv", "logger", "csv"),
        ("logger=[tensorboard,csv]", "logger", "csv"),
    ):
        assert refusal(f"--config-dir={mine}", "recipe=mine", override) == (
            f"{group}={option} is chosen, and two files have that name: {mine}/{group}/{option}.yaml, which is hidden, "
            f"and ddpexp's own {conf_folder()}/{group}/{option}.yaml. Give yours another name, such as "
            f"{group}/my_{option}.yaml for {group}=my_{option}."
        )


def test_a_config_folder_with_recipes_of_which_none_is_chosen_draws_a_warning(mine: Path) -> None:
    write(mine / "recipe/other.yaml", MINE)
    warning = (
        f"no recipe is chosen, so the default is used, recipe=mnist; to use one of {mine}, add recipe=mine or "
        "recipe=other."
    )
    assert composed(f"--config-dir={mine}", "trainer.seed=3").warnings == (warning,)
    assert compose_sweep(Arguments.of(["-m", f"--config-dir={mine}", "trainer.seed=1,2"])).warnings == (warning,)
    for chosen in ("recipe=mnist", "recipe=mine"):
        assert composed(f"--config-dir={mine}", chosen).warnings == ()


# What is written down


def roundtrip(made: ResolvedConfig, folder: Path) -> Experiment:
    return load(made.text)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer=adamw", "optimizer.eps=1e-05", "optimizer.betas=[0.5,1e-3]"),
        ("trainer.max_steps=5", "trainer.epochs=null", "trainer.clip_grad_norm=1e-8", "run.dir='1e3'"),
        ("run.dir='null'", "run.init_from='true'"),
        ("run.dir='12:30:00'", "run.init_from='2024-01-01'", "data.root='~/x y'"),
        ("run.dir='0x1F'", "run.init_from='1_000'", "data.root='- # : {}'"),
        ("data.root='größe\\tx'", "run.trust=[a.b,'on','3']"),
        ("+model.nested={a:[1,{b:null,c:[]}],d:{}}", "+model.big=123456789012345678901234567890", "+model.tiny=-0.0"),
        ("+task.inf=.inf", "+task.high=inf", "+task.text='.inf'", "+task.empty=''", "+task.lines='a\\nb'"),
        ("+model.literal='\\${trainer.seed}'",),
    ],
)
def test_what_is_written_reads_back_as_the_same_experiment(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    made = composed(*overrides)
    assert roundtrip(made, tmp_path) == parse(made.values)


def test_values_that_look_like_others_keep_their_type(tmp_path: Path) -> None:
    back = roundtrip(composed("run.dir='1e3'", "optimizer.lr=1e-05", "data.root='no'", "+model.x='7'"), tmp_path)
    assert (back.run.dir, back.optimizer.kwargs["lr"], back.data.options["root"], back.model.kwargs["x"]) == (
        "1e3",
        1e-05,
        "no",
        "7",
    )


def test_interpolations_are_resolved_in_what_is_written(tmp_path: Path) -> None:
    made = composed("trainer.seed=11", "+model.seed=${trainer.seed}", "+model.all=${optimizer.lr}-x")
    written = yaml.safe_load(made.text)["model"]
    assert (written["seed"], written["all"]) == (11, f"{made.values['optimizer']['lr']}-x")


SECRETS = """\
_target_: mine.Net
token: ${oc.env:DDPEXP_TEST_SECRET}
padded: key-${oc.env:DDPEXP_TEST_SECRET}-end
fallback: ${oc.env:DDPEXP_TEST_UNSET,${model.token}}
number: ${oc.decode:${model.token}}
alias: ${model.token}
relative: ${.alias}
inside:
  up: ${..token}
  many: [1, "${oc.env:DDPEXP_TEST_SECRET}", {deep: "${model.alias}"}]
section: ${.inside}
chosen: ${.${oc.env:DDPEXP_TEST_WHICH}}
plain: ${trainer.seed}
"""


def test_secrets_stay_references_wherever_they_are_used_and_resolve_in_the_workers(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(mine / "model/secret.yaml", SECRETS)
    monkeypatch.setenv("DDPEXP_TEST_SECRET", "48151623")
    monkeypatch.setenv("DDPEXP_TEST_WHICH", "alias")
    monkeypatch.delenv("DDPEXP_TEST_UNSET", raising=False)
    made = composed(f"--config-dir={mine}", "recipe=mine", "model=secret", "trainer.seed=4")
    assert "48151623" not in made.text
    assert yaml.safe_load(made.text)["model"]["plain"] == 4
    back = roundtrip(made, tmp_path)
    assert back == parse(made.values)
    token = "48151623"
    assert plain(back.model.kwargs) == {
        "token": token,
        "padded": f"key-{token}-end",
        "fallback": token,
        "number": int(token),
        "alias": token,
        "relative": token,
        "inside": {"up": token, "many": [1, token, {"deep": token}]},
        "section": {"up": token, "many": [1, token, {"deep": token}]},
        "chosen": token,
        "plain": 4,
    }
    monkeypatch.setenv("DDPEXP_TEST_SECRET", "108")
    assert load(made.text).model.kwargs["token"] == "108"


def test_composing_leaves_the_environment_and_hydra_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("DDPEXP_TEST_SECRET", "x")
    before = dict(os.environ)
    composed("+model.x=${oc.env:DDPEXP_TEST_SECRET}")
    refusal("trainer.gpu=1")
    assert dict(os.environ) == before
    assert OmegaConf.create({"a": "${oc.env:DDPEXP_TEST_SECRET}"}).a == "x"


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


# Over a run directory's file


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path / "config.yaml", composed("recipe=mnist", "model=linear").text)


def test_a_key_that_is_newer_than_the_run_can_be_overridden(written: Path) -> None:
    text = written.read_text()
    assert "  max_seconds: null\n" in text
    written.write_text(text.replace("  max_seconds: null\n", ""))
    assert override_file(written, ["trainer.max_seconds=5"])[0]["trainer"]["max_seconds"] == 5
    with refused("trainer.max_second: known key"):
        override_file(written, ["trainer.max_second=5"])


def test_overrides_replace_single_keys_of_a_run_directorys_file(written: Path) -> None:
    values, text = override_file(written, ["trainer.seed=5", "run.dir=null", "optimizer.lr=1e-3", "data.root=a=b"])
    made = parse(values)
    assert (made.trainer.seed, made.run.dir, made.optimizer.kwargs["lr"], made.data.options["root"]) == (
        5,
        None,
        0.001,
        "a=b",
    )
    assert parse(yaml.safe_load(text)) == replace(made)


def test_another_target_over_a_run_directorys_file_inherits_nothing(written: Path) -> None:
    values, text = override_file(written, ["data._target_=zoo.load", "data.count=3", "run.trust=[zoo]"])
    assert values["data"] == {"_target_": "zoo.load", **GENERAL, "count": 3} == yaml.safe_load(text)["data"]
    values, _ = override_file(written, ["data._target_=mnist", "data.root=x"])
    assert (values["data"]["root"], values["data"]["source"]) == ("x", "auto")
    with refused("data.count: known key"):
        override_file(written, ["data._target_=mnist", "data.count=3"])


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("trainer.gpu=1", "trainer.gpu is not a known key. Did you mean trainer.gpus?"),
        ("trainr.gpus=1", "trainr.gpus is not a known key. Did you mean trainer.gpus?"),
        ("trainer.gpus", "trainer.gpus has no value. Write trainer.gpus=... ."),
        ("run.trust[0]=mine", "run.trust[0] is not a known key. Did you mean run.trust?"),
        ("trainer.gpus=[", "trainer.gpus=[ is not an override: its value is not YAML."),
        (
            "model=lenet",
            "model=lenet replaces a section, and a run keeps its sections. Change single keys, such as trainer.gpus=2.",
        ),
        (
            "--gpus",
            "--gpus is not an option. Write key=value, for example trainer.gpus=2. Did you mean trainer.gpus=...?",
        ),
    ],
)
def test_a_wrong_override_of_a_run_directorys_file_is_refused(written: Path, word: str, sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        override_file(written, [word])
    assert str(caught.value) == sentence


def test_a_run_directorys_file_is_not_believed_in_matters_of_trust(written: Path, mine: Path) -> None:
    text = written.read_text()
    assert "trust: []" in text
    written.write_text(text.replace("trust: []", "trust: [os]").replace("code: null", "code: /usr/lib"))
    values, again = override_file(written, [])
    assert (values["run"]["trust"], values["run"]["code"]) == ([], None)
    assert yaml.safe_load(again)["run"] == values["run"]
    values, _ = override_file(written, ["run.trust=[mine]", "--config-dir", str(mine)])
    assert (values["run"]["trust"], values["run"]["code"]) == (["mine"], str(mine.parent))


@pytest.mark.parametrize(
    "text", ["", "- a\n", "a: [1\n", "run: 3\n", "run:\n", "x: !!python/object/apply:os.system ['x']\n", "\0"]
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    with refused("config.yaml: "):
        override_file(write(tmp_path / "config.yaml", text), [])


def test_a_signal_while_hydra_composes_stops_the_command_when_it_is_done() -> None:
    # OmegaConf catches whatever is raised while it resolves and makes an error of its own of it.
    def interrupted(*_: object) -> str:
        signal.raise_signal(
            signal.SIGTERM
        )  # not os.kill: libraries of other tests have threads, which take signals too
        return "run"

    def stop(number: int, _: object) -> None:
        raise StoppedError(number)

    before = signal.signal(signal.SIGTERM, stop)
    register_resolver("interrupted", interrupted)
    try:
        with pytest.raises(StoppedError, match="interrupted by SIGTERM; nothing was started"):
            compose(["run.dir=${interrupted:}"])
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        OmegaConf.clear_resolver("interrupted")
        signal.signal(signal.SIGTERM, before)


def test_a_stop_while_a_key_is_read_stays_one() -> None:
    # OmegaConf makes errors of its own of every Exception: once one with a sentence in place of the signal's number.
    def interrupted(*_: object) -> str:
        raise StoppedError(signal.SIGTERM)

    register_resolver("interrupted", interrupted)
    try:
        with pytest.raises(StoppedError) as found:
            OmegaConf.create({"key": "${interrupted:}"}).key  # noqa: B018
        assert found.value.signum == signal.SIGTERM
    finally:
        OmegaConf.clear_resolver("interrupted")
