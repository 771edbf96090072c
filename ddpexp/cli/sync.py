"""`ddpexp sync`: send what the remote loggers of a run have not got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ddpexp.cli.subcommands import stored_run
from ddpexp.config import commands
from ddpexp.errors import EXIT_DONE, EXIT_FAILED, RefusedError
from ddpexp.run import lock
from ddpexp.run.sync import Sent, check_usable, send
from ddpexp.system import files
from ddpexp.system.terminal import print_json

_USAGE = f"""{commands.of("sync").usage}

Send what the remote loggers of a run (logger=wandb, logger=mlflow) have not
got: after an outage, a killed run, or a run without a network. What is sent is
marked in the run directory: nothing is sent twice. Refused while the run runs,
which sends by itself. Keys of the loggers may change: logger.wandb.mode=online.
A run with a logger of your own needs --config-dir DIR or run.trust=[...] again.
--json prints the numbers of steps for programs."""


def sync(argv: list[str], command: Sequence[str]) -> int:
    """Send what is left; return 0 once nothing is, else 1.

    Raises:
        RefusedError: it is no run, it is running, or it has no remote logger.
    """
    if not argv:
        raise RefusedError(f"sync what?\n{_USAGE}")
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return EXIT_DONE
    arguments = [argument for argument in argv if argument != "--json"]
    run, experiment, _ = stored_run("sync", arguments, command, keeps=("logger",))
    check_usable(experiment)
    held = lock.take(run.path, run.ranks, f"sync {files.typed(run.path)}")
    try:
        sent = send(run, experiment)
    finally:
        held.release()
    if "--json" in argv:
        print_json({"run": str(run.path.resolve()), "loggers": {name: asdict(part) for name, part in sent.items()}})
    else:
        print("\n".join(_lines(sent, run.path)))
    return EXIT_FAILED if any(part.left or part.problem for part in sent.values()) else EXIT_DONE


def _lines(sent: Mapping[str, Sent], path: Path) -> list[str]:
    width = max(map(len, sent))
    lines = []
    for name, part in sent.items():
        text = f"{part.sent:,} steps sent" if part.sent else "nothing to send" if not part.left else "nothing sent"
        why = f": {part.problem}" if part.problem is not None else ""
        left = f", {part.left:,} left" if part.left else ""
        lines.append(f"logger.{name:<{width}}  {text}{left}{why}")
    if any(part.left or part.problem for part in sent.values()):
        lines.append(f"To try again: python -m ddpexp sync {files.typed(path)}")
    return lines
