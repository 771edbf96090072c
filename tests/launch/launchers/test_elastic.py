"""launcher=elastic: torch's agent with c10d and with a real etcd, restarts, a lost machine, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.errors import AbsentError, StoppedError
from ddpexp.launch.launchers.agent_status import AgentStatus, Phase
from ddpexp.launch.launchers.elastic import Elastic
from ddpexp.system.process import children
from tests.conftest import OWN_SERVER, Ddpexp, Done, calling, ddpexp_processes, finish
from tests.launch.launchers.test_torchrun import CODE
from tests.launch.starters import free_port
from tests.points import Recipe, wait_for, weights
from tests.refusals import command_refused, refused
from tests.test_interruptions import points_of_tensorboard

GATED = """\
class Gated(Sides):
    # Says once that it is there, and takes its time for as long as a file is not there.
    def __init__(self, gate):
        self.gate, self.said = gate, False

    def step(self, model, batch):
        if RANK == 0 and not self.said:
            self.said = True
            with open(self.gate + ".starts", "a") as file:
                file.write(os.environ["WORLD_SIZE"] + "\\n")
        if not os.path.exists(self.gate):
            time.sleep(0.2)
        return super().step(model, batch)
"""


@pytest.fixture(scope="module")
def environ(warm_single_environ: dict[str, str]) -> dict[str, str]:
    """What the commands do with the agent is tested, not how their servers start: forks."""
    return warm_single_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("elastic"), environ), f"{CODE}\n\n{GATED}")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd server with its version 2 interface on."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    client, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    command = ["etcd", "--enable-v2", "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--log-level", "error"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += [
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"default={peer}",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = client.removeprefix("http://")
    wait_for(lambda: subprocess.run(["curl", "-sf", f"{client}/version"], capture_output=True).returncode == 0)
    yield address
    server.kill()
    server.wait()


@pytest.mark.slow
def test_etcd_leads_the_ranks_together(recipe: Recipe, etcd: str) -> None:
    overrides = (
        "launcher=elastic",
        "trainer.gpus=2",
        "launcher.rdzv_backend=etcd-v2",
        f"launcher.rdzv_endpoint={etcd}",
        "launcher.rdzv_id=a",
    )
    done = recipe(*overrides, "trainer.threads=1")
    assert (done.code, done.err) == (0, ""), done.err
    alone = recipe("trainer.gpus=2", "trainer.threads=1", environ=OWN_SERVER)
    assert done.result()["weights_sha256"] == alone.result()["weights_sha256"]


@pytest.mark.variants(1)
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_lost_workers_are_started_again_in_the_same_run_directory(recipe: Recipe, how: str) -> None:
    done = recipe(
        "launcher=elastic",
        "trainer.gpus=2",
        "trainer.threads=1",
        "task._target_=points.Breaks",
        f"+task.how={how}",
        timeout=60,
    )
    assert done.code == 0, done.err
    assert done.result()["status"] == "done"
    assert (done.run / "error-1.json").is_file()
    assert [one["step"] for one in done.metrics()] == [4, 4, 8, 8]
    assert "ddpexp: rank 1 on" in done.err
    assert "ddpexp: resuming " in done.err
    assert "torch/distributed" not in done.err.replace(
        "torch/distributed/c10d", ""
    )  # no log of the agent, no traceback of it


@pytest.mark.parametrize(
    ("phase", "end", "left", "leaves"),
    [
        (Phase.RUNS, StoppedError(signal.SIGTERM), 128 + signal.SIGTERM, None),
        (Phase.LOOKS, StoppedError(signal.SIGTERM), 0, 1),
        (Phase.MEETS, StoppedError(signal.SIGTERM), 0, 1),
        (Phase.MEETS, StoppedError(signal.SIGUSR2), 0, 1),
        (Phase.RUNS, StoppedError(signal.SIGUSR2), 128 + signal.SIGUSR2, None),
        (Phase.MEETS, AbsentError("one is gone"), 1, 1),
    ],
)
def test_a_rank_distinguishes_a_users_stop_from_a_restart(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
    end: Exception | StoppedError,
    left: int,
    leaves: int | None,
) -> None:
    """The agent ends who is left when one rank's command has gone, and all when a machine comes.

    That is no user's stop.
    """

    def ended(*_: object) -> int:
        raise end

    for name in ("_END_SECONDS", "_RESTART_NOTICE_SECONDS", "_ABSENT_SECONDS"):
        monkeypatch.setattr(f"ddpexp.launch.launchers.elastic.{name}", 0)
    monkeypatch.setattr("ddpexp.launch.launchers.torchrun_env.run", ended)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    before = signal.getsignal(signal.SIGUSR2)
    with AgentStatus.make(2) as status:
        monkeypatch.setenv("DDPEXP_AGENT_STATUS", str(status.path))
        status.note(phase)
        status.leave(0, 7)  # the one that has failed
        try:
            if leaves is None:
                with pytest.raises(StoppedError):
                    Elastic().member(calling("time:sleep", ["0"], tmp_path))
            else:
                assert Elastic().member(calling("time:sleep", ["0"], tmp_path)) == leaves
        finally:
            signal.signal(signal.SIGUSR2, before)
        assert status.codes() == [7, left][: 1 + bool(left)]


def test_a_member_started_manually_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPEXP_AGENT_STATUS", raising=False)
    with refused("DDPEXP_AGENT_STATUS: launcher=elastic"):
        Elastic().member(calling("time:sleep", ["0"], tmp_path))


@pytest.mark.slow
def test_the_agent_gives_up_after_max_restarts(recipe: Recipe) -> None:
    overrides = ("launcher=elastic", "launcher.max_restarts=1", "trainer.gpus=2", "trainer.threads=1")
    done = recipe(*overrides, "task._target_=points.Breaks", "+task.how=raise", "+task.each=true")
    assert done.code == 1
    assert done.err.count("ddpexp: rank 1 on") == 2
    assert (done.run / "error.json").is_file()
    assert (done.run / "error-1.json").is_file()
    assert done.result()["status"] == "failed"


@pytest.mark.slow
def test_a_refusal_is_not_tried_again(recipe: Recipe) -> None:
    done = recipe("launcher=elastic", "trainer.gpus=2", "trainer.global_batch_size=1000")
    assert done.code == 2
    assert done.err.count("trainer.global_batch_size=1000 is more than the 96 training samples") == 1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("trainer.nodes=1:3", "trainer.gpus=2", "trainer.global_batch_size=16", "launcher.rdzv_endpoint=localhost:1"),
         "trainer.global_batch_size=16: 3 of trainer.nodes=1:3"),
        (("trainer.nodes=4:1",), "trainer.nodes=4:1: range"),
        (("trainer.nodes=0:1",), "trainer.nodes=0:1: 1:4"),
        (("trainer.nodes=many",), "trainer.nodes=many: 1:4"),
        (("trainer.nodes=1:2", "trainer.gpus=2"), "launcher.rdzv_endpoint: missing"),
        (("launcher.rdzv_backend=etcd-v2",), "launcher.rdzv_endpoint: missing"),
        (("launcher.rdzv_backend=etcd",), "launcher.rdzv_backend=etcd: etcd-v2"),
        (("launcher.max_restarts=-1",), "launcher.max_restarts=-1: from 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(
    recipe: Recipe, overrides: tuple[str, ...], expected: str
) -> None:
    done = recipe("launcher=elastic", *overrides)
    command_refused(done, expected)
    assert done.err.count("\n") == 1
    assert not done.run.exists()


def test_a_range_is_for_elastic_alone(recipe: Recipe) -> None:
    done = recipe("trainer.nodes=1:2")
    assert (done.code, done.err) == (
        2,
        "ddpexp: trainer.nodes=1:2 is a range, which only launcher=elastic supports. Use launcher=elastic, or "
        "trainer.nodes=2.\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL]
)
def test_a_signal_to_the_command_ends_all(recipe: Recipe, number: signal.Signals) -> None:
    before = ddpexp_processes()
    process, run = recipe.start(
        "launcher=elastic", "trainer.gpus=2", "task._target_=points.Sleeps", "trainer.epochs=500",
        environ=OWN_SERVER if number == signal.SIGKILL else None,
    )  # fmt: skip
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
    process.send_signal(number)
    done = finish(process, run)
    assert done.code == (-9 if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not ddpexp_processes() - before)
    if number != signal.SIGKILL:
        assert done.result()["status"] == "interrupted"
        said, command = done.err.splitlines()
        assert said.startswith("ddpexp: interrupted by SIGTERM; "), done.err
        assert command.startswith(f"python -m ddpexp resume {run.name} --config-dir ")


def test_a_signal_to_save_and_one_to_requeue_reach_the_ranks(recipe: Recipe) -> None:
    before = ddpexp_processes()
    overrides = (
        "launcher=elastic",
        "trainer.gpus=2",
        "task._target_=points.Sleeps",
        "trainer.epochs=500",
        "trainer.checkpoint_every=0",
    )
    process, run = recipe.start(*overrides)
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: any((run / "checkpoints").glob("step-*/checkpoint.json")))
    process.send_signal(signal.SIGQUIT)
    wait_for(lambda: all("Current thread" in (run / f"ranks/{rank}.log").read_text() for rank in (0, 1)))
    process.send_signal(signal.SIGUSR2)
    done = finish(process, run)
    assert done.code == 128 + signal.SIGUSR2
    wait_for(lambda: not ddpexp_processes() - before)
    assert done.result()["status"] == "interrupted"
    assert "starting again" not in done.err


QUICK = 'launcher.rdzv_conf="last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"'
LONG = (
    "data.train=4800", "trainer.epochs=2", "trainer.log_every=1", "trainer.checkpoint_every=20",
    "trainer.reduction=exact",
    "trainer.micro_batch_size=12", "logger=tensorboard", "task._target_=points.Gated",
)  # fmt: skip


@dataclass(frozen=True)
class Machines:
    """Machines that come and go in one run, which does not end before its gate is opened."""

    recipe: Recipe
    run: Path
    endpoint: str
    started: list[subprocess.Popen[str]]
    workers: int = 1  # of a machine
    training: tuple[str, ...] = LONG

    @property
    def gate(self) -> Path:
        return self.run.with_name(f"{self.run.name}.open")

    def start(self) -> subprocess.Popen[str]:
        """Start a machine; the first keeps the list of them."""
        overrides = ("launcher=elastic", "launcher.max_restarts=10", f"launcher.rdzv_endpoint={self.endpoint}", QUICK)
        size = (f"trainer.gpus={self.workers}", "trainer.nodes=1:2")
        arguments = (*overrides, *size, *self.training, f"+task.gate={self.gate}")
        process, _ = self.recipe.start(*arguments, run=self.run)
        self.started.append(process)
        return process

    def wait(self, workers: int, start: int = 0) -> int:
        """Wait until so many workers train together, in a later start than that; return which start it is."""
        wait_for(lambda: (len(self.starts()) > start and self.starts()[-1] == workers) or not self.living(), 120)
        assert self.living(), [finish(machine, self.run).err for machine in self.started]
        return len(self.starts())

    def living(self) -> list[subprocess.Popen[str]]:
        return [machine for machine in self.started if machine.poll() is None]

    def starts(self) -> list[int]:
        """Return the number of workers of each start that has begun to train."""
        with suppress(FileNotFoundError):
            return list(map(int, self.gate.with_name(f"{self.gate.name}.starts").read_text().split()))
        return []

    def end(self, *machines: subprocess.Popen[str]) -> list[Done]:
        """Open the gate, and see that all end well with the weights and records of a run that nothing has disturbed."""
        self.gate.touch()
        ends = [finish(machine, self.run, 120) for machine in machines]
        assert [end.code for end in ends] == [0] * len(ends), [end.err for end in ends]
        self.see(ends[0])
        return ends

    def see(self, done: Done) -> None:
        undisturbed = self.recipe(*LONG, f"+task.gate={self.gate}", environ=OWN_SERVER)
        assert done.result()["weights_sha256"] == undisturbed.result()["weights_sha256"]
        assert done.result()["metrics"] == undisturbed.result()["metrics"]
        assert [one["step"] for one in done.metrics()] == [one["step"] for one in undisturbed.metrics()]
        assert points_of_tensorboard(done.run) == points_of_tensorboard(undisturbed.run)
        assert set(Counter(points_of_tensorboard(done.run)).values()) == {1}


def kill(machine: subprocess.Popen[str]) -> None:
    """Kill every process of a machine at once."""
    pids, found = [machine.pid], list[int]()
    while pids:
        found += pids
        pids = [child for pid in pids for child in children(pid)]
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    machine.communicate()


@pytest.fixture
def machines(recipe: Recipe) -> Iterator[Machines]:
    found = Machines(recipe, recipe.words()[1], f"127.0.0.1:{free_port()}", [])
    yield found
    for machine in found.living():
        kill(machine)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_machine_that_comes_late_joins_and_one_that_was_killed_joins_again(machines: Machines) -> None:
    first = machines.start()
    start = machines.wait(1)
    second = machines.start()
    start = machines.wait(2, start)
    kill(second)
    start = machines.wait(1, start)
    again = machines.start()
    machines.wait(2, start)
    one, _ = machines.end(first, again)
    assert "ddpexp: the machines meet again; saved at step " in one.err
    assert "interrupted" not in one.err
    assert "Traceback" not in one.err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_late_joins_and_ten_returns(machines: Machines) -> None:
    first = machines.start()  # ten restarts are all that it has: joining uses none
    start = machines.wait(1)
    for _ in range(10):
        second = machines.start()
        start = machines.wait(2, start)
        kill(second)
        start = machines.wait(1, start)
    second = machines.start()
    machines.wait(2, start)
    machines.end(first, second)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sharded_model_is_resumed_by_the_workers_of_the_machine_that_is_left(recipe: Recipe) -> None:
    overrides = (*(word for word in LONG if word != "trainer.reduction=exact"), "trainer.micro_batch_size=6")
    sharded = ("strategy=fsdp", "strategy.min_block_mb=0.00001", "trainer.gpus=2", "optimizer.momentum=0.9")
    machines = Machines(
        recipe, recipe.words()[1], f"127.0.0.1:{free_port()}", [], 2, (*overrides, *sharded, "trainer.threads=1")
    )
    try:
        first, second = machines.start(), machines.start()
        start = machines.wait(4)
        wait_for(lambda: has_checkpoint(machines.run), 120)
        kill(second)
        machines.wait(2, start)
        machines.gate.touch()
        done = finish(first, machines.run, 120)
    finally:
        for machine in machines.living():
            kill(machine)
    assert done.code == 0, done.err
    replicas = recipe(*overrides, "trainer.gpus=2", "optimizer.momentum=0.9", f"+task.gate={machines.gate}")
    assert [one["step"] for one in done.metrics()] == [one["step"] for one in replicas.metrics()]
    resumed, expected = weights(done), weights(replicas)  # sums over four workers were rounded in another order
    assert all(tensor.allclose(expected[name], rtol=1e-3, atol=1e-4) for name, tensor in resumed.items())


def has_checkpoint(run: Path) -> bool:
    return (run / "checkpoints").is_dir() and bool(complete_checkpoints(run / "checkpoints"))
