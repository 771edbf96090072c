"""The forks that stand for new commands and fork servers (`tests.warm`): taken, and only where they are as good."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpexp.system.process import ancestors
from tests.conftest import PATIENCE, SMALL, Ddpexp, finish, living, python_path
from tests.points import Recipe
from tests.warm.popen import Forked
from tests.warm.state import COMMANDS, SOCKET, ignored_signals, state


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """The environment that is tested."""
    return warm_environ


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("variables", "forked"),
    [({}, True), ({"PACE": "1"}, True), ({"PYTHONHASHSEED": "1"}, False), ({"OMP_NUM_THREADS": "1"}, False)],
)
def test_a_command_gets_a_fork_unless_a_new_interpreter_would_differ(
    ddpexp: Ddpexp, tmp_path: Path, variables: dict[str, str], forked: bool
) -> None:
    reached = tmp_path / "reached"
    process, run = ddpexp.start(*SMALL, environ={**variables, "DDPEXP_FAULT": f"joined:pause={reached}"})
    assert isinstance(process, Forked)
    assert has_its_own_rank(process, run, reached) != forked
    assert process.forked == forked


def has_its_own_rank(process: subprocess.Popen[str], run: Path, reached: Path) -> bool:
    """Return whether the rank of a command descends from it, once the rank pauses; end both."""
    deadline = time.monotonic() + PATIENCE
    while not reached.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    [rank] = set(living(run)) - {process.pid}
    found = process.pid in ancestors(rank)
    process.send_signal(signal.SIGTERM)
    os.kill(rank, signal.SIGKILL)  # it sleeps for ever
    finish(process, run)
    return found


def test_a_run_is_the_same_with_a_fork_and_with_a_server_of_its_own(
    ddpexp: Ddpexp, tmp_path: Path, plain_environ: dict[str, str]
) -> None:
    def left(one: Ddpexp) -> tuple[str, list[str], list[str], list[str]]:
        done = one(*SMALL, "trainer.gpus=2", "trainer.threads=1")
        assert done.code == 0, done.err
        files = sorted(str(path.relative_to(done.run)) for path in done.run.rglob("*"))
        return done.result()["weights_sha256"], files, sorted(done.result()), sorted(done.manifest())

    plain = tmp_path / "plain"
    plain.mkdir()
    assert left(ddpexp) == left(Ddpexp(plain, plain_environ))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_forked_commands_end_is_reported(ddpexp: Ddpexp, number: signal.Signals) -> None:
    process, run = ddpexp.start(*SMALL, "trainer.max_steps=1000000", "trainer.epochs=null")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.send_signal(number)
    done = finish(process, run)
    assert done.code == (-9 if number == signal.SIGKILL else 128 + 15), done
    assert process.poll() == done.code


def test_modules_on_another_path_are_imported_by_a_new_interpreter(ddpexp: Ddpexp, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    process, run = ddpexp.start("--version", environ={"PYTHONPATH": python_path(tmp_path / "there")})
    assert isinstance(process, Forked)
    assert not process.forked
    assert finish(process, run).code == 0


def test_without_the_processes_a_command_fails_and_does_not_start_slowly(ddpexp: Ddpexp, tmp_path: Path) -> None:
    done = ddpexp(*SMALL, environ={SOCKET: str(tmp_path / "nothing")})
    assert done.code != 0
    assert "No such file or directory" in done.err
    with pytest.raises(FileNotFoundError):
        ddpexp(*SMALL, environ={COMMANDS: str(tmp_path / "nothing")})


def test_a_command_that_does_not_wait_for_its_server_leaves_the_others_theirs(warm_environ: dict[str, str]) -> None:
    for waits in (False, True):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(warm_environ[SOCKET])
            connection.settimeout(PATIENCE)
            connection.send(b'{"state": "another"}')
            assert not waits or connection.recv(100) == b"null"


@pytest.mark.parametrize(
    "name", ["PYTHONHASHSEED", "LD_PRELOAD", "OMP_NUM_THREADS", "TORCH_LOGS", "CUDA_VISIBLE_DEVICES"]
)
def test_a_variable_that_is_read_when_a_library_is_loaded_is_a_difference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(ignored_signals())
    monkeypatch.setenv(name, "other")
    assert state(ignored_signals()) != before


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PACE"])
def test_a_variable_that_is_read_later_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(ignored_signals())
    monkeypatch.setenv(name, "other")
    assert state(ignored_signals()) == before


def test_a_command_that_torchrun_starts_gets_a_fork(warm_single_environ: dict[str, str], tmp_path: Path) -> None:
    run, reached = tmp_path / "run", tmp_path / "reached"
    of_torchrun = {
        "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ddpexp", *SMALL, "launcher=torchrun-env", f"run.dir={run}"],
        env={**warm_single_environ, **of_torchrun, "DDPEXP_FAULT": f"joined:pause={reached}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert not has_its_own_rank(process, run, reached)


@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of its own takes root")
def test_a_command_on_another_host_gets_a_fork_that_is_on_that_host(
    warm_environ: dict[str, str], tmp_path: Path
) -> None:
    run, reached = tmp_path / "run", tmp_path / "reached"
    command = shlex.join([sys.executable, "-m", "ddpexp", *SMALL, "trainer.device=cpu", f"run.dir={run}"])
    process = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", f"hostname elsewhere; ip link set lo up; exec {command}"],
        env={**warm_environ, "DDPEXP_FAULT": f"joined:pause={reached}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE
    while not reached.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    [rank] = set(living(run)) - {process.pid}
    assert process.pid not in ancestors(rank)
    for kind in ("net", "uts"):
        assert os.readlink(f"/proc/{rank}/ns/{kind}") == os.readlink(f"/proc/{process.pid}/ns/{kind}")
    os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert json.loads((run / "manifest.json").read_text())["hosts"] == ["elsewhere"]


def test_an_ignored_signal_is_a_difference() -> None:
    before = ignored_signals()
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert state(ignored_signals()) != state(before)
    finally:
        signal.signal(signal.SIGHUP, handler)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "new"])
def test_warnings_are_what_the_environment_says(ddpexp: Ddpexp, plain_environ: dict[str, str], how: str) -> None:
    code = "class Warns(Sides):\n    def step(self, model, batch):\n        __import__('warnings').warn('odd', UserWarning)\n"
    recipe = Recipe(
        ddpexp if how == "fork" else Ddpexp(ddpexp.folder, plain_environ),
        f"{code}        return super().step(model, batch)\n",
    )
    words = ("task._target_=points.Warns", "trainer.max_steps=1")
    done = recipe(*words)
    assert done.code == 1
    assert "UserWarning: odd" in done.err
    assert recipe(*words, environ={"PYTHONWARNINGS": "error::UserWarning,ignore:odd"}).code == 0
