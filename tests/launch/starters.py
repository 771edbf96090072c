"""Every way to start the same job, as a user would type it, for tests that compare them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE, Done, finish
from tests.points import Recipe
from tests.warm.popen import start_command

Command = tuple[list[str], dict[str, str]]  # words, and variables beside the usual ones


@dataclass(frozen=True)
class Starter:
    """One way: the commands that a job of a size takes, started as `python -m ddpexp OVERRIDES run.dir=...`."""

    name: str
    commands: Callable[[list[str], int], list[Command]]
    sizes: tuple[int, ...] = (2, 3, 4)
    needs: str = ""  # a program
    cluster: bool = False
    usual_size: int | None = None  # in the ordinary run; None: the largest
    own_codes: bool = True  # False: what starts the ranks has its own exit codes

    def __str__(self) -> str:
        return self.name

    def __call__(
        self, recipe: Recipe, size: int, *overrides: str, timeout: float = PATIENCE, run: Path | None = None
    ) -> Done:
        """Run the job and return how its first command ended, with the output of all."""
        started, run = self.start(recipe, size, *overrides, run=run)
        return self.finish(started, run, timeout)

    def start(
        self, recipe: Recipe, size: int, *overrides: str, run: Path | None = None
    ) -> tuple[list[subprocess.Popen[str]], Path]:
        """Start the job, in a run directory of its own or in that of a run before."""
        arguments, run = recipe.words("trainer.threads=1", *overrides, run=run)
        environ = {**recipe.ddpexp.environ, "OMP_NUM_THREADS": "1"}
        if "SLURM_CONF" in os.environ:
            environ["SLURM_CONF"] = os.environ["SLURM_CONF"]
        started = [
            start_command(command[3:], recipe.folder, {**environ, **variables})
            if command[:3] == DDPEXP
            else subprocess.Popen(
                command, cwd=recipe.folder, env={**environ, **variables}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            for command, variables in self.commands(arguments, size)
        ]  # fmt: skip
        return started, run

    def finish(self, started: Sequence[subprocess.Popen[str]], run: Path, timeout: float = PATIENCE) -> Done:
        """Wait for all commands of the job."""
        done = [finish(process, run, timeout) for process in started]
        return Done(done[0].code, "".join(one.out for one in done), "".join(one.err for one in done), run)


DDPEXP = [sys.executable, "-m", "ddpexp"]


def host(number: int) -> list[str]:
    """Return the words that run a command in a host of the cluster."""
    folder = Path(os.environ["SLURM_CONF"]).parent
    return ["nsenter", f"--net=/run/netns/ddp-node{number}", f"--uts={folder}/uts/node{number}", "--"]


def free_port() -> int:
    """Return a port that was free a moment ago: what a user does who has to name one."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _plain(*overrides: str) -> Callable[[list[str], int], list[Command]]:
    return lambda arguments, size: [([*DDPEXP, *arguments, f"trainer.gpus={size}", *overrides], {})]


def _behind(*before: str) -> Callable[[list[str], int], list[Command]]:
    """Put `python -m ddpexp WORDS` behind words in which SIZE stands for the number of ranks."""
    *overrides, launcher = before
    return lambda arguments, size: [
        ([word.replace("SIZE", str(size)) for word in overrides] + [*DDPEXP, *arguments, f"launcher={launcher}"], {})
    ]


def _module(*before: str) -> Callable[[list[str], int], list[Command]]:
    """Put `-m ddpexp WORDS` behind words of a program that starts Python itself."""
    return lambda arguments, size: [
        (
            [
                sys.executable,
                *(word.replace("SIZE", str(size)) for word in before),
                "-m",
                "ddpexp",
                *arguments,
                "launcher=torchrun-env",
            ],
            {},
        )
    ]


def _shells(arguments: list[str], size: int) -> list[Command]:
    fixed = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [([*DDPEXP, *arguments, "launcher=torchrun-env"], {**fixed, "RANK": str(rank)}) for rank in range(size)]


