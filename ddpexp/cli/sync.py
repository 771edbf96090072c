"""`ddpexp sync`: send what the remote loggers of a run have not got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, EXIT_FAILED
from ddpexp.run import lock
from ddpexp.run.stored_run import find_run, read_run
from ddpexp.run.sync import Sent, check_usable, send
from ddpexp.system import files
from ddpexp.system.terminal import print_json


def sync(call: Call) -> int:
    """Send what is left; return 0 once nothing is, else 1.

    Raises:
        RefusedError: it is no run, it is running, or it has no remote logger.
    """
    source, overrides = call.source()
    run = find_run(source, call.name)
    experiment = read_run(run, overrides, f"sync {source}", call.restate, keeps=("logger",)).experiment
    check_usable(experiment)
    held = lock.take(run.path, run.ranks, f"sync {files.typed(run.path)}")
    try:
        sent = send(run, experiment)
    finally:
        held.release()
    if call.as_json:
        print_json({"run": str(run.path.resolve()), "loggers": {name: asdict(part) for name, part in sent.items()}})
    else:
        print("\n".join(_lines(sent, run.path)))
    return EXIT_FAILED if any(part.left or part.problem for part in sent.values()) else EXIT_DONE


def _lines(sent: Mapping[str, Sent], path: Path) -> list[str]:
    width = max(map(len, sent))
    lines = []
    for name, part in sent.items():
        if part.sent:
            text = f"{part.sent:,} steps sent"
        elif part.left:
            text = "nothing sent"
        else:
            text = "nothing to send"
        why = f": {part.problem}" if part.problem is not None else ""
        left = f", {part.left:,} left" if part.left else ""
        lines.append(f"logger.{name:<{width}}  {text}{left}{why}")
    if any(part.left or part.problem for part in sent.values()):
        lines.append(f"To try again: python -m ddpexp sync {files.typed(path)}")
    return lines
