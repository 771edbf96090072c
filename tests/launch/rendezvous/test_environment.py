"""Where a command stands: read from what torchrun, srun and mpirun leave in the environment.

Contradictions are named.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ddpexp.errors import RefusedError
from ddpexp.launch import WorkerRequest
from ddpexp.launch.launchers.slurm_context import where
from ddpexp.launch.rendezvous.environment import (
    LaunchEnvironment,
    externally_started,
    ignored_variables,
    of_mpi,
    of_slurm_task,
    of_torchrun,
    process_identity,
    torchrun_in_every_task,
)
from tests.conftest import ANY, SMALL, Ddpexp
from tests.refusals import is_about, refused

# As the programs leave them in the second of their processes, on the second of two hosts where there are two.
TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "46425",
    "TORCHELASTIC_RUN_ID": "c5bef3e5", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1", "SLURM_CLUSTER_NAME": "big",
}  # fmt: skip
STEP = "slurm:big:7.0"
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "165085185", "PMIX_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "165085184.0;tcp://192.0.2.2:53261",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OURS = process_identity(os.getppid())
MORE = {
    "torchrun": "type torchrun --nproc-per-node=8", "srun": "type srun --ntasks-per-node=8",
    "mpirun": "let mpirun start 8 processes on each node", "the environment": "export LOCAL_WORLD_SIZE=8",
}  # fmt: skip


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is wrong here meets the command or the ranks, not their fork server."""
    return warm_environ


def mpi(asked: WorkerRequest, environ: Mapping[str, str]) -> LaunchEnvironment:
    return of_mpi(asked, environ)[0]


@pytest.mark.parametrize(
    ("read", "environ", "place"),
    [
        (of_torchrun, TORCHRUN, LaunchEnvironment(3, 4, True, 1, 2, 2, "torchrun", OURS)),
        (
            of_torchrun,
            {**TORCHRUN, "GROUP_WORLD_SIZE": "", "LOCAL_WORLD_SIZE": "4"},
            LaunchEnvironment(3, 4, True, 1, 4, 1, "torchrun", OURS),
        ),
        (of_torchrun, BY_HAND, LaunchEnvironment(1, 2, True, None, None, None, "the environment")),
        (
            of_torchrun,
            {**BY_HAND, "LOCAL_RANK": "0"},
            LaunchEnvironment(1, 2, True, None, None, None, "the environment"),
        ),
        (
            of_torchrun,
            {**BY_HAND, "LOCAL_WORLD_SIZE": "2"},
            LaunchEnvironment(1, 2, True, None, 2, 1, "the environment"),
        ),
        (of_slurm_task, SRUN, LaunchEnvironment(2, 3, True, 0, 1, 2, "srun", STEP, False)),
        (
            of_slurm_task,
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
            LaunchEnvironment(2, 3, True, 0, 1, 2, "srun", STEP, False),
        ),
        (
            of_slurm_task,
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": ""},
            LaunchEnvironment(2, 3, True, None, None, 2, "srun", STEP, False),
        ),
        (
            of_slurm_task,
            {**SRUN, "SLURM_RESTART_COUNT": "1"},
            LaunchEnvironment(2, 3, True, 0, 1, 2, "srun", STEP, True),
        ),
        (mpi, OPEN_MPI, LaunchEnvironment(1, 2, True, 1, 2, 1, "mpirun", OURS)),
        (mpi, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, LaunchEnvironment(1, 4, True, 1, 2, None, "mpirun", OURS)),
        (mpi, MPICH, LaunchEnvironment(1, 2, True, 1, 2, 1, "mpirun", OURS)),
        (mpi, {"PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchEnvironment(1, 2, True, None, None, None, "mpirun", OURS)),
    ],
)
def test_the_place_is_what_the_starter_says(
    read: Callable[[WorkerRequest, Mapping[str, str]], LaunchEnvironment],
    environ: dict[str, str],
    place: LaunchEnvironment,
) -> None:
    assert read(ANY, environ) == place


@pytest.mark.parametrize(
    ("environ", "started"),
    [
        (TORCHRUN, ("torchrun", 4, "torchrun-env")),
        (OPEN_MPI, ("mpirun", 2, "mpi")),
        (MPICH, ("mpirun", 2, "mpi")),
        (SRUN, ("srun", 3, "slurm")),
        ({**SRUN, **TORCHRUN}, ("torchrun", 4, "torchrun-env")),
        ({**SRUN, **OPEN_MPI}, ("mpirun", 2, "mpi")),
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3"}, ("srun", 3, "slurm")),
        ({**SRUN, **MPICH}, ("mpirun", 2, "mpi")),  # MPICH starts its proxies with srun
        ({}, None),
        (BY_HAND, None),  # a shell in which the variables of another run are left
        ({**TORCHRUN, "WORLD_SIZE": "1"}, None),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}, None),  # an sbatch script, and salloc's shell
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # salloc's interactive step
        ({**TORCHRUN, "DDPEXP_CONTROL_FD": "5"}, None),  # started by a worker of ours
    ],
)
def test_what_has_started_several_commands_is_recognised(
    environ: dict[str, str], started: tuple[str, int, str] | None
) -> None:
    assert externally_started(environ, 100, lambda _: False) == started


