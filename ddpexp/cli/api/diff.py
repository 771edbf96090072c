"""`ddpexp.diff`: what runs differ in, as records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ddpexp.cli.api.opened import Run


def diff(runs: Sequence[Run | str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Return what runs differ in, as `ddpexp diff` prints it; nothing is changed, and no code that they name runs.

        pandas.DataFrame(ddpexp.diff(["outputs/mnist/first", "outputs/mnist/second"])).set_index(["group", "key"])

    Args:
        runs: Two directories of runs or more, or `Run`s; that of a sweep, or a folder of runs,
            stands for the runs in it.

    Returns:
        A record for each key that differs and each result, with `group`, `key`, and a value for each run by its
        directory as it was given. A value that has changed when a run was resumed is a text with its steps.

    Raises:
        RefusedError: Fewer than two runs, or one that is none.
    """
    from ddpexp.cli.diff import runs_of
    from ddpexp.sweep.diff import compare_runs

    paths = [str(run.path) if isinstance(run, Run) else os.path.expanduser(os.fspath(run)) for run in runs]
    return compare_runs(runs_of(paths, "ddpexp.diff")).records()