def _machines(arguments: list[str], size: int) -> list[Command]:
    overrides = [
        *arguments,
        "trainer.nodes=2",
        f"trainer.gpus={size // 2}",
        "launcher.master_addr=node0",
        "launcher.master_port=29710",
    ]
    return [([*host(node), *DDPEXP, *overrides, f"launcher.node_rank={node}"], {}) for node in (0, 1)]


def _two_torchruns(arguments: list[str], size: int) -> list[Command]:
    overrides = [
        "--nnodes=2",
        f"--nproc-per-node={size // 2}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node0:29720",
        f"--rdzv-id=t{size}",
    ]
    program = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *overrides,
        "-m",
        "ddpexp",
        *arguments,
        "launcher=torchrun-env",
    ]
    return [([*host(node), *program], {}) for node in (0, 1)]


def _submitted(arguments: list[str], size: int) -> list[Command]:
    nodes = 1 if size % 2 else 2
    overrides = [f"trainer.nodes={nodes}", f"trainer.gpus={size // nodes}", "launcher=slurm", "launcher.wait=true"]
    return [([*DDPEXP, *arguments, *overrides], {})]


def _allocated(arguments: list[str], size: int) -> list[Command]:
    nodes = 1 if size % 2 else 2
    return [(["salloc", f"-N{nodes}", *DDPEXP, *arguments, f"trainer.gpus={size // nodes}", "launcher=slurm"], {})]


SPAWN = Starter("spawn", _plain())
STARTERS: Sequence[Starter] = (
    Starter("spawn, new interpreters", _plain("launcher.start_method=spawn"), sizes=(2,)),
    Starter("spawn on two machines", _machines, sizes=(2, 4), cluster=True),
    Starter(
        "torchrun",
        _module("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=SIZE"),
        usual_size=2,  # four ranks of torchrun's are on two machines
        own_codes=False,
    ),
    Starter("torchrun on two machines", _two_torchruns, sizes=(4,), cluster=True, own_codes=False),
    Starter(
        "torch.distributed.launch",
        _module("-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node=SIZE", f"--master-port={29730}"),
        sizes=(2,),
        own_codes=False,
    ),
    Starter("variables in shells", _shells, sizes=(2, 3)),
    Starter("elastic", _plain("launcher=elastic", "launcher.max_restarts=0"), usual_size=2),
    Starter("sbatch", _submitted, cluster=True),
    Starter("salloc", _allocated, sizes=(4,), cluster=True),
    Starter("srun", _behind("srun", "-N2", "-nSIZE", "slurm"), cluster=True, own_codes=True),
    Starter(
        "Open MPI",
        _behind("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "SIZE", "mpi"),
        needs="mpirun.openmpi",
        usual_size=2,
    ),
    Starter("MPICH", _behind("mpirun.mpich", "-n", "SIZE", "mpi"), sizes=(2, 3), needs="mpirun.mpich"),
)


OFTEN = ("spawn on two machines", "torchrun", "elastic", "sbatch", "srun", "Open MPI")
"""Of the ways those that differ most; the others' longer tests run with -m slow."""


def params(sizes: bool = True, often: Sequence[str] = tuple(map(str, STARTERS))) -> list[Any]:
    """Return each way, with each of its sizes or alone, for `pytest.mark.parametrize`.

    In the ordinary run are those named `often`, each with one size: the largest, or `usual_size`.
    """
    found = []
    for starter in STARTERS:
        marks = [
            *([pytest.mark.slurm] if starter.cluster else []),
            *([] if starter.name in often else [pytest.mark.slow]),
        ]
        if not sizes:
            found.append(pytest.param(starter, marks=marks, id=str(starter)))
            continue
        for size in starter.sizes:
            more = [] if size == (starter.usual_size or starter.sizes[-1]) else [pytest.mark.slow]
            found.append(pytest.param(starter, size, marks=[*marks, *more], id=f"{starter}, {size}"))
    return found


def skip_without(starter: Starter, environ: Mapping[str, str] = os.environ) -> None:
    """Skip where the program or the cluster is not there, with the reason."""
    if starter.cluster and "SLURM_CONF" not in environ:
        pytest.skip("no Slurm cluster: SLURM_CONF is not set")
    if starter.needs and shutil.which(starter.needs) is None:
        pytest.skip(f"{starter.needs} is not installed")
