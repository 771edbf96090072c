"""Find the command line (torchrun ..., srun ..., mpirun ...) that started the ranks, to print how to resume a run."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpexp.system.process import ancestors

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SRUN_OPTIONS = {
    "SLURM_STEP_NUM_NODES": "--nodes",
    "SLURM_STEP_NUM_TASKS": "--ntasks",
    "SLURM_CPUS_PER_TASK": "--cpus-per-task",
    "SLURM_GPUS_PER_TASK": "--gpus-per-task",
    "SLURM_GPUS_PER_NODE": "--gpus-per-node",
}
BY_SALLOC = "DDPEXP_STARTED_BY"  # passed to the tasks: the command line before ddpexp's own arguments
_DDPEXP = "python -m ddpexp"


def torchrun(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the command line that starts the ranks, without ddpexp's arguments, and a note on where to run it.

    `argv` is this command's own.
    """
    machines = int(environ.get("GROUP_WORLD_SIZE") or 1)
    where = " on every machine" if machines > 1 else ""
    if "TORCHELASTIC_RUN_ID" not in environ:
        assignments = [f"{name}={environ[name]}" for name in _TORCHRUN_VARIABLES if name in environ]
        return f"{shlex.join(assignments)} {_DDPEXP}", " in every shell (each with its own RANK)"
    prefix = _command_prefix(argv)
    if prefix is None:
        prefix = ["torchrun", "--nproc-per-node", environ.get("LOCAL_WORLD_SIZE", "1"), "-m", "ddpexp"]
    if where and any(argument.startswith(("--node-rank", "--node_rank")) for argument in prefix):
        where += " (each with its own --node-rank)"
    return shlex.join(prefix), where


def mpirun(argv: Sequence[str], size: int) -> tuple[str, str]:
    """Return the same as `torchrun`, for mpirun with `size` ranks."""
    prefix = _command_prefix(argv)
    return shlex.join(prefix) if prefix is not None else f"mpirun -n {size} {_DDPEXP}", ""


def srun(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the same as `torchrun`, for srun, which may run on another host, or for the salloc around it."""
    if BY_SALLOC in environ:
        return environ[BY_SALLOC], ""
    options = [f"{option}={environ[name]}" for name, option in _SRUN_OPTIONS.items() if environ.get(name)]
    return f"{shlex.join(['srun', *options])} {_DDPEXP}", ""


def salloc(argv: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that pass this to a step's tasks, where this command was run under salloc."""
    prefix = _command_prefix(argv)
    return {BY_SALLOC: shlex.join(prefix)} if prefix is not None else {}


def _command_prefix(argv: Sequence[str]) -> list[str] | None:
    """Return the arguments before ddpexp's own in the command line of an ancestor that ends with them, or None.

    If there are several, the outermost counts: `timeout 3600 torchrun ...`.
    """
    prefix = None
    for pid in ancestors(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        if len(command) > len(argv) > 1 and list(map(_key, command[1 - len(argv) :])) == list(map(_key, argv[1:])):
            prefix = command[: 1 - len(argv)]
    return _as_typed(prefix) if prefix is not None else None


def _key(argument: str) -> str:
    """Return the part of an override that stays the same when a secret value is replaced by a reference."""
    return argument.partition("=")[0]


def _as_typed(command: Sequence[str]) -> list[str]:
    """Return a command line as the user typed it: without the script's interpreter and the program's full path."""
    typed = list(command)
    if len(typed) > 1 and Path(typed[0]).name.startswith("python") and shutil.which(Path(typed[1]).name) == typed[1]:
        del typed[0]  # the interpreter, from the script's first line
    if os.path.isabs(typed[0]) and shutil.which(Path(typed[0]).name) == typed[0]:
        typed[0] = Path(typed[0]).name
    return typed
