"""Read the launch environment (torchrun's, Slurm's, MPI's variables): a command's index among those of its job."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddpexp.errors import RefusedError
from ddpexp.launch import WorkerRequest
from ddpexp.launch.rendezvous.starter import control_port
from ddpexp.launch.workers.control import CONTROL_FD
from ddpexp.system import start
from ddpexp.system.process import ancestors, stat
from ddpexp.system.text import counted

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NO_STEP = 0xFFFFFFF0  # from here on numbers of steps are the batch script's, the interactive step's and the like


@dataclass(frozen=True)
class LaunchEnvironment:
    """One command of a job: it starts all workers of a node, or the one worker whose rank the environment gives it."""

    index: int = 0  # of this command; command 0 leads
    size: int = 1  # the number of commands
    externally_launched: bool = False  # the command is one rank, `index` of `size`, and starts that one worker
    local_rank: int | None = None  # where externally launched; None: known after the rendezvous
    local_world_size: int | None = None
    nodes: int | None = None  # None: known after the rendezvous
    starter: str = "this command"  # what set these numbers, for errors
    owner: str | None = None  # identifies what starts this command again after a failure
    restarted: bool | None = None  # whether it has done so; None: not known

    @property
    def ends_with_parent(self) -> bool:
        """Return whether the parent is a launcher whose ranks must end with it, even if it is killed."""
        return self.starter in ("torchrun", "srun", "mpirun")

    @property
    def shares_terminal(self) -> bool:
        """Return whether the starter prints the output of all commands, on all hosts, in one place."""
        return self.starter in ("srun", "mpirun")


_TORCHRUN = "torchrun --nproc-per-node 2 -m ddpexp recipe=... launcher=torchrun-env"
# Advice on a missing variable, by the program that should have set it.
_BY_TORCHRUN = (
    "Every rank needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. torchrun sets them; by hand, export them."
)
_BY_SRUN = "Start the command with srun, which gives it to every task, in an environment that keeps Slurm's variables."
_BY_MPIRUN = (
    "Start the command with mpirun, which gives it to every process, in an environment that keeps its variables."
)


_MORE_WORKERS = {  # how its user asks for so many workers on a node
    "torchrun": "Type torchrun --nproc-per-node={}",
    "srun": "Type srun --ntasks-per-node={}",
    "mpirun": "Let mpirun start {} processes on each node",
    "the environment": "Export LOCAL_WORLD_SIZE={}",
}


def of_torchrun(request: WorkerRequest, environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Read torchrun's variables, or the same ones exported by hand.

    Raises:
        RefusedError: one is missing, not a number, or contradicts another one or an override.
    """
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        raise RefusedError(
            "needs a worker that torchrun starts, but RANK is not set",
            key="launcher",
            value="torchrun-env",
            suggestion=f"Type `{_TORCHRUN}`, or use launcher=spawn, which needs no torchrun.",
        )
    rank, size = _number(environ, "RANK", _BY_TORCHRUN), _number(environ, "WORLD_SIZE", _BY_TORCHRUN)
    if not environ.get("MASTER_ADDR"):
        raise RefusedError("is not set", key="MASTER_ADDR", suggestion=_BY_TORCHRUN)
    port = _number(environ, "MASTER_PORT", _BY_TORCHRUN)
    if not 0 < port < 65536:
        raise RefusedError("is not a valid port", key="MASTER_PORT", value=port, suggestion="Use one from 1 to 65535.")
    _check_rank("RANK", rank, "WORLD_SIZE", size)
    if (tasks := torchrun_in_every_task(environ)) is not None:
        raise RefusedError(
            f"srun has started {tasks} torchrun commands, and torchrun --standalone trains in each of them alone",
            suggestion="Start one on each node with srun --ntasks-per-node=1 and torchrun --nnodes, or leave "
            "torchrun out and use launcher=slurm.",
        )
    local_rank, local_size = _local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", size, "WORLD_SIZE")
    nodes = _nodes(environ, "GROUP_WORLD_SIZE") or (1 if local_size == size else None)
    elastic = "TORCHELASTIC_RUN_ID" in environ
    starter = "torchrun" if elastic else "the environment"
    _check_consistent(request, starter, nodes, local_size, "LOCAL_WORLD_SIZE")
    owner = process_identity(start.parent()) if elastic else None
    return LaunchEnvironment(
        index=rank,
        size=size,
        externally_launched=True,
        local_rank=local_rank,
        local_world_size=local_size,
        nodes=nodes,
        starter=starter,
        owner=owner,
    )


