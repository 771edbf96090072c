"""`ddpexp new`: the project that it makes, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpexp.cli.new import kinds, new
from examples.photos.draw import main as draw_photos
from examples.table.table import write as write_table
from tests.conftest import PATIENCE, Ddpexp, python_path, warm_too
from tests.examples import install, install_editable
from tests.refusals import refused
from tests.typed import call


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What the project holds is tested, not how the processes of its runs start: forks."""
    return warm_environ


def made(place: Path, kind: str, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    monkeypatch.chdir(place)
    assert new(call("new", name, "--like", kind)) == 0
    return place / name


GROWN = {  # what users write into the section `data`, as the README of the project says
    "fine-tuning": "root: pictures\n  validation_fraction: 0.2",
    "images": "root: pictures\n  validation_fraction: 0.2",
    "table": "path: mine.csv\n  targets: price\n  inputs: [area, rooms]\n  target_type: number",
    "text": "path: mine.txt",
}


@pytest.mark.variants(1)
@pytest.mark.parametrize("kind", kinds())
def test_a_project_is_complete_and_passes_its_own_tests(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ddpexp: Ddpexp
) -> None:
    project = made(tmp_path, kind, monkeypatch, "my_work")
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert {"README.md", "pyproject.toml", ".gitignore", "src/my_work/recipe.py", "tests/test_recipe.py"} <= files
    assert "src/my_work/conf/recipe/my_work.yaml" in files
    assert not [name for name in files if "myproject" in (project / name).read_text()]
    config = project / "src/my_work/conf/recipe/my_work.yaml"
    if kind in GROWN:
        assert "section `data` of the YAML file" in " ".join((project / "README.md").read_text().split())
        config.write_text(config.read_text().replace("\ndata:\n", f"\ndata:\n  {GROWN[kind]}\n"))
    # In the folder above, where my_work would be a package without code: what an editable installation adds comes first.
    path = python_path(tmp_path, *install_editable(project, tmp_path / "pip"))
    environ = warm_too(ddpexp.environ | {"PYTHONPATH": path})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_work/tests"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_a_project_is_checked_swept_predicted_with_and_exported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ddpexp: Ddpexp
) -> None:
    project = made(tmp_path, kind, monkeypatch, "my-work")
    environ = {"PYTHONPATH": python_path(install(project, tmp_path / "pip"))}
    words = ["recipe=my_work", "trainer.global_batch_size=8"]
    if kind in ("images", "fine-tuning", "contrastive"):
        draw_photos(tmp_path / "photos")
        words += [f"data.root={tmp_path}/photos", "data.size=32"]
    if kind == "contrastive":
        words += ["data.num_workers=0"]
    if kind == "fine-tuning":
        words += ["run.init_skip=[]"]
    if kind == "text":
        (tmp_path / "text.txt").write_text("to be, or not to be\n" * 100)
        words += [f"data.path={tmp_path}/text.txt", "data.block_size=16"]
    if kind == "table":
        write_table(str(tmp_path / "flowers.csv"))
        words += [f"data.path={tmp_path}/flowers.csv", "data.targets=species", "data.inputs=[length,width]"]
    assert ddpexp("check", *words, environ=environ).code == 0
    done = ddpexp("-m", *words, "optimizer.lr=0.01,0.02", "trainer.max_steps=2", environ=environ)
    assert done.code == 0, done.err
    trained = ddpexp(*words, "trainer.max_steps=2", f"run.dir={tmp_path}/run", environ=environ)
    assert trained.code == 0, trained.err
    for verb, out in (("predict", "--out=p.csv"), ("export", "--out=exported")):
        if f"ddpexp {verb} RUN_DIR" in (project / "README.md").read_text():
            done = ddpexp(verb, f"{tmp_path}/run", out, environ=environ)
            assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "new what"),
        (["seedling", "--like"], "new --like: one value"),
        (["seedling", "--like", "point"], "new --like point: ddpexp new seedling --like points"),
        (["seedling", "--like", "gpt"], "new --like gpt: ddpexp new seedling --like text"),
        (["seedling", "--like", "finetuning"], "new --like finetuning: ddpexp new seedling --like fine-tuning"),
        (["seedling", "--like", "SimCLR"], "new --like SimCLR: ddpexp new seedling --like contrastive"),
        (["seedling", "--like", "audio"], "new --like audio: points, contrastive, fine-tuning, images, table, text"),
        (["seedling", "--lik", "points"], "new --lik: --like"),
        (["seedling", "other"], "new seedling other: one name"),
        (["torch"], "new torch: module torch"),
        (["random"], "new random: module random"),
        (["mnist"], "new mnist: recipe mnist"),
        (["class"], "new class: word of Python"),
        (["n3", "images"], "new n3 images: ddpexp new n3 --like images"),
        (["Mine"], "new Mine: ddpexp new mine?"),
        (["my work", "--like", "image"], "new my work: ddpexp new my_work --like images?"),
        (["3d"], "new 3d: letters"),
        (["."], "new .: letters"),
        (["taken"], "new taken: already"),
        (["nowhere/seedling"], "new nowhere/seedling: No such file"),
    ],
)
def test_what_cannot_be_made_is_refused_and_leaves_nothing(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    with refused(expected):
        new(call("new", *arguments))
    assert os.listdir() == ["taken"]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddpexp.cli.new.write_data", full)
    with refused("new seedling: No space left"):
        new(call("new", "seedling"))
    assert os.listdir() == []
