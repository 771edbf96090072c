"""What was typed before ddpexp's own words to start the ranks: how they are started again."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpexp.system.process import ancestors

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_SRUN = {
    "SLURM_STEP_NUM_NODES": "--nodes",
    "SLURM_STEP_NUM_TASKS": "--ntasks",
    "SLURM_CPUS_PER_TASK": "--cpus-per-task",
    "SLURM_GPUS_PER_TASK": "--gpus-per-task",
    "SLURM_GPUS_PER_NODE": "--gpus-per-node",
}
BY_SALLOC = "DDPEXP_STARTED_BY"  # for the tasks: what was typed before our words
_OURS = "python -m ddpexp"


def torchrun(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return what starts the ranks again when words for ddpexp follow it, and where it is typed.

    `argv` is this command line.
    """
    machines = int(environ.get("GROUP_WORLD_SIZE") or 1)
    where = " on every machine" if machines > 1 else ""
    if "TORCHELASTIC_RUN_ID" not in environ:
        mine = [f"{name}={environ[name]}" for name in _OF_TORCHRUN if name in environ]
        return f"{shlex.join(mine)} {_OURS}", " in every shell (each with its own RANK)"
    words = _found(argv)
    if words is None:
        words = ["torchrun", "--nproc-per-node", environ.get("LOCAL_WORLD_SIZE", "1"), "-m", "ddpexp"]
    if where and any(word.startswith(("--node-rank", "--node_rank")) for word in words):
        where += " (each with its own --node-rank)"
    return shlex.join(words), where


def mpirun(argv: Sequence[str], size: int) -> tuple[str, str]:
    """Return it as `torchrun` does, for mpirun with `size` ranks."""
    words = _found(argv)
    return shlex.join(words) if words is not None else f"mpirun -n {size} {_OURS}", ""


def srun(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return it as `torchrun` does, for srun, which may run on another host; or for the salloc around it."""
    if BY_SALLOC in environ:
        return environ[BY_SALLOC], ""
    options = [f"{option}={environ[name]}" for name, option in _OF_SRUN.items() if environ.get(name)]
    return f"{shlex.join(['srun', *options])} {_OURS}", ""


def salloc(argv: Sequence[str]) -> dict[str, str]:
    """Return what the tasks of a step need to know, where this command was typed behind salloc, as variables.

    For them.
    """
    words = _found(argv)
    return {BY_SALLOC: shlex.join(words)} if words is not None else {}


def _found(argv: Sequence[str]) -> list[str] | None:
    """Return the words before ours in the command line of a process above this one that ends with them.

    None where there is none.

    Of several the uppermost counts: `timeout 3600 torchrun ...`.
    """
    found = None
    for pid in ancestors(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        if len(words) > len(argv) > 1 and list(map(_key, words[1 - len(argv) :])) == list(map(_key, argv[1:])):
            found = words[: 1 - len(argv)]
    return _as_typed(found) if found is not None else None


def _key(word: str) -> str:
    """Return what of a word stays when a secret is put back as a reference."""
    return word.partition("=")[0]


def _as_typed(words: Sequence[str]) -> list[str]:
    """Return a command line without what the kernel and a shell have made of the program's name."""
    words = list(words)
    if len(words) > 1 and Path(words[0]).name.startswith("python") and shutil.which(Path(words[1]).name) == words[1]:
        del words[0]  # of a script's first line
    if os.path.isabs(words[0]) and shutil.which(Path(words[0]).name) == words[0]:
        words[0] = Path(words[0]).name
    return words
