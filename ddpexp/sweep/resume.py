"""`ddpexp resume SWEEP_DIR`: resume a sweep; overrides that could run code must be restated."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from ddpexp.config.arguments import Arguments
from ddpexp.config.keys import override_key
from ddpexp.config.sweeps import Swept, compose_sweep
from ddpexp.errors import RefusedError
from ddpexp.sweep.folder import SweepDir, read_command, restated_overrides
from ddpexp.system import files

_OPTIONS = ("--config-dir", "-cd")  # each takes a value


def resumed(argv: Sequence[str], command: Sequence[str]) -> Swept:
    """Return the sweep in the directory that `argv` names, with the overrides of this command.

    Raises:
        RefusedError: the directory is damaged, or records what code runs, which counts only when it is restated.
    """
    position = next(i for i, argument in enumerate(argv) if SweepDir(Path(argument)).is_sweep())
    folder = SweepDir(Path(argv[position]))
    typed = [*argv[:position], *argv[position + 1 :]]
    overrides, options = read_command(folder)
    replaced = {"hydra.sweep.dir", "run.allow_changes", *map(override_key, typed)}  # the first two are of one start
    kept = [override for override in overrides if override_key(override) not in replaced]
    missing = restated_overrides(kept, typed)
    if options and not any(argument.startswith(_OPTIONS) for argument in typed):
        missing = [*options, *missing]
    if missing:
        again = " ".join(shlex.quote(argument) for argument in [*command[1:], *missing])
        raise RefusedError(
            "records a setting of code, directories, weights, connections or the environment "
            f"({' '.join(missing[:2])}), which counts only when it is restated",
            suggestion=f"If it is yours: python -m ddpexp {again}",
            place=files.typed(folder.path),
        )
    new = {override_key(override): override for override in typed if "=" in override and override[0] != "-"}
    # In their order, which determines the names of jobs; an override replaces all earlier ones of the same key.
    merged = [
        new.pop(override_key(override), override)
        for override in overrides
        if override in kept or override_key(override) in new
    ]
    rest = [override for override in typed if override not in merged]
    swept = compose_sweep(Arguments.of([*merged, *rest]))
    return dataclasses.replace(swept, directory=str(folder.path), is_named=True, is_stored=True)
