"""Hydra's own section: obeyed or refused, wherever it is written, and what `${hydra:...}` stands for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from ddpexp.config.compose import compose, compose_command
from ddpexp.config.parse import load, parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.stored import override_file
from ddpexp.config.sweeps import JobComposer, Swept
from ddpexp.config.tree import SweepInFileError
from ddpexp.errors import RefusedError
from tests.refusals import refused

RECIPE = (
    "# @package _global_\ndefaults:\n  - override /model: linear\n  - override /data: mnist\n"
    "task: {_target_: ddpexp.recipes.mnist.Classify}\n"
)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def recipe(folder: Path, text: str, name: str = "mine") -> list[str]:
    """Write a user's recipe and return the words that choose it."""
    write(folder / f"conf/recipe/{name}.yaml", RECIPE + text)
    return ["--config-dir", str(folder / "conf"), f"recipe={name}"]


def one(overrides: list[str]) -> ResolvedConfig:
    found = compose_command(overrides)
    assert isinstance(found, ResolvedConfig)
    return found


def sweep(overrides: list[str]) -> Swept:
    found = compose_command(overrides)
    assert isinstance(found, Swept)
    return found


def refusal(overrides: list[str]) -> str:
    with pytest.raises(RefusedError) as caught:
        compose_command(overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NO_EFFECT = "Hydra's own settings have no effect here."
IGNORED = [
    ("hydra: {run: {dir: elsewhere}}", "hydra.run.dir=elsewhere", "run.dir=... names the run directory."),
    ("hydra: {verbose: true}", "hydra.verbose=true", "A run's log is run.log in its directory"),
    ("hydra: {output_subdir: .hydra}", "hydra.output_subdir=.hydra", "run.dir=... names the run directory"),
    ("hydra: {job: {chdir: true}}", "hydra.job.chdir=true", "Every run stays in the current folder."),
    ("hydra: {job: {env_set: {TOKEN: x}}}", "hydra.job.env_set.TOKEN=x", "Set variables in the shell."),
    ("hydra: {launcher: {_target_: x.Y}}", "hydra.launcher._target_=x.Y", "ddpexp starts the jobs of a sweep itself."),
    ("hydra: {sweep: {subdir: x}}", "hydra.sweep.subdir=x", "The jobs' directories are named by their number"),
    ("hydra: {callbacks: {mine: {_target_: os.system}}}", "hydra.callbacks={mine: {_target_: 'os.system'}}",
        "There are no"),
    ("hydra: {job_logging: {root: {level: DEBUG}}}", "hydra.job_logging.root.level=DEBUG", "A run's log is run.log"),
]  # fmt: skip


@pytest.mark.variants(2)
@pytest.mark.parametrize(("text", "said", "advice"), IGNORED, ids=[said for _, said, _ in IGNORED])
def test_a_setting_of_hydras_that_would_have_no_effect_is_refused_in_a_file(
    tmp_path: Path, text: str, said: str, advice: str
) -> None:
    overrides = recipe(tmp_path, text)
    assert refusal(overrides).startswith(f"{tmp_path}/conf/recipe/mine.yaml sets {said}: {NO_EFFECT} {advice}")
    assert refusal([*overrides, "-m", "trainer.seed=1,2"]).startswith(
        f"{tmp_path}/conf/recipe/mine.yaml sets {said}: {NO_EFFECT}"
    )


def test_so_is_one_that_an_option_of_another_group_or_a_package_header_sets(tmp_path: Path) -> None:
    overrides = recipe(tmp_path, "")
    write(tmp_path / "conf/experiment/big.yaml", "# @package hydra.run\ndir: elsewhere\n")
    write(
        tmp_path / "conf/experiment/wide.yaml",
        "# @package _global_\ndefaults:\n  - override /hydra/job_logging: stdout\n",
    )
    assert refusal([*overrides, "+experiment=big"]).startswith(
        f"{tmp_path}/conf/experiment/big.yaml sets hydra.run.dir=elsewhere"
    )
    assert refusal([*overrides, "+experiment=wide"]).startswith(
        f"{tmp_path}/conf/experiment/wide.yaml chooses hydra/job_logging=stdout: {NO_EFFECT}"
    )
    write(
        tmp_path / "conf/experiment/wide.yaml", "# @package _global_\ndefaults:\n  - override /hydra/launcher: joblib\n"
    )
    assert refusal([*overrides, "+experiment=wide"]).startswith(
        f"hydra/launcher=joblib: {NO_EFFECT} ddpexp starts the jobs"
    )
    write(tmp_path / "conf/experiment/wide.yaml", "# @package _global_\nhydra: {launcher: {n_jobs: 4}}\n")
    assert refusal([*overrides, "+experiment=wide"]).startswith(
        f"experiment/wide.yaml sets hydra.launcher.n_jobs: {NO_EFFECT}"
    )
    assert one(overrides).values["model"]["_target_"] == "ddpexp.recipes.mnist.Linear"


def test_what_a_file_says_as_it_is_anyway_is_no_reason_to_refuse(tmp_path: Path) -> None:
    text = "hydra: {job: {chdir: false, name: digits}, output_subdir: null, verbose: false, run: {dir: .}}"
    assert one(recipe(tmp_path, text)).warnings == ()
    overrides = recipe(tmp_path, "", "plain")
    write(
        tmp_path / "conf/experiment/bare.yaml",
        "# @package _global_\ndefaults:\n  - override /hydra/job_logging: none\n",
    )
    assert one([*overrides, "+experiment=bare"]).warnings == ()


# A sweep by a config file


def test_sweep_params_in_a_file_make_the_sweep_that_the_overrides_make_with_m(tmp_path: Path) -> None:
    text = "hydra: {mode: MULTIRUN, sweeper: {params: {optimizer.lr: '0.1,0.2', trainer.seed: 'range(3)'}}}\n"
    overrides = recipe(tmp_path, text)
    found = sweep([*overrides, "trainer.epochs=1"])
    assert found.keys == {"optimizer.lr", "trainer.seed"}
    assert found.overrides == (f"recipe={overrides[-1].partition('=')[2]}", "trainer.epochs=1")
    assert not found.is_named
    assert sweep([*overrides, "model.x=1,2", "+model.y=3"]).keys == {"optimizer.lr", "trainer.seed", "model.x"}
    assert sweep([*overrides, "trainer.gpus=1,2", "sweep.slots=2"]).settings["slots"] == 2
    assert sweep([*overrides, "hydra.sweep.dir=mine"]).directory == "mine"
    assert refusal([*recipe(tmp_path, "", "plain"), "hydra.sweep.dir=mine"]) == (
        "hydra.sweep.dir=mine is for sweeps. Add -m, or leave it out."
    )
    typed = sweep(["-m", *overrides, "trainer.epochs=1"])
    assert (typed.keys, typed.overrides) == (found.keys, found.overrides)


def test_a_run_given_on_the_command_line_is_one_run_whatever_the_file_says(tmp_path: Path) -> None:
    overrides = recipe(tmp_path, "hydra: {mode: MULTIRUN}\n")
    made = one([*overrides, "hydra.mode=RUN"])
    assert made.overrides == (overrides[-1],)
    assert (
        refusal([*overrides, "hydra.mode=RUN", "-m"])
        == "hydra.mode=RUN is one run, and -m a sweep. Leave one of them out."
    )
    with refused("hydra.mode=MULTIRUN: hydra.mode=RUN", SweepInFileError):
        compose(overrides)  # `ddpexp plan`, for one


def test_params_without_the_mode_are_for_sweeps_alone_which_is_reported(tmp_path: Path) -> None:
    overrides = recipe(tmp_path, "hydra: {sweeper: {params: {trainer.seed: 'range(3)'}}}\n")
    assert one(overrides).warnings == ("hydra.sweeper.params in a config file is for sweeps: add -m",)
    assert sweep(["-m", *overrides]).keys == {"trainer.seed"}


def test_a_file_names_the_directory_of_a_sweep_as_the_command_line_does(tmp_path: Path) -> None:
    overrides = ["-m", "trainer.seed=1,2"]
    assert sweep([*overrides, *recipe(tmp_path, "hydra: {sweep: {dir: mine}}\n")]).directory == "mine"
    assert (
        sweep([*overrides, *recipe(tmp_path, "hydra: {sweep: {dir: 'all/${hydra:job.name}'}}\n")]).directory
        == "all/ddpexp"
    )
    assert (
        sweep([*overrides, *recipe(tmp_path, "hydra: {sweep: {dir: mine}}\n"), "hydra.sweep.dir=other"]).directory
        == "other"
    )
    assert sweep([*overrides, "hydra.sweep.dir='a b'"]).directory == "a b"
    assert not sweep(overrides).is_named


def test_a_file_cannot_have_a_sweeper_run_what_nobody_trusts(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    overrides = ["-m", "trainer.seed=1,2"]
    sly = "hydra: {sweeper: {sampler: {_target_: subprocess.Popen}}}\n"
    optuna = RECIPE.replace(
        "  - override /model: linear\n", "  - override /model: linear\n  - override /hydra/sweeper: optuna\n"
    )
    write(tmp_path / "conf/recipe/sly.yaml", optuna + sly)
    chosen = ["--config-dir", str(tmp_path / "conf"), "recipe=sly"]
    assert refusal([*overrides, *chosen]).startswith("hydra.sweeper.sampler._target_=subprocess.Popen is not allowed: ")
    write(tmp_path / "conf/recipe/fine.yaml", optuna + "hydra: {sweeper: {n_trials: 3}}\n")
    assert sweep([*overrides, *chosen[:2], "recipe=fine"]).sweeper["n_trials"] == 3
    assert (
        sweep([*overrides, "hydra/sweeper=optuna", "hydra/sweeper/sampler=random"]).sweeper["sampler"]["seed"] is None
    )


# ${hydra:...}


def test_what_hydra_knows_of_a_command_can_be_referred_to(tmp_path: Path) -> None:
    text = (
        "model:\n  name: '${hydra:runtime.choices.model}'\n  where: '${hydra:runtime.cwd}/x'\n"
        "  words: '${hydra:job.override_dirname}'\n  program: '${hydra:job.name}'\n  mode: '${hydra:mode}'\n"
    )
    made = one(
        [*recipe(tmp_path, text), "trainer.seed=3", "optimizer.lr=0.5", "run.dir='out/${hydra:job.override_dirname}'"]
    )
    model = made.values["model"]
    assert model["name"] == "linear"
    assert model["where"] == f"{os.getcwd()}/x"
    assert model["words"] == "optimizer.lr=0.5,recipe=mine,trainer.seed=3"
    assert (model["program"], model["mode"]) == ("ddpexp", "RUN")
    assert made.values["run"]["dir"] == "out/optimizer.lr=0.5,recipe=mine,trainer.seed=3"
    assert "hydra:" not in made.text
    assert load(made.text) == parse(made.values)


def test_how_overrides_are_joined_can_be_chosen(tmp_path: Path) -> None:
    text = (
        "hydra: {job: {name: digits, config: {override_dirname: {item_sep: +, kv_sep: '-', exclude_keys: [recipe]}}}}\n"
    )
    text += "model: {x: '${hydra:job.name}/${hydra:job.override_dirname}'}\n"
    assert one([*recipe(tmp_path, text), "trainer.seed=3", "optimizer.lr=0.5"]).values["model"]["x"] == (
        "digits/optimizer.lr-0.5+trainer.seed-3"
    )


def test_beside_a_secret_the_resolved_value_is_recorded_and_the_secret_stays_a_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPEXP_TEST_SECRET", "48151623")
    made = one(recipe(tmp_path, "model: {x: '${hydra:job.name}-${oc.env:DDPEXP_TEST_SECRET}'}\n"))
    assert yaml.safe_load(made.text)["model"]["x"] == "ddpexp-${oc.env:DDPEXP_TEST_SECRET}"
    assert load(made.text).model.kwargs["x"] == "ddpexp-48151623"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "runtime.output_dir",
            "the run directory is made when the configuration is accepted. Type run.dir=..., and write ${run.dir}",
        ),
        ("job.num", "${hydra:job.num} has a value only in the jobs of a sweep (-m)"),
        ("runtime.choices.experiment", "has no value: no option of experiment is chosen"),
        ("job.id", "${hydra:job.id} has no value here: there is runtime.cwd, "),
    ],
)
def test_what_cannot_be_answered_is_refused_with_its_key(tmp_path: Path, path: str, sentence: str) -> None:
    said = refusal(recipe(tmp_path, f"model: {{x: '${{hydra:{path}}}'}}\n"))
    assert said.startswith("model.x is invalid: ")
    assert sentence in said


