"""What a starter leaves to its commands, while it lives and when it has been killed.

Real sockets and real processes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpexp.launch.rendezvous.starter import was_lost
from tests.conftest import ROOT, python_path
from tests.launch.starters import free_port


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def of_torchrun(port: object, host: str = "127.0.0.1") -> dict[str, str]:
    return {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def test_torchrun_is_lost_when_nobody_has_the_port_of_its_store(listening: int) -> None:
    assert not was_lost("torchrun", of_torchrun(listening))
    assert was_lost("torchrun", of_torchrun(free_port()))


def test_a_store_that_rank_zero_opens_later_says_nothing_of_torchrun() -> None:
    assert not was_lost("torchrun", of_torchrun(free_port()) | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not was_lost("torchrun", {})


@pytest.mark.parametrize(
    ("host", "port"), [("no-such-host.invalid", "29500"), ("", "29500"), ("127.0.0.1", "x"), ("127.0.0.1", "")]
)
def test_an_address_that_cannot_be_queried_says_nothing(host: str, port: str) -> None:
    assert not was_lost("torchrun", of_torchrun(port, host) if host else {**of_torchrun(port), "MASTER_ADDR": "\0"})


def test_open_mpi_is_lost_when_nobody_has_any_of_its_ports(listening: int) -> None:
    dead = {f"PMIX_SERVER_URI{number}": f"2147418112.0;tcp4://127.0.0.1:{free_port()}" for number in ("2", "21")}
    assert was_lost("mpirun", dead)
    assert not was_lost("mpirun", dead | {"PMIX_SERVER_URI3": f"2147418112.0;tcp4://127.0.0.1:{listening}"})
    assert not was_lost("mpirun", {"PMIX_SERVER_URI": "usock:/run/pmix"})


def test_mpich_is_lost_when_its_proxy_has_closed_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        assert not was_lost("mpirun", {"PMI_FD": str(ours.fileno())})
        theirs.close()
        assert was_lost("mpirun", {"PMI_FD": str(ours.fileno())})
    reader, writer = os.pipe()
    os.close(writer)
    assert not was_lost("mpirun", {"PMI_FD": str(reader)})  # a file of somebody else under this number
    os.close(reader)
    assert not was_lost("mpirun", {"PMI_FD": str(reader)})


UNDER_PROXY = """\
import os, socket, subprocess, sys
ours, theirs = socket.socketpair()
theirs.close()
code = "import sys; from ddpexp.launch.rendezvous.starter import was_lost; print(was_lost('mpirun', {'PMI_FD': sys.argv[1]}))"
subprocess.run([sys.executable, "-c", code, str(ours.fileno())], pass_fds=[ours.fileno()], check=True)
"""


def test_mpich_lives_while_its_proxy_is_above_whatever_has_become_of_the_connection() -> None:
    command = [sys.executable, "-c", UNDER_PROXY, "--control-port", "node0:40001"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout == "False\n"


TASK = """\
import os, subprocess, sys
code = "import os; from ddpexp.launch.rendezvous.starter import was_lost; print(was_lost('srun', {'SLURM_TASK_PID': str(os.%s())}))"
for whose in ("getpid", "getppid"):
    subprocess.run([sys.argv[1], "-c", code % whose], check=True)
"""


@pytest.mark.parametrize(("name", "said"), [("slurmstepd", ["False", "True"]), ("systemd", ["True", "True"])])
def test_srun_is_lost_when_its_task_is_the_child_of_another_program(tmp_path: Path, name: str, said: list[str]) -> None:
    keeper = tmp_path / name  # the kernel names a process after the file
    keeper.symlink_to(sys.executable)
    environ = {**os.environ, "PYTHONPATH": python_path(ROOT, *filter(None, sys.path))}
    done = subprocess.run(
        [keeper, "-c", TASK, sys.executable], env=environ, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr) == (said, "")


@pytest.mark.parametrize("task", ["", "1x", "4194399"])
def test_a_task_that_cannot_be_seen_says_nothing_of_srun(task: str) -> None:
    assert not was_lost("srun", {"SLURM_TASK_PID": task})


def test_variables_of_a_shell_are_of_no_starter() -> None:
    assert not was_lost("the environment", of_torchrun(free_port()))
