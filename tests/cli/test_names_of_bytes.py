"""File names that are not UTF-8, which Linux allows: they work where nothing records them, or get one sentence."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ddpexp.config.arguments import Arguments
from ddpexp.config.compose import compose, compose_command
from ddpexp.config.stored import override_file
from ddpexp.config.sweeps import JobComposer, compose_sweep
from ddpexp.errors import RefusedError
from ddpexp.system.text import is_utf8, sanitize
from tests.conftest import ROOT, SMALL, Ddpexp
from tests.refusals import refused

NAME = os.fsdecode(b"caf\xe9")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    return warm_environ


@pytest.mark.parametrize(
    "text",
    [
        "data.root=NAME", 'data.root="/tmp/NAME"', "run.dir='NAME'", "+model.x='NAME'", "recipe=NAME",
        "run.trust=['NAME']", "~model.NAME", "NAME=3",
    ],
)  # fmt: skip
def test_an_override_that_no_file_can_record_is_refused_by_its_name(text: str) -> None:
    override = text.replace("NAME", NAME)
    for argv in (["recipe=mnist", override], ["-m", "recipe=mnist", "trainer.seed=0,1", override]):
        if "-m" in argv and "run.dir" in override:
            continue  # refused for another reason
        with refused(f"{override}: not UTF-8"):
            compose_command(argv)
    with refused(f"{override}: not UTF-8"):
        override_file(ROOT / "tests/samples/finished/config.yaml", [override], ())
    assert "caf\\xe9" in sanitize(override)


def test_a_config_folder_that_hydra_cannot_search_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples/rows/conf", tmp_path / NAME / "conf")
    with refused(f"--config-dir {folder}: not UTF-8"):
        compose(["--config-dir", str(folder), "recipe=mnist"])


def test_a_package_in_a_folder_that_hydra_cannot_search_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpexp.config.tree.plugin_folders", lambda: [tmp_path / NAME / "conf"])
    with refused(f"{NAME}/conf: not UTF-8"):
        compose(["recipe=mnist"])


def test_a_sweep_in_a_folder_that_its_jobs_cannot_record_is_refused() -> None:
    swept = compose_sweep(Arguments.of(["-m", "recipe=mnist", "trainer.seed=0,1"]))
    with pytest.raises(RefusedError) as caught:
        JobComposer(swept).compose(["recipe=mnist", "trainer.seed=0"], Path(f"/tmp/{NAME}/0000"))
    assert str(caught.value).startswith(f"the path /tmp/{NAME} is not UTF-8")


def test_a_run_in_such_a_folder_trains_resumes_and_is_evaluated(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / NAME / NAME).mkdir(parents=True)
    ddpexp = Ddpexp(tmp_path / NAME, environ)
    done = ddpexp(*SMALL, "run.dir=run", "data.root=${oc.env:FOO}", environ={"FOO": NAME, "XDG_CACHE_HOME": NAME})
    assert (done.code, "Traceback" in done.err) == (0, False), done.err
    moved = shutil.move(tmp_path / NAME / "run", tmp_path / NAME / f"run{NAME}")
    words = ("data.root=${oc.env:FOO}", "trainer.max_steps=12", "trainer.epochs=3")
    done = ddpexp("resume", str(moved), *words, environ={"FOO": NAME})
    assert done.code == 0, done.err
    assert ddpexp("evaluate", str(moved), words[0], environ={"FOO": NAME}).code == 0


def test_what_counts_as_utf8() -> None:
    assert is_utf8("café \U0001f600")
    assert not is_utf8(NAME)
    assert not is_utf8("\ud800")
    assert sanitize("\ud800") == "\\ud800"
