"""The command as a user types it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ddpexp.cli.resume import member_of
from tests.conftest import ROOT, SMALL, Ddpexp
from tests.refusals import command_refused, refused


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Commands are forks, but for the interpreters of start_method=spawn."""
    return warm_environ


def test_one_command_trains_and_leaves_a_result(ddpexp: Ddpexp) -> None:
    done = ddpexp(*SMALL, "trainer.gpus=2")
    assert done.code == 0, done.err
    result = done.result()
    assert result["status"] == "done"
    assert (result["step"], result["samples"], result["world_size"]) == (10, 1280, 2)
    assert set(result["metrics"]) == {"eval/loss", "eval/accuracy"}
    assert len(result["weights_sha256"]) == 64
    assert (done.run / "checkpoints/step-00000010/model.safetensors").is_file()


def test_both_start_methods_give_the_same_weights(ddpexp: Ddpexp) -> None:
    arguments = [*SMALL, "trainer.gpus=2", "trainer.threads=1"]
    once = ddpexp(*arguments).result()["weights_sha256"]
    for start_method in ("forkserver", "spawn"):
        assert ddpexp(*arguments, f"launcher.start_method={start_method}").result()["weights_sha256"] == once


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_member_of_another_users_run_is_refused(tmp_path: Path) -> None:
    run = shutil.copytree(ROOT / "tests/samples/finished", tmp_path / "run")
    os.chown(run / "config.yaml", 65534, 65534)
    with refused(f"{run}: another user's"):
        member_of([str(run)])


@pytest.mark.parametrize(
    "arguments", [SMALL, [*SMALL, "-m", "trainer.seed=1,2"], ["evaluate", "run"], ["resume", "run"]]
)
def test_several_commands_that_would_each_run_alone_are_refused(
    ddpexp: Ddpexp, tmp_path: Path, arguments: list[str]
) -> None:
    if arguments[0] in ("evaluate", "resume"):
        arguments = [arguments[0], str(ddpexp(*SMALL).run)]
    before = sorted(tmp_path.rglob("*"))
    done = ddpexp(*arguments, environ={"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    command_refused(done, "torchrun: 2 of these commands")
    assert done.err.endswith(f" {'without torchrun' if '-m' in arguments else 'launcher=torchrun-env'}.\n")
    assert sorted(tmp_path.rglob("*")) == before