# What srun leaves in the first of two tasks, and in all that the shell starts that is this task.
TASK = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_TASK_PID": "100"}
PMI2 = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "20", "PMI_JOBID": "7.0"}


@pytest.mark.parametrize(
    ("environ", "pid", "terminals", "started"),
    [
        (TASK, 100, (), "srun"),
        (TASK, 101, (), "srun"),  # in a script that is the task
        (TASK, 100, ("100",), "srun"),  # srun --pty python -m ddpexp
        (TASK, 101, ("100", "101"), None),  # typed in srun -n2 --pty bash
        (TASK, 101, ("100",), None),  # without a terminal of its own: nohup setsid
        (TASK, 101, ("101",), None),  # typed in a terminal that an editor has opened in the task
        ({**TASK, **PMI2}, 100, (), "srun"),
        ({**TASK, **PMI2}, 101, ("100", "101"), None),
        ({**TASK, "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, 101, ("100", "101"), None),
        ({**TASK, "SLURM_STEP_ID": "4294967290"}, 101, ("100", "101"), None),  # salloc's interactive step
        ({**TASK, "SLURM_STEP_ID": "4294967290"}, 101, (), None),
        ({**TASK, **OPEN_MPI}, 101, ("100", "101"), "mpirun"),  # mpirun typed in such a shell
        ({**TASK, **MPICH}, 102, ("100", "101", "102"), "mpirun"),
        ({**TASK, **TORCHRUN}, 102, ("100",), "torchrun"),
        ({**TASK, **TORCHRUN}, 102, (), "torchrun"),
        (OPEN_MPI, 101, ("100", "101"), "mpirun"),
        (MPICH, 101, ("101",), "mpirun"),
        (TORCHRUN, 101, ("101",), "torchrun"),
    ],
)  # fmt: skip
def test_what_is_typed_in_a_shell_of_a_step_was_started_once(
    environ: dict[str, str], pid: int, terminals: tuple[str, ...], started: str | None
) -> None:
    found = externally_started(environ, pid, lambda process: process in terminals)
    assert (found[0] if found else None) == started
    in_a_step = where(environ, pid, lambda process: process in terminals) == "step"
    assert started != "srun" or in_a_step
    assert not in_a_step or started is not None, "both say the same"


STANDALONE = {**TORCHRUN, "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "6c5d1b2e-8f3a-4a0e-9d6b-0c1d2e3f4a5b"}


@pytest.mark.parametrize(
    ("environ", "terminals", "tasks"),
    [
        ({**TASK, **STANDALONE}, (), 2),
        ({**TASK, **STANDALONE}, ("100",), None),  # typed in a shell
        (STANDALONE, (), None),
        ({**TASK, **STANDALONE, "SLURM_STEP_NUM_TASKS": "1"}, (), None),
        ({**TASK, **STANDALONE, "GROUP_WORLD_SIZE": "2"}, (), None),
        ({**TASK, **STANDALONE, "TORCHELASTIC_RUN_ID": "mine"}, (), None),  # elastic, and the first of its group
        ({**TASK, **TORCHRUN}, (), None),
    ],
)
def test_several_torchruns_that_know_nothing_of_each_other_are_noticed(
    environ: dict[str, str], terminals: tuple[str, ...], tasks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torchrun_in_every_task(environ, 102, lambda process: process in terminals) == tasks
    if tasks is not None:
        with refused("commands"):
            of_torchrun(ANY, environ)


@pytest.mark.parametrize(
    ("environ", "warns"),
    [
        (BY_HAND, True),
        ({**BY_HAND, "WORLD_SIZE": "1"}, False),
        ({**BY_HAND, "MASTER_ADDR": ""}, False),
        ({**BY_HAND, "DDPEXP_CONTROL_FD": "5"}, False),  # started by a worker of ours
        ({"WORLD_SIZE": "2"}, False),
        ({}, False),
    ],
)
def test_exported_variables_of_a_rank_that_are_ignored_draw_a_warning(environ: dict[str, str], warns: bool) -> None:
    assert ignored_variables(environ) == (
        "RANK=1 and WORLD_SIZE=2 are exported, and this launcher ignores them: this command trains alone. For one "
        "rank of 2 add launcher=torchrun-env."
        if warns
        else None
    )


def test_slurms_short_form_gives_every_node_its_tasks() -> None:
    environ = {**SRUN, "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1,2"}
    found = [of_slurm_task(ANY, {**environ, "SLURM_NODEID": str(node)}).local_world_size for node in range(5)]
    assert found == [2, 2, 2, 1, 2]


def test_the_ranks_of_one_mpirun_have_one_key_and_those_of_another_one_another() -> None:
    first, same = (of_mpi(ANY, {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank})[1] for rank in "01")
    assert first == same
    assert of_mpi(ANY, {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "165085190.0;tcp://192.0.2.2:53262"})[1] != first
    newer = {key: value for key, value in OPEN_MPI.items() if not key.startswith("OMPI_MCA")}  # Open MPI 5
    assert of_mpi(ANY, newer)[1] == "165085185"


NEEDS = "Every rank needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. torchrun sets them; by hand, export them."
BY_MPIRUN = (
    "Start the command with mpirun, which gives it to every process, in an environment that keeps its variables."
)


@pytest.mark.fault(27)
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_of_torchrun_is_named(name: str, value: str | None) -> None:
    environ = {key: text for key, text in {**TORCHRUN, name: value}.items() if text is not None}
    with pytest.raises(RefusedError) as caught:
        of_torchrun(ANY, environ)
    assert is_about(caught.value, f"{name}")


@pytest.mark.fault(27)
@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_a_missing_variable_of_srun_is_named(name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        of_slurm_task(ANY, {key: text for key, text in SRUN.items() if key != name})
    assert is_about(caught.value, f"{name}")


def test_the_tasks_of_the_job_stand_in_for_those_of_the_step() -> None:
    environ = {key: text for key, text in SRUN.items() if key != "SLURM_STEP_NUM_TASKS"}
    assert of_slurm_task(ANY, environ).size == 3
    with pytest.raises(RefusedError) as caught:
        of_slurm_task(ANY, {key: text for key, text in environ.items() if key != "SLURM_NTASKS"})
    assert is_about(caught.value, "SLURM_NTASKS")


@pytest.mark.fault(27)
@pytest.mark.parametrize(("environ", "name"), [(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), (MPICH, "PMI_SIZE")])
def test_a_missing_variable_of_mpirun_is_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        of_mpi(ANY, {key: text for key, text in environ.items() if key != name})
    assert is_about(caught.value, f"{name}")


@pytest.mark.parametrize(
    ("read", "environ", "names"),
    [
        (of_torchrun, TORCHRUN, "RANK WORLD_SIZE MASTER_PORT LOCAL_RANK LOCAL_WORLD_SIZE GROUP_WORLD_SIZE"),
        (of_slurm_task, SRUN, "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_NODEID SLURM_STEP_NUM_NODES"),
        (mpi, OPEN_MPI, " ".join(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
        (mpi, MPICH, "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
    ],
)
@pytest.mark.parametrize("value", ["two", "1.0", "0x1", "1 2"])
def test_a_malformed_variable_is_named_with_its_value(
    read: Callable[[WorkerRequest, Mapping[str, str]], LaunchEnvironment],
    environ: dict[str, str],
    names: str,
    value: str,
) -> None:
    for name in names.split():
        with pytest.raises(RefusedError) as caught:
            read(ANY, {**environ, name: value})
        assert is_about(caught.value, f"{name}={value}")


@pytest.mark.parametrize("value", ["2(x3", "two", "2(x)", "2,,x", "-1"])
def test_a_malformed_list_of_slurm_is_named(value: str) -> None:
    with pytest.raises(RefusedError) as caught:
        of_slurm_task(ANY, {**SRUN, "SLURM_STEP_TASKS_PER_NODE": value})
    assert is_about(caught.value, f"SLURM_STEP_TASKS_PER_NODE={value}")


Reader = Callable[[WorkerRequest, Mapping[str, str]], LaunchEnvironment]
CONTRADICTIONS: list[tuple[Reader, dict[str, str], dict[str, str], str]] = [
    (of_torchrun, TORCHRUN, {"RANK": "4"}, "RANK=4"),
    (of_torchrun, TORCHRUN, {"RANK": "-1"}, "RANK=-1"),
    (of_torchrun, TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    (of_torchrun, TORCHRUN, {"WORLD_SIZE": "-4"}, "WORLD_SIZE=-4"),
    (of_torchrun, TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT=0"),
    (of_torchrun, TORCHRUN, {"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
    (of_torchrun, TORCHRUN, {"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
    (of_torchrun, BY_HAND, {"LOCAL_WORLD_SIZE": "0"},
     "LOCAL_WORLD_SIZE=0"),
    (of_torchrun, TORCHRUN, {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5"),
    (of_torchrun, TORCHRUN, {"GROUP_WORLD_SIZE": "0"},
     "GROUP_WORLD_SIZE=0"),
    (of_slurm_task, SRUN, {"SLURM_PROCID": "3"}, "SLURM_PROCID=3"),
    (of_slurm_task, SRUN, {"SLURM_NODEID": "2"},
     "SLURM_NODEID=2"),
    (of_slurm_task, SRUN, {"SLURM_NODEID": "-1"},
     "SLURM_NODEID=-1"),
    (of_slurm_task, SRUN, {"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1"),
    (of_slurm_task, SRUN, {"SLURM_STEP_NUM_NODES": "0"},
     "SLURM_STEP_NUM_NODES=0"),
    (mpi, OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2"),
    (mpi, OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
     "OMPI_COMM_WORLD_LOCAL_SIZE=3"),
    (mpi, MPICH, {"PMI_SIZE": "0"}, "PMI_SIZE=0"),
    (mpi, MPICH, {"MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2"),
]  # fmt: skip


@pytest.mark.fault(27)
@pytest.mark.parametrize(("read", "environ", "changed", "sentence"), CONTRADICTIONS)
def test_variables_that_contradict_are_named_with_their_values(
    read: Callable[[WorkerRequest, Mapping[str, str]], LaunchEnvironment],
    environ: dict[str, str],
    changed: dict[str, str],
    sentence: str,
) -> None:
    with pytest.raises(RefusedError) as caught:
        read(ANY, {**environ, **changed})
    assert is_about(caught.value, sentence)


@pytest.mark.parametrize(
    ("read", "environ", "starter", "workers", "name"),
    [
        (of_torchrun, TORCHRUN, "torchrun", 2, "LOCAL_WORLD_SIZE"),
        (of_torchrun, {**BY_HAND, "LOCAL_WORLD_SIZE": "1"}, "the environment", 1, "LOCAL_WORLD_SIZE"),
        (of_slurm_task, SRUN, "srun", 1, "tasks per node"),
        (mpi, OPEN_MPI, "mpirun", 2, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (mpi, MPICH, "mpirun", 2, "MPI_LOCALNRANKS"),
    ],
)
def test_a_given_number_of_workers_must_be_the_starters(
    read: Callable[[WorkerRequest, Mapping[str, str]], LaunchEnvironment],
    environ: dict[str, str],
    starter: str,
    workers: int,
    name: str,
) -> None:
    read(WorkerRequest(gpus=workers), environ)
    with pytest.raises(RefusedError) as caught:
        read(WorkerRequest(gpus=8), environ)
    assert is_about(caught.value, f"trainer.gpus=8: {starter}")
    assert is_about(caught.value, f"trainer.gpus=8: {name}")


@pytest.mark.parametrize(
    ("read", "environ", "starter", "nodes"),
    [(of_torchrun, TORCHRUN, "torchrun", 2), (of_slurm_task, SRUN, "srun", 2), (mpi, OPEN_MPI, "mpirun", 1)],
)
def test_a_given_number_of_nodes_must_be_the_starters(
    read: Callable[[WorkerRequest, Mapping[str, str]], LaunchEnvironment],
    environ: dict[str, str],
    starter: str,
    nodes: int,
) -> None:
    read(WorkerRequest(nodes=nodes), environ)
    with pytest.raises(RefusedError) as caught:
        read(WorkerRequest(nodes=3), environ)
    assert is_about(caught.value, f"trainer.nodes=3: {starter}")


def test_a_process_is_distinguished_from_a_later_one_with_its_pid() -> None:
    own = process_identity(os.getpid())
    assert own is not None
    assert own.startswith(f"{socket.gethostname()}:{os.getpid()}:")
    assert own != OURS
    assert process_identity(2**22 + 1) is None  # more than Linux ever gives


STARTERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "MPI_", "SLURM_")


@pytest.fixture
def alone(ddpexp: Ddpexp) -> Ddpexp:
    """A command that nobody has started."""
    return Ddpexp(ddpexp.folder, {key: text for key, text in ddpexp.environ.items() if not key.startswith(STARTERS)})


@pytest.mark.variants(3)
@pytest.mark.fault(27)
@pytest.mark.parametrize(
    ("overrides", "environ", "sentence"),
    [
        ("launcher=torchrun-env", {}, "launcher=torchrun-env needs a worker that torchrun starts, but RANK is not set. Type "
         "`torchrun --nproc-per-node 2 -m ddpexp recipe=... launcher=torchrun-env`, or use launcher=spawn, which needs "
         "no "
         "torchrun."),
        ("launcher=torchrun-env", {**BY_HAND, "MASTER_ADDR": ""}, f"MASTER_ADDR is not set. {NEEDS}"),
        ("launcher=torchrun-env", {**BY_HAND, "RANK": "2"}, "RANK=2 is not in the range of WORLD_SIZE=2, 0 to 1."),
        ("launcher=torchrun-env", {**BY_HAND, "MASTER_PORT": "http"}, "MASTER_PORT=http is not a whole number."),
        ("launcher=torchrun-env trainer.gpus=2", {**BY_HAND, "LOCAL_WORLD_SIZE": "1"},
         "trainer.gpus=2, but the environment has 1 worker on this node (LOCAL_WORLD_SIZE=1): the environment "
         "decides, so export LOCAL_WORLD_SIZE=2, or leave trainer.gpus=auto for 1."),
        ("launcher=mpi", {}, "launcher=mpi needs a process that mpirun starts, but neither Open MPI's nor MPICH's variables are set. "
         "Type `mpirun -n 2 python -m ddpexp recipe=... launcher=mpi`, or use launcher=spawn, which needs no MPI."),
        ("launcher=mpi", {"PMI_RANK": "1"}, f"PMI_SIZE is not set. {BY_MPIRUN}"),
        ("launcher=slurm", {**SRUN, "SLURM_LOCALID": "x"}, "SLURM_LOCALID=x is not a whole number."),
    ],
)  # fmt: skip
def test_the_command_refuses_before_any_socket_opens(
    alone: Ddpexp, tmp_path: Path, overrides: str, environ: dict[str, str], sentence: str
) -> None:
    done = alone(*SMALL, *overrides.split(), environ=environ)
    assert (done.code, done.out, done.err) == (2, "", f"ddpexp: {sentence}\n")
    # A meeting would have waited for the others, trainer.timeout.init_seconds=300, and said so.
    assert sorted(tmp_path.iterdir()) == []