def test_the_jobs_of_a_sweep_have_numbers_and_overrides_of_their_own(tmp_path: Path) -> None:
    text = (
        "model: {x: '${hydra:job.num}', y: '${hydra:sweep.dir}', z: '${hydra:job.override_dirname}', m: "
        "'${hydra:mode}'}\n"
    )
    swept = sweep(["-m", *recipe(tmp_path, text), "trainer.seed=1,2", "hydra.sweep.dir=all"])
    jobs = JobComposer(swept)
    for number in (0, 1):
        model = jobs.compose(["recipe=mine", f"trainer.seed={number + 1}"], tmp_path / str(number), number).values[
            "model"
        ]
        assert model == {
            "_target_": "ddpexp.recipes.mnist.Linear", "x": number, "y": "all",
            "z": f"recipe=mine,trainer.seed={number + 1}",
            "m": "MULTIRUN",
        }  # fmt: skip


def test_an_override_for_a_run_directory_may_refer_to_the_current_folder(tmp_path: Path) -> None:
    written = write(tmp_path / "config.yaml", one(["recipe=mnist"]).text)
    values, _ = override_file(written, ["data.root=${hydra:runtime.cwd}/d"])
    assert values["data"]["root"] == f"{os.getcwd()}/d"
    with refused("config.yaml: data.root is invalid: ${hydra:runtime.choices.model}"):
        override_file(written, ["data.root=${hydra:runtime.choices.model}"])