def of_slurm_task(request: WorkerRequest, environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Read the variables of a task that srun started. Raises RefusedError like `of_torchrun`."""
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = _number(environ, "SLURM_PROCID", _BY_SRUN), _number(environ, size_name, _BY_SRUN)
    _check_rank("SLURM_PROCID", rank, size_name, size)
    nodes = _nodes(environ, "SLURM_STEP_NUM_NODES")
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", _BY_SRUN)
    if tasks:
        _check_rank("SLURM_NODEID", node, "the number of nodes in SLURM_STEP_TASKS_PER_NODE", len(tasks))
    local_size = tasks[node] if tasks else None
    local_rank = _number(environ, "SLURM_LOCALID", _BY_SRUN)
    if local_size is not None:
        _check_rank("SLURM_LOCALID", local_rank, "the number of tasks on this node", local_size)
    _check_consistent(request, "srun", nodes, local_size, "tasks per node")
    restarts = _number(environ, "SLURM_RESTART_COUNT", _BY_SRUN) if environ.get("SLURM_RESTART_COUNT") else 0
    names = (
        environ.get("SLURM_CLUSTER_NAME") or os.uname().nodename,
        environ.get("SLURM_JOB_ID"),
        environ.get("SLURM_STEP_ID"),
    )
    owner = f"slurm:{names[0]}:{names[1]}.{names[2]}" if all(names) else None
    return LaunchEnvironment(
        index=rank,
        size=size,
        externally_launched=True,
        local_rank=local_rank if local_size else None,
        local_world_size=local_size,
        nodes=nodes,
        starter="srun",
        owner=owner,
        restarted=restarts > 0,
    )


def _proxy_of_mpich() -> str | None:
    """Return the address of the mpirun whose proxy is above this process; the parent may be a script between."""
    return next(filter(None, map(control_port, ancestors(os.getpid()))), None)


def of_mpi(
    request: WorkerRequest,
    environ: Mapping[str, str] = os.environ,
    proxy_of_mpich: Callable[[], str | None] = _proxy_of_mpich,
) -> tuple[LaunchEnvironment, str]:
    """Read the variables of a process that mpirun (Open MPI, MPICH or a derivative) started, and a key for that mpirun.

    Where there are those of both, one mpirun was started in a process of the other, or in a shell that has kept them.

    Raises:
        RefusedError: no mpirun started this, or a variable is missing, not a number, or contradicts another one or an
        override.
    """
    proxy = proxy_of_mpich() if "PMI_RANK" in environ else None
    if "OMPI_COMM_WORLD_RANK" in environ and proxy is None:
        names = (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        )
        key = environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMIX_NAMESPACE") or str(start.parent())
    elif "PMI_RANK" in environ:
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        key = proxy or str(start.parent())
    else:
        raise RefusedError(
            "needs a process that mpirun starts, but neither Open MPI's nor MPICH's variables are set",
            key="launcher",
            value="mpi",
            suggestion="Type `mpirun -n 2 python -m ddpexp recipe=... launcher=mpi`, or use launcher=spawn, "
            "which needs no MPI.",
        )
    rank, size = _number(environ, names[0], _BY_MPIRUN), _number(environ, names[1], _BY_MPIRUN)
    _check_rank(names[0], rank, names[1], size)
    local_rank, local_size = _local(environ, names[2], names[3], size, names[1])
    nodes = 1 if local_size == size else None
    _check_consistent(request, "mpirun", nodes, local_size, names[3])
    environment = LaunchEnvironment(
        index=rank,
        size=size,
        externally_launched=True,
        local_rank=local_rank,
        local_world_size=local_size,
        nodes=nodes,
        starter="mpirun",
        owner=process_identity(start.parent()),
    )
    return environment, key


def is_started_by_srun(
    environ: Mapping[str, str] = os.environ, pid: int | None = None, has_terminal: Callable[[str], bool] | None = None
) -> bool:
    """Return whether this process is a task of a step of Slurm, or belongs to one, such as to its script.

    A batch script has SLURM_PROCID like a task of srun, but no step. A shell that `srun --pty` opened is itself a task,
    but a command that is typed in it is not, nor is one in a terminal that an editor has opened in a task: only then
    the task is another process and there is a terminal. SLURM_PTY_PORT is no evidence, since steps that are started in
    that shell inherit it.
    """
    step = environ.get("SLURM_STEP_ID")
    if step is None or not step.isdigit() or int(step) >= _NO_STEP:
        return False
    me, task = str(os.getpid() if pid is None else pid), environ.get("SLURM_TASK_PID", "")
    return task == me or not any(map(has_terminal or _has_terminal, (me, task)))


def _has_terminal(pid: str) -> bool:
    """Return whether a process has a controlling terminal. Source: proc(5), tty_nr."""
    fields = stat(int(pid)) if pid.isdecimal() else None
    return fields is not None and fields[4] != "0"  # None: it has ended, or is in another container


def externally_started(
    environ: Mapping[str, str] = os.environ, pid: int | None = None, has_terminal: Callable[[str], bool] | None = None
) -> tuple[str, int, str] | None:
    """Return which program has started this command several times, how often, and the launcher for that.

    None where nothing did: what a batch script or an interactive shell of Slurm inherits is no sign of it.
    """
    if CONTROL_FD in environ:  # a worker of ours has started this command, and its environment is inherited
        return None
    in_a_step = "SLURM_STEP_ID" in environ
    is_task = is_started_by_srun(environ, pid, has_terminal)
    started = (
        ("torchrun", "torchrun-env", "WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in environ else ""),
        ("mpirun", "mpi", "OMPI_COMM_WORLD_SIZE"),
        ("mpirun", "mpi", "PMI_SIZE" if "MPI_LOCALNRANKS" in environ else ""),  # MPICH, also over the nodes of a step
        ("srun", "slurm", "SLURM_STEP_NUM_TASKS" if is_task else ""),
        ("mpirun", "mpi", "" if in_a_step else "PMI_SIZE"),  # in a step `srun --mpi=pmi2` sets it
    )
    for starter, launcher, name in started:
        count = environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            return starter, int(count), launcher
    return None


def torchrun_in_every_task(
    environ: Mapping[str, str] = os.environ, pid: int | None = None, has_terminal: Callable[[str], bool] | None = None
) -> int | None:
    """Return the number of tasks of a step, if srun has started an independent torchrun in each of several tasks.

    `torchrun --standalone` has a random name for its rendezvous, and one group.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    alone = environ.get("GROUP_WORLD_SIZE") == "1" and _UUID.fullmatch(environ.get("TORCHELASTIC_RUN_ID", ""))
    if not alone or not tasks.isdecimal() or int(tasks) < 2 or not is_started_by_srun(environ, pid, has_terminal):
        return None
    return int(tasks)


def ignored_variables(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning for a command that runs alone where the variables of one rank of several are exported.

    They may be left from another run, so this is no reason to refuse: a job scheduler that exports them for torchrun's
    rendezvous starts the command once for each rank.
    """
    size = environ.get("WORLD_SIZE", "")
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if CONTROL_FD in environ or not all(map(environ.get, names)) or not size.isdecimal() or int(size) < 2:
        return None
    return (
        f"RANK={environ['RANK']} and WORLD_SIZE={size} are exported, and this launcher ignores them: this command "
        f"trains alone. For one rank of {size} add launcher=torchrun-env."
    )


def process_identity(pid: int) -> str | None:
    """Return a unique identity of a process: host, process id and start time; None when it is gone."""
    fields = stat(pid)
    return f"{os.uname().nodename}:{pid}:{fields[19]}" if fields else None


def _check_consistent(
    request: WorkerRequest, starter: str, nodes: int | None, local_size: int | None, name: str
) -> None:
    if request.gpus != "auto" and local_size is not None and request.gpus != local_size:
        raise RefusedError(
            f"contradicts {starter}, which decides and starts {counted(local_size, 'worker')} on "
            "this "
            f"node ({name}={local_size})",
            key="trainer.gpus",
            value=request.gpus,
            suggestion=f"{_MORE_WORKERS[starter].format(request.gpus)}, or leave trainer.gpus=auto for {local_size}.",
        )
    if request.nodes != "auto" and nodes is not None and request.nodes != nodes:
        raise RefusedError(
            f"contradicts {starter}, which runs on {nodes}",
            key="trainer.nodes",
            value=request.nodes,
            suggestion="Leave trainer.nodes=auto.",
        )


def _check_rank(name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise RefusedError("leaves no worker: it is the number of workers, 1 or more", key=size_name, value=size)
    if not 0 <= rank < size:
        raise RefusedError(f"is not in the range of {size_name}={size}, 0 to {size - 1}", key=name, value=rank)


def _number(environ: Mapping[str, str], name: str, advice: str) -> int:
    text = environ.get(name)
    if not text:
        raise RefusedError("is not set", key=name, suggestion=advice)
    try:
        return int(text)
    except ValueError:
        raise RefusedError("is not a whole number", key=name, value=text) from None


def _local(
    environ: Mapping[str, str], rank_name: str, size_name: str, world_size: int, world_size_name: str
) -> tuple[int | None, int | None]:
    """Read the local rank and the local world size, where both are set."""
    rank = _number(environ, rank_name, "") if environ.get(rank_name) else None
    size = _number(environ, size_name, "") if environ.get(size_name) else None
    if size is None:
        return None, None
    _check_rank(rank_name, rank or 0, size_name, size)
    if size > world_size:
        raise RefusedError(
            f"is more than {world_size_name}={world_size}: the variables contradict each other",
            key=size_name,
            value=size,
        )
    return rank, size


def _nodes(environ: Mapping[str, str], name: str) -> int | None:
    nodes = _number(environ, name, "") if environ.get(name) else None
    if nodes is not None and nodes < 1:
        raise RefusedError("leaves no machine: it is the number of machines, 1 or more", key=name, value=nodes)
    return nodes


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's short form: `2(x3),1` means 2, 2, 2, 1."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            reason = "is not a list of numbers such as 2(x3),1"
            raise RefusedError(reason, key="SLURM_STEP_TASKS_PER_NODE", value=text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
