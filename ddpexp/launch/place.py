"""Where a command stands among those that together run one job, read from what started it; opens nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpexp.errors import RefusedError
from ddpexp.launch import Asked


@dataclass(frozen=True)
class Place:
    """One command of a job: it starts all workers of a node, or one worker whose rank it was told."""

    index: int = 0  # of this command; number 0 leads
    size: int = 1  # how many commands there are
    told: bool = False  # the command is one rank, `index` of `size`, and starts that one worker
    local_rank: int | None = None  # of the told ones; None: learnt when all have met
    local_world_size: int | None = None
    nodes: int | None = None  # None: not known before all have met
    starter: str = "this command"  # who says so, for errors
    owner: str | None = None  # the process that starts this command again after a failure


_TORCHRUN = "torchrun --nproc-per-node 2 -m ddpexp recipe=... launcher=torchrun-env"


def of_torchrun(asked: Asked, environ: Mapping[str, str] = os.environ) -> Place:
    """Read torchrun's variables, or the same ones exported by hand.

    Raises:
        RefusedError: one is missing, no number, or contradicts another or a typed key.
    """
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        raise RefusedError(
            f"launcher=torchrun-env is a worker that torchrun starts, and no RANK is set: type `{_TORCHRUN}`, "
            f"or use launcher=spawn, which needs no torchrun."
        )
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise RefusedError(f"{name} is not set: every rank needs it to find rank zero. torchrun sets it; by hand, export it.")
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise RefusedError(f"MASTER_PORT={port} is no port: use one from 1 to 65535.")
    _refuse_rank("RANK", rank, "WORLD_SIZE", size)
    local_rank, local_size = _optional(environ, "LOCAL_RANK"), _optional(environ, "LOCAL_WORLD_SIZE")
    if local_rank is not None and local_size is not None:
        _refuse_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    if local_size is not None and local_size > size:
        raise RefusedError(f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={size}: the exported variables contradict.")
    nodes = _optional(environ, "GROUP_WORLD_SIZE") or (1 if local_size == size else None)
    elastic = "TORCHELASTIC_RUN_ID" in environ
    starter = "torchrun" if elastic else "the environment"
    _refuse_contradiction(asked, starter, nodes, local_size, "LOCAL_WORLD_SIZE")
    owner = process_identity(os.getppid()) if elastic else None
    return Place(rank, size, True, local_rank if local_size is not None else None, local_size, nodes, starter, owner)


def of_slurm_task(asked: Asked, environ: Mapping[str, str] = os.environ) -> Place:
    """Read the place of a task that srun started. Raises RefusedError like `of_torchrun`."""
    rank = _number(environ, "SLURM_PROCID")
    size = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    nodes = _optional(environ, "SLURM_STEP_NUM_NODES")
    local_rank = _number(environ, "SLURM_LOCALID")
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID")
    local_size = tasks[node] if node < len(tasks) else None
    _refuse_contradiction(asked, "srun", nodes, local_size, "tasks per node")
    return Place(rank, size, True, local_rank if local_size else None, local_size, nodes, "srun")


def of_mpi(asked: Asked, environ: Mapping[str, str] = os.environ) -> tuple[Place, str]:
    """Read the place of a process of mpirun (Open MPI, MPICH and what is made from it), and a name for that mpirun.

    Raises:
        RefusedError: no mpirun started this, or a typed key contradicts it.
    """
    if "OMPI_COMM_WORLD_RANK" in environ:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        key = environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMIX_NAMESPACE") or str(os.getppid())
    elif "PMI_RANK" in environ:
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        key = _control_port(os.getppid()) or str(os.getppid())
    else:
        raise RefusedError(
            "launcher=mpi is a process that mpirun starts, and neither Open MPI's nor MPICH's variables are set: type "
            "`mpirun -n 2 python -m ddpexp recipe=... launcher=mpi`, or use launcher=spawn, which needs no MPI."
        )
    rank, size = _number(environ, names[0]), _number(environ, names[1])
    local_rank, local_size = _optional(environ, names[2]), _optional(environ, names[3])
    nodes = 1 if local_size == size else None
    _refuse_contradiction(asked, "mpirun", nodes, local_size, names[3])
    known = local_size is not None
    place = Place(rank, size, True, local_rank if known else None, local_size, nodes, "mpirun", process_identity(os.getppid()))
    return place, key


def process_identity(pid: int) -> str | None:
    """Name a process so that no later one is mistaken for it: host, process id and start time; None when it is gone."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None
    return f"{os.uname().nodename}:{pid}:{started}"


def _refuse_contradiction(asked: Asked, starter: str, nodes: int | None, local_size: int | None, name: str) -> None:
    if asked.gpus != "auto" and local_size is not None and asked.gpus != local_size:
        raise RefusedError(
            f"trainer.gpus={asked.gpus}, but {starter} has {local_size} workers on this node ({name}={local_size}): "
            f"leave trainer.gpus=auto, for {starter} decides."
        )
    if isinstance(asked.nodes, str) and asked.nodes != "auto":
        raise RefusedError(f"trainer.nodes={asked.nodes} is a range, which only launcher=elastic understands.")
    if asked.nodes != "auto" and nodes is not None and asked.nodes != nodes:
        raise RefusedError(f"trainer.nodes={asked.nodes}, but {starter} runs on {nodes}: leave trainer.nodes=auto.")


def _refuse_rank(name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise RefusedError(f"{size_name}={size} leaves no worker: it is the number of workers, 1 or more.")
    if not 0 <= rank < size:
        raise RefusedError(f"{name}={rank}, but {size_name}={size}: ranks go from 0 to {size - 1}.")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise RefusedError(f"{name} is not set: every rank needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (or their like).")
    try:
        return int(text)
    except ValueError:
        raise RefusedError(f"{name}={text} is not a whole number.") from None


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def _tasks_per_node(text: str) -> list[int]:
    """Read Slurm's short form: `2(x3),1` means 2, 2, 2, 1."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        count, _, times = part.partition("(x")
        counts += [int(count)] * (int(times.rstrip(")")) if times else 1)
    return counts


def _control_port(pid: int) -> str | None:
    """Read from MPICH's proxy, the parent of every rank, the address of its mpirun, which all proxies of a job share."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return words[words.index("--control-port") + 1]
    except (OSError, ValueError, IndexError):
        return None
