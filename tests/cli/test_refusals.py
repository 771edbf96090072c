"""A wrong word is answered at once by the real command: one sentence, exit code 2, nothing written."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import OWN_SERVER, PATIENCE, ROOT, SMALL, Ddpexp, Done, python_path
from tests.listed import listed, unwrapped
from tests.refusals import command_refused

# config/test_compose.py and config/test_sections.py hold what is refused; here are a few of each kind, with all around
# them.
REFUSED = [
    ("trainer.gpu=2", "trainer.gpu: trainer.gpus?"),
    ("optimizer=adamww", "optimizer=adamww: optimizer=adamw?"),
    ("model.hidden=wide", "model.hidden=wide: number"),
    ("trainer.device=cuda", "trainer.device=cuda: trainer.device=cpu"),
    (
        "trainer.gpus=8 trainer.global_batch_size=100 trainer.micro_batch_size=16",
        "trainer.global_batch_size=100: multiple of 128",
    ),
    ("trainer.seed=1,2", "trainer.seed=1,2: -m"),
    ("--config mine/conf", "--config: --config-dir?"),
    ("-m trainer.sed=1,2", "trainer.sed: trainer.seed?"),
    ("--gpus 2", "--gpus: trainer.gpus=2"),
    ("data.source=embeded", "data.source=embeded: data.source=embedded?"),
]


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is refused is tested, not how fork servers start."""
    return warm_environ


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.variants(2)
@pytest.mark.fault(63, 65)
@pytest.mark.parametrize(("overrides", "expected"), REFUSED, ids=[overrides.split()[0] for overrides, _ in REFUSED])
def test_a_wrong_override_ends_the_command_with_2_one_sentence_and_nothing_written(
    ddpexp: Ddpexp, tmp_path: Path, overrides: str, expected: str
) -> None:
    done = ddpexp(*overrides.split(), environ={"CUDA_VISIBLE_DEVICES": ""})
    command_refused(done, expected)
    assert done.err.count("\n") == 1
    assert written(tmp_path) == []


@pytest.mark.fault(64, "S4")
def test_a_strangers_name_is_refused_without_being_imported(ddpexp: Ddpexp, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "stranger.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\ndef system(*_): pass\n")
    environ = {"PYTHONPATH": python_path(ROOT, code)}
    done = ddpexp(*SMALL, "+task.inner=[{a:{_target_:stranger.system}}]", environ=environ)
    command_refused(done, "task.inner[0].a._target_=stranger.system: not allowed")
    assert done.err.count("\n") == 1
    assert written(tmp_path) == ["code", "code/stranger.py"]


@pytest.mark.fault(64, "S4")
def test_what_an_allowed_module_borrowed_is_refused_before_anything_is_written(ddpexp: Ddpexp, tmp_path: Path) -> None:
    done = ddpexp(*SMALL, "data._target_=ddpexp.data.order.os.system", f"+data.command=touch {tmp_path}/ran")
    command_refused(done, "data._target_=ddpexp.data.order.os.system: not allowed")
    assert written(tmp_path) == []


def test_a_run_directory_that_holds_something_is_refused_and_kept(ddpexp: Ddpexp, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("x")
    command_refused(ddpexp(*SMALL, "run.dir=full"), "run.dir=full: not empty")
    assert written(tmp_path) == ["full", "full/mine.txt"]


@pytest.mark.fault(64)
@pytest.mark.parametrize(
    ("word", "expected"),
    [("trainer.global_batch_size=1000", "trainer.global_batch_size=1000: 640"), ("+model.depth=3", "model: depth")],
)
def test_what_only_the_workers_can_see_is_refused_by_them_with_2_and_nothing_written(
    ddpexp: Ddpexp, tmp_path: Path, word: str, expected: str
) -> None:
    for where in (["run.dir=deep/inside/run"], ["run.dir=null"]):
        done = ddpexp(*SMALL, word, "trainer.gpus=2", *where)
        command_refused(done, expected)
        assert done.err.count("\n") == 1
        assert written(tmp_path) == []


def test_what_was_there_before_a_refused_start_stays(ddpexp: Ddpexp, tmp_path: Path) -> None:
    (tmp_path / "outputs/empty").mkdir(parents=True)
    assert ddpexp(*SMALL, "+model.depth=3", "run.dir=outputs/empty").code == 2
    assert written(tmp_path) == ["outputs", "outputs/empty"]


def torch_trap(folder: Path) -> dict[str, str]:
    """A library called torch that comes first and leaves a file where somebody imports it."""
    trap = folder / "trap"
    (trap / "torch").mkdir(parents=True)
    (trap / "torch/__init__.py").write_text(f"open({str(folder / 'imported')!r}, 'w').close()\nraise ImportError\n")
    return {"PYTHONPATH": python_path(trap), **OWN_SERVER}


@pytest.mark.parametrize(
    "question",
    [
        "--help", "-m --help", "hydra.mode=MULTIRUN --help", "help", "help trainer.seed launcher=slurm evaluate",
        "--cfg job",
        "--info", "--version", "evaluate --help", "completion bash",
    ],
)  # fmt: skip
def test_a_question_is_answered_without_torch_and_writes_nothing(ddpexp: Ddpexp, tmp_path: Path, question: str) -> None:
    environ = torch_trap(tmp_path)
    before = written(tmp_path)
    done = ddpexp(*question.split(), environ=environ)
    assert (done.code, done.err) == (0, "")
    assert written(tmp_path) == before
    if question == "--help":
        for group, chosen in (("model", "lenet"), ("optimizer", "mnist_sgd")):
            assert f" {listed(group, chosen=chosen)} " in unwrapped(done.out)
        assert "\n  scheduler  cifar10, constant, constant_with_warmup, cosine, exponential,\n" in done.out
        assert "\n  trainer.global_batch_size=128 " in done.out
    if question == "--cfg job":
        assert "global_batch_size: 128" in done.out


def test_the_trap_for_torch_works(ddpexp: Ddpexp, tmp_path: Path) -> None:
    done = ddpexp(*SMALL, environ=torch_trap(tmp_path))
    command_refused(done, "The fork server: import torch")
    assert (tmp_path / "imported").exists()


def test_a_console_script_does_the_same_as_the_module(ddpexp: Ddpexp, tmp_path: Path) -> None:
    import subprocess

    script = shutil.which("ddpexp", path=os.path.dirname(sys.executable))
    if script is None:
        pytest.skip("ddpexp is not installed beside this Python")
    done = subprocess.run(
        [script, "trainer.gpu=2"], cwd=tmp_path, env=ddpexp.environ, capture_output=True, text=True, timeout=PATIENCE
    )
    command_refused(Done(done.returncode, done.stdout, done.stderr, tmp_path), "trainer.gpu: trainer.gpus?")
    assert written(tmp_path) == []
