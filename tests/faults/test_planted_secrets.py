"""A secret planted everywhere: in the folder's name, keys, texts, errors and data; all that was written is searched."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import yaml

from tests.conftest import Ddpexp, Done, finish
from tests.points import Recipe
from tests.refusals import command_refused

VALUE = "q5zk-planted-7wyx"
NAMED = {"DDPEXP_SECRETS": "PROJECT", "PROJECT": VALUE}
CODE = """\
import logging
import warnings


class Told(Sides):
    def __init__(self, how="run", label=None):
        self.how, self.label = how, label

    def step(self, model, batch):
        print("printed", os.environ["PROJECT"], flush=True)
        print({"quoted": os.environ["PROJECT"]}, file=sys.stderr)
        logging.getLogger("mine").warning("logged %s", os.environ["PROJECT"])
        warnings.warn(f"warned of {os.environ['PROJECT']}", RuntimeWarning)
        if self.how == "raise":
            raise ValueError(f"at https://me:typed-by-hand@host/{os.environ['PROJECT']}")
        loss, count, metrics = super().step(model, batch)
        return loss, count, {**metrics, os.environ["PROJECT"]: metrics["accuracy"]}

    def on_eval(self, model, batch, logger, step):
        value = os.environ["PROJECT"]
        logger.text(f"text of {value}", f"a text with {value}")
        logger.image(f"image of {value}", torch.zeros(4, 4, 3, dtype=torch.uint8), step)
        logger.histogram(f"histogram of {value}", torch.randn(20), step)
        logger.scalars(step, 1.0, {f"scalar/{value}": 1.0})

    def predict(self, model, batch):
        return {os.environ["PROJECT"]: model(batch[1])}
"""
TOLD = (
    "task._target_=points.Told",
    "trainer.gpus=2",
    "trainer.max_steps=4",
    "trainer.log_every=1",
    "trainer.eval_every=2",
)


def forms() -> list[bytes]:
    """Return the ways in which the value may be found; it starts at any of three places of a text in base64."""
    cores = [base64.b64encode(b"\0" * shift + VALUE.encode())[4 if shift else 0 : -4] for shift in range(3)]
    return [VALUE.encode(), VALUE.encode("utf-16-le"), VALUE[::-1].encode(), *cores]


def check_hidden(texts: Mapping[str, bytes]) -> None:
    assert texts
    for where, content in texts.items():
        for form in forms():
            assert form not in content, f"{where}: {content[max(0, content.find(form) - 200) :][:400]!r}"


def written(*folders: Path, but: Iterable[Path] = ()) -> dict[str, bytes]:
    """Return what is in the files below folders, and their names, beside those that the test has made."""
    texts = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if any(path.is_relative_to(own) for own in but):
                continue
            name = str(path.relative_to(folder))
            texts[f"the name {name}"] = name.encode()
            if path.is_file():
                texts[name] = path.read_bytes()
    return texts


def printed(done: Done) -> dict[str, bytes]:
    return {"standard output": done.out.encode(), "standard error": done.err.encode()}


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a run prints and writes is tested: commands are forks."""
    return warm_environ


@pytest.fixture
def project(tmp_path: Path, environ: dict[str, str]) -> Recipe:
    """A recipe in a folder with the secret in its name, which is the current one."""
    folder, home = tmp_path / f"of-{VALUE}", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder.mkdir()
    return Recipe(Ddpexp(folder, {**environ, **NAMED, **home, "PYTHONWARNINGS": "default"}), CODE)


