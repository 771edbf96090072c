"""launcher=elastic: torch's agent with c10d and with a real etcd, restarts, a lost machine, and what is refused."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpexp.errors import StoppedError
from ddpexp.launch.elastic import Elastic
from tests.conftest import Call, Ddpexp, ddpexp_processes, finish
from tests.launch.starters import free_port
from tests.launch.test_torchrun import CODE
from tests.points import Recipe, wait_for


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("elastic"), environ), CODE)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd server with its version 2 interface on."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    client, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    words = ["etcd", "--enable-v2", "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--log-level", "error"]
    words += ["--listen-client-urls", client, "--advertise-client-urls", client]
    words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = client.removeprefix("http://")
    wait_for(lambda: subprocess.run(["curl", "-sf", f"{client}/version"], capture_output=True).returncode == 0, 20)
    yield address
    server.kill()
    server.wait()


def test_etcd_leads_the_ranks_together(recipe: Recipe, etcd: str) -> None:
    words = (
        "launcher=elastic",
        "trainer.gpus=2",
        "launcher.rdzv_backend=etcd-v2",
        f"launcher.rdzv_endpoint={etcd}",
        "launcher.rdzv_id=a",
    )
    done = recipe(*words, "trainer.threads=1", timeout=60)
    assert (done.code, done.err) == (0, ""), done.err
    assert done.result()["weights_sha256"] == recipe("trainer.gpus=2", "trainer.threads=1").result()["weights_sha256"]


@pytest.mark.variants(1)
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_lost_workers_are_started_again_in_the_same_run_directory(recipe: Recipe, how: str) -> None:
    done = recipe(
        "launcher=elastic", "trainer.gpus=2", "trainer.threads=1", "task._target_=points.Breaks", f"+task.how={how}", timeout=60
    )
    assert done.code == 0, done.err
    assert done.result()["status"] == "done"
    assert (done.run / "error-1.json").is_file()
    assert [one["step"] for one in done.metrics()] == [4, 4, 8, 8]
    assert "ddpexp: rank 1 on" in done.err
    assert "ddpexp: going on in" in done.err
    assert "torch/distributed" not in done.err.replace("torch/distributed/c10d", "")  # no log of the agent, no traceback of it


@pytest.mark.parametrize(("other", "left"), [(0, 128 + signal.SIGTERM), (1, 1), (7, 1), (2, 128 + signal.SIGTERM)])
def test_a_rank_that_is_ended_because_another_has_failed_does_not_keep_the_agent_from_restarting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int, left: int
) -> None:
    """The agent ends who is left when one rank's command has gone: that looks like somebody's SIGTERM, and is none."""

    def stopped(*_: object) -> int:
        raise StoppedError(signal.SIGTERM)

    codes = tmp_path / "codes"
    codes.write_bytes(other.to_bytes(4, "little") + bytes(4))
    monkeypatch.setenv("DDPEXP_EXIT_CODES", str(codes))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("ddpexp.launch.torchrun_env.TorchrunEnv.launch", stopped)
    monkeypatch.setattr("ddpexp.launch.elastic._END_SECONDS", 0)
    with pytest.raises(StoppedError):
        Elastic().member(Call("time:sleep", ["0"], tmp_path))
    assert int.from_bytes(codes.read_bytes()[4:], "little") == left


def test_the_agent_gives_up_after_max_restarts(recipe: Recipe) -> None:
    words = ("launcher=elastic", "launcher.max_restarts=1", "trainer.gpus=2", "trainer.threads=1")
    done = recipe(*words, "task._target_=points.Breaks", "+task.how=raise", "+task.each=true", timeout=60)
    assert done.code == 1
    assert done.err.count("ddpexp: rank 1 on") == 2
    assert (done.run / "error.json").is_file()
    assert (done.run / "error-1.json").is_file()
    assert done.result()["status"] == "failed"


def test_a_refusal_is_not_tried_again(recipe: Recipe) -> None:
    done = recipe("launcher=elastic", "trainer.gpus=2", "trainer.global_batch_size=1000", timeout=60)
    assert done.code == 2
    assert done.err.count("trainer.global_batch_size=1000 is more than the 96 training samples") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("trainer.nodes=1:3", "trainer.gpus=2", "trainer.global_batch_size=16", "launcher.rdzv_endpoint=localhost:1"),
         "with 3 of trainer.nodes=1:3: trainer.global_batch_size=16"),
        (("trainer.nodes=4:1",), "trainer.nodes=4:1 is no range: the least number of machines comes first"),
        (("trainer.nodes=0:1",), "trainer.nodes=0:1: use auto, a number of machines, or a range such as 1:4."),
        (("trainer.nodes=many",), "trainer.nodes=many: use auto, a number of machines, or a range such as 1:4."),
        (("trainer.nodes=1:2", "trainer.gpus=2"), "launcher.rdzv_endpoint is missing"),
        (("launcher.rdzv_backend=etcd-v2",), "launcher.rdzv_endpoint is missing"),
        (("launcher.rdzv_backend=etcd",), "launcher.rdzv_backend=etcd is not"),
        (("launcher.max_restarts=-1",), "launcher.max_restarts=-1: use 0 or more."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(recipe: Recipe, words: tuple[str, ...], sentence: str) -> None:
    done = recipe("launcher=elastic", *words)
    assert done.code == 2
    assert done.err.startswith(f"ddpexp: {sentence}"), done.err
    assert done.err.count("\n") == 1
    assert not done.run.exists()


def test_a_range_is_for_elastic_alone(recipe: Recipe) -> None:
    done = recipe("trainer.nodes=1:2")
    assert (done.code, done.err) == (2, "ddpexp: trainer.nodes=1:2 is a range, which only launcher=elastic understands.\n")


@pytest.mark.variants(1)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_command_ends_all(recipe: Recipe, number: signal.Signals) -> None:
    before = ddpexp_processes()
    process, run = recipe.start("launcher=elastic", "trainer.gpus=2", "task._target_=points.Sleeps", "trainer.epochs=500")
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0, 60)
    process.send_signal(number)
    done = finish(process, run, 30)
    assert done.code == (-9 if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not ddpexp_processes() - before, 8)
    if number != signal.SIGKILL:
        assert done.result()["status"] == "interrupted"
        said, command = done.err.splitlines()
        assert said.startswith("ddpexp: interrupted by SIGTERM; "), done.err
        assert command.startswith(f"go on with: python -m ddpexp resume {run.name} --config-dir ")


def test_a_signal_to_save_and_one_to_go_on_later_reach_the_ranks(recipe: Recipe) -> None:
    before = ddpexp_processes()
    words = (
        "launcher=elastic",
        "trainer.gpus=2",
        "task._target_=points.Sleeps",
        "trainer.epochs=500",
        "trainer.checkpoint_every=0",
    )
    process, run = recipe.start(*words)
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0, 60)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: any((run / "checkpoints").glob("step-*/checkpoint.json")))
    process.send_signal(signal.SIGQUIT)
    wait_for(lambda: all("Current thread" in (run / f"ranks/{rank}.log").read_text() for rank in (0, 1)))
    process.send_signal(signal.SIGUSR2)
    done = finish(process, run, 30)
    assert done.code == 128 + signal.SIGUSR2
    wait_for(lambda: not ddpexp_processes() - before, 8)
    assert done.result()["status"] == "interrupted"
    assert "starting again" not in done.err
