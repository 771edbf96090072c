"""Whether a command forks workers: guessed from its arguments, so that their server can start before Hydra composes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ddpexp.cli.verb import CONFIG_DIR, HELP, MULTIRUN, Verb
from ddpexp.config.registry import forks_workers, key_of

# Options with which the command trains.
_NO_QUESTION = (*CONFIG_DIR, "--config-name", "-cn", *MULTIRUN)


def will_fork(verb: Verb | None, argv: Sequence[str]) -> bool:
    """Guess from the arguments alone whether workers will be forked here; a wrong guess costs time, nothing else."""
    if verb is None:
        asks = any(argument.startswith("-") and not argument.startswith(_NO_QUESTION) for argument in argv)
        return bool(argv) and not asks and _forks_workers(argv, _chosen(argv))
    if HELP & set(argv) or (verb.missing_prompt and len(argv) == 1):
        return False
    if verb.forks == "stored launcher":
        return _forks_workers(argv, _chosen(argv) or _launcher_of_run(argv[1:]))
    return verb.forks == "always" or (verb.forks == "launcher" and _forks_workers(argv, _chosen(argv)))


def _chosen(argv: Sequence[str]) -> list[str]:
    chosen = (argument.partition("=")[2] for argument in argv if argument.startswith("launcher="))
    return [name for names in chosen for name in names.split(",")]


def _forks_workers(argv: Sequence[str], launchers: Sequence[str]) -> bool:
    """Return whether this command forks the workers of these launchers, of launcher=spawn if there are none."""
    start_methods = [argument for argument in argv if argument.startswith("launcher.start_method=")]
    return all(method == "launcher.start_method=forkserver" for method in start_methods) and all(
        forks_workers(name, os.environ) for name in launchers
    )


def _launcher_of_run(arguments: Sequence[str]) -> list[str]:
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
        key = key_of("launcher", found[1]) if found else None
        return [key] if key is not None else []
    return []
