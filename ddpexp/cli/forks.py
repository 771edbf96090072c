"""Whether a command forks workers: guessed from its arguments, so that their server can start before Hydra composes."""

from __future__ import annotations

import os
import re

from ddpexp.config import commands

# Launchers whose workers are forked by the command itself, and the variable that must be set for that, if any.
_FORK_HERE = {"spawn": None, "torchrun-env": None, "mpi": None, "slurm": "SLURM_STEP_ID"}
_HELP = {"--help", "-h"}
_NO_QUESTION = ("--config-dir", "-cd", "--config-name", "-cn", "--multirun", "-m")


def will_fork(argv: list[str]) -> bool:
    """Guess from the arguments alone whether workers will be forked here; a wrong guess costs time, nothing else."""
    if argv[:1] == ["member"]:
        return True
    if (
        not argv
        or argv[0]
        in ("table", "status", "sync", "plan", "data", "export", "generate", "trust", "new", "help", "completion")
        or commands.unknown(argv[0]) is not None
    ):
        return False
    if argv[0] == "check":  # workers are forked here whatever the launcher
        return len(argv) > 1 and not _HELP & set(argv)
    chosen = [
        name for argument in argv if argument.startswith("launcher=") for name in argument.partition("=")[2].split(",")
    ]
    if argv[:1] == ["resume"]:
        chosen = chosen or _launcher_of_run(argv[1:])
    fresh = any(
        argument.startswith("launcher.start_method=") and argument != "launcher.start_method=forkserver"
        for argument in argv
    )
    here = all(name in _FORK_HERE and _FORK_HERE[name] in (None, *os.environ) for name in chosen)
    if argv[:1] in (["evaluate"], ["predict"], ["resume"], ["doctor"]):
        return here and not fresh and len(argv) > (argv[0] != "doctor") and not _HELP & set(argv)
    asks = any(argument.startswith("-") and not argument.startswith(_NO_QUESTION) for argument in argv)
    return here and not asks and not fresh


def _launcher_of_run(arguments: list[str]) -> list[str]:
    """Read from the run directory among the arguments which launcher it was started with.

    Nothing where that is not plain to see.
    """
    for argument in arguments:
        path = os.path.join(argument, "config.yaml")
        try:
            if not os.path.isfile(path):  # a pipe would keep this waiting
                continue
            with open(path) as file:
                found = re.search(r"^launcher:\n  _target_: (\S+)$", file.read(1 << 16), re.MULTILINE)
        except (OSError, ValueError):
            continue
        from ddpexp.config.registry import key_of

        key = key_of("launcher", found[1]) if found else None
        return [key] if key is not None else []
    return []