@pytest.mark.slow
@pytest.mark.fault("S10")
def test_a_project_in_a_folder_with_the_secret_in_its_name_leaves_it_nowhere(project: Recipe) -> None:
    folder, conf = project.ddpexp.folder, ("--config-dir", str(project.folder / "conf"))
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    remote = f"https://me:{VALUE}@host/repository.git"
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=folder, check=True)
    own = [project.folder, folder / ".git"]
    done = project(*TOLD, "logger=[tensorboard,csv]", f"+task.label={VALUE}", "trainer.checkpoint_every=2")
    assert done.code == 0, done.err
    assert "printed ${PROJECT}" in done.out
    config = yaml.safe_load((done.run / "config.yaml").read_text())
    assert config["run"]["code"].endswith("of-${oc.env:PROJECT}/project")
    assert config["task"]["label"] == "${oc.env:PROJECT}"
    check_hidden({**printed(done), **written(folder, but=own)})
    label, run = f"task.label={VALUE}", str(done.run)
    for words in (
        ("resume", run, *conf, "trainer.max_steps=6", label),
        ("evaluate", run, *conf, label, "--json"),
        ("predict", run, *conf, label, "--out", "made.csv"),
        ("predict", run, *conf, label, "--out", "made.npz"),
        ("export", run, *conf, label, "--format", "safetensors", "--out", "exported"),
        ("table", run),
        ("plan", *conf, "recipe=points", *TOLD),
    ):
        process, _ = project.ddpexp.start(*words)
        following = finish(process, done.run)
        assert following.code == (words[0] == "export"), following.err  # no model for the first part of its batches
        check_hidden({**printed(following), **written(folder, but=own)})
    process, _ = project.ddpexp.start("resume", run, *conf, "trainer.max_steps=8")
    command_refused(finish(process, done.run), f"{done.run.name}: task.label=${{oc.env:PROJECT}}")


@pytest.mark.fault("S10")
def test_a_run_that_fails_and_a_sweep_leave_it_nowhere(project: Recipe) -> None:
    failed = project(*TOLD, "+task.how=raise")
    assert failed.code == 1
    assert "at https://me:***@host/${PROJECT}" in failed.err
    (project.folder / "conf/experiment").mkdir()
    label = (
        f"# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      +task.label: {VALUE},other\n"
    )
    (project.folder / "conf/experiment/swept.yaml").write_text(label)
    words = ("--config-dir", str(project.folder / "conf"), "recipe=points", *TOLD, "+experiment=swept")
    process, _ = project.ddpexp.start(*words, "hydra.sweep.dir=swept", "-m")
    swept = finish(process, project.ddpexp.folder / "swept")
    assert swept.code == 0, swept
    own = [project.folder]
    check_hidden({**printed(failed), **printed(swept), **written(project.ddpexp.folder, but=own)})
    names = sorted(path.name for path in swept.run.iterdir() if path.name.startswith("000"))
    assert names == ["0000_task.label=-oc.env-PROJECT-", "0001_task.label=other"]


@pytest.mark.fault("S10")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([f"run.dir=runs/{VALUE}"], "run.dir=runs/${PROJECT}: the value of PROJECT"),
        (
            ["launcher=slurm", "launcher.dry_run=true", f"launcher.setup=['export X={VALUE}']"],
            "job.sbatch: export X=${PROJECT}",
        ),
        (["-m", f"hydra.sweep.dir={VALUE}", "trainer.seed=1,2"], "hydra.sweep.dir=${PROJECT}: the value of PROJECT"),
    ],
)
def test_what_cannot_be_masked_is_refused(recipe: Recipe, words: list[str], expected: str) -> None:
    arguments, run = recipe.words(*words, run=recipe.ddpexp.folder / "run")
    if words[0].startswith(("run.dir", "-m")):
        arguments.remove(f"run.dir={run}")
    process, _ = recipe.ddpexp.start(*arguments, environ={**NAMED})
    done = finish(process, run)
    command_refused(done, expected)
    check_hidden({**printed(done), **written(recipe.ddpexp.folder, but=[recipe.folder]), "ran": b""})
    assert not any(path.name not in ("project", "temporary") for path in recipe.ddpexp.folder.iterdir())


def test_the_forms_that_are_searched_are_found() -> None:
    for shift in range(3):
        with pytest.raises(AssertionError):
            check_hidden({"x": base64.b64encode(b"-" * shift + VALUE.encode() + b"----")})
