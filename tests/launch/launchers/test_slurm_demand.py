"""What a job asks of the nodes of a cluster, and which clusters can never run it; the lines are those of real sinfo."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from ddpexp.launch import WorkerRequest
from ddpexp.launch.launchers.slurm import Slurm
from ddpexp.launch.launchers.slurm_demand import check, gpus_by_type, idle_gpus, known_nodes, megabytes
from ddpexp.launch.launchers.slurm_text import container_warnings
from ddpexp.system.job_schedulers.slurm import Nodes, nodes_in
from tests.conftest import calling
from tests.refusals import refused

SINFO = """\
cpu|4|64|256000|(null)|7-00:00:00|1-infinite
gpu*|2|32|128000|gpu:a100:4(S:0-1)|1-00:00:00|1-4
gpu*|6|32|64000|gpu:v100:4,shard:8|1-00:00:00|1-4
old|3|16|16000|gpu:2|infinite|1-infinite
"""


def known(partition: str | None) -> Sequence[Nodes]:
    nodes = nodes_in(SINFO, partition)
    assert not isinstance(nodes, str)
    return nodes


def test_the_nodes_of_partitions_are_read() -> None:
    a100 = Nodes("gpu", 2, 32, 128_000, {"a100": 4}, 86_400, 4)
    assert nodes_in(SINFO, None) == (a100, replace(a100, count=6, memory=64_000, gpus={"v100": 4}))
    assert nodes_in(SINFO, "old,cpu") == (
        Nodes("cpu", 4, 64, 256_000, {}, 7 * 86_400),
        Nodes("old", 3, 16, 16_000, {"": 2}),
    )
    assert nodes_in(SINFO, "new") == "sinfo names no nodes of new; partitions are cpu, gpu, old"
    assert nodes_in("", None) == "sinfo names no nodes of a default partition; partitions are none"
    assert nodes_in("gpu*|two|32|128000|gpu:4|infinite|1-infinite\n", None) == "the output of sinfo has an unknown form"


@pytest.mark.parametrize(
    ("launcher", "asked", "expected"),
    [
        (Slurm(gpus_per_node=8), WorkerRequest(), "launcher.gpus_per_node=8: trainer.gpus=4 trainer.nodes=2"),
        (Slurm(gres="gpu:a100:8"), WorkerRequest(), "launcher.gres=gpu:a100:8: launcher.gpus_per_node=a100:4."),
        (Slurm(gpus_per_node="h100:4"), WorkerRequest(), "launcher.gpus_per_node=h100:4: a100, v100"),
        (Slurm(), WorkerRequest(gpus=8), "trainer.gpus=8: trainer.device=cpu"),
        (Slurm(), WorkerRequest(gpus=6, device="cuda"), "trainer.gpus=6: more nodes"),
        (Slurm(partition="cpu", gpus_per_node=1), WorkerRequest(), "launcher.gpus_per_node=1: have none"),
        (Slurm(gpus_per_node="a100:4"), WorkerRequest(nodes=3), "trainer.nodes=3: the 2 nodes"),
        (Slurm(gpus_per_node=4), WorkerRequest(nodes=5), "trainer.nodes=5: trainer.nodes=4 or less"),
        (
            Slurm(cpus_per_task=10, gpus_per_node=4),
            WorkerRequest(),
            "launcher.cpus_per_task=10: launcher.cpus_per_task=8 or less",
        ),
        (Slurm(mem="200G"), WorkerRequest(), "launcher.mem=200G: launcher.mem=128000M"),
        (Slurm(time="2-0"), WorkerRequest(), "launcher.time=2-0: launcher.time=1440"),
        (Slurm(gpus_per_node="v100:4", mem="100G"), WorkerRequest(), "100G of memory"),
    ],
)
def test_a_job_that_no_cluster_of_this_kind_can_run_is_refused(
    launcher: Slurm, asked: WorkerRequest, expected: str
) -> None:
    demand = launcher.demand(calling("m:f", [], asked=asked), int(asked.nodes) if asked.nodes != "auto" else 1)
    with refused(expected):
        check(demand, known(launcher.partition))


@pytest.mark.parametrize(
    ("launcher", "asked"),
    [
        (Slurm(), WorkerRequest()),
        (Slurm(gpus_per_node="a100:4", mem="100G", cpus_per_task=8, time="1-0"), WorkerRequest(nodes=2)),
        (Slurm(gpus_per_node=4, mem=0, time="unlimited"), WorkerRequest(nodes=4)),
        (Slurm(), WorkerRequest(gpus=16, device="cpu")),
        (Slurm(partition="cpu"), WorkerRequest(gpus=16)),
        (Slurm(gpus_per_node=4, time="2-0", qos="long"), WorkerRequest(nodes=5)),  # which may lift limits
        (Slurm(partition="old,cpu", time="30-0"), WorkerRequest(nodes=4)),
    ],
)
def test_a_job_that_may_run_some_day_is_accepted(launcher: Slurm, asked: WorkerRequest) -> None:
    demand = launcher.demand(calling("m:f", [], asked=asked), int(asked.nodes) if asked.nodes != "auto" else 1)
    check(demand, known(launcher.partition))


def test_another_choice_of_nodes_is_not_checked() -> None:
    assert known_nodes(None, ["--comment=x", "--partition=old"]) == "launcher.sbatch_args chooses the partition"
    assert known_nodes(None, [], {"SLURM_CLUSTERS": "other"}) == "SLURM_CLUSTERS chooses the cluster"


def test_what_is_asked_of_a_node_is_said_with_its_keys() -> None:
    job = calling("m:f", [], asked=WorkerRequest(nodes=2))
    full = Slurm(gpus_per_node="a100:4", cpus_per_task=8, mem="100G").demand(job, 2)
    assert str(full) == "asks for 2 nodes, each with 4 GPUs, 32 cores (launcher.cpus_per_task), and 100G of memory"
    plain = str(Slurm().demand(calling("m:f", [], asked=WorkerRequest(gpus=4)), 1))
    assert "no GPUs (launcher.gpus_per_node=4 asks for them)" in plain
    assert all(key in plain for key in ("launcher.cpus_per_task", "launcher.mem"))


def test_requests_are_read_as_sbatch_reads_them() -> None:
    assert [gpus_by_type(text) for text in ("", "4", "a100", "a100:2,v100:1", "gpu", "gpu:2")] == [
        {}, {"": 4}, {"a100": 1}, {"a100": 2, "v100": 1}, {"": 1}, {"": 2}
    ]  # fmt: skip
    assert [megabytes(text) for text in (None, 0, 512, "2048K", "2G", "1T", "half")] == [
        None, None, 512, 2, 2048, 1024**2, None
    ]  # fmt: skip


def test_mail_is_asked_for_in_sbatchs_words() -> None:
    def lines(**options: object) -> list[str]:
        script = Slurm(**options).script(calling("m:f", []), 1, Path("/run"))  # type: ignore[arg-type]
        return [line.removeprefix("#SBATCH ") for line in script.splitlines() if "mail" in line]

    assert lines() == []
    assert lines(mail_user="me@example.org") == ["--mail-user=me@example.org", "--mail-type=END,FAIL"]
    assert lines(mail_type="END") == ["--mail-type=END"]
    assert lines(mail_type=("BEGIN", "time_limit_80")) == ["--mail-type=BEGIN,time_limit_80"]
    with refused("launcher.mail_type: TIME_LIMIT_80"):
        Slurm(mail_type="END,SOMETIMES")


def test_a_container_without_what_the_job_needs_is_warned_of() -> None:
    folder = Path("/home/me/outputs/mnist")
    assert container_warnings(None, None, None, folder) == []
    assert container_warnings("i.sqsh", "/home:/home", "python", folder) == []
    assert container_warnings("i.sqsh", f"/home:/h,{Path(sys.executable).parent}:/bin", None, folder) == []
    interpreter, mounts = container_warnings("i.sqsh", None, None, folder)
    assert (sys.executable in interpreter, "launcher.python=python" in interpreter) == (True, True)
    assert "'launcher.container_mounts=\"/home/me/outputs/mnist:/home/me/outputs/mnist\"'" in mounts
    [other] = container_warnings("i.sqsh", "/data:/data", "python", folder)
    assert other.startswith("launcher.container_mounts=/data:/data does not mount /home/me/outputs/mnist")


@pytest.mark.parametrize(
    ("asked", "workers", "said"),
    [
        ("a100:4", "auto", []),
        ("4", 4, []),
        ("", 2, []),
        (
            "a100:4",
            2,
            [
                "launcher.gpus_per_node=a100:4 asks for 4 GPUs of each node, and trainer.gpus=2 uses 2, so 2 would be "
                "idle: type trainer.gpus=4, or ask for 2"
            ],
        ),
        (
            "1",
            0,
            [
                "launcher.gpus_per_node=1 asks for 1 GPU of each node, and with trainer.device=cpu none is used: leave "
                "one of the two out"
            ],
        ),
    ],
)
def test_gpus_that_no_worker_uses_are_warned_of(asked: str, workers: Literal["auto"] | int, said: list[str]) -> None:
    assert list(idle_gpus("launcher.gpus_per_node", asked, workers)) == said
