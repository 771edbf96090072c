"""`ddpexp resume SWEEP_DIR`: the same sweep again, of whose own words those that could run code are typed again."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from ddpexp import rundir
from ddpexp.config.compose import Swept, compose_sweep
from ddpexp.errors import RefusedError
from ddpexp.sweep.folder import SweepDir

_OPTIONS = ("--config-dir", "-cd")  # each with a word behind it
# What a sweeper understands that is no more than a number or a name.
_HARMLESS = re.compile(
    r"hydra/sweeper(/sampler)?=\w+$|"
    r"hydra\.sweeper\.(n_trials|n_jobs|direction|study_name|max_batch_size|max_failure_rate|sampler\.seed|params\.[\w.]+)="
)


def resumed(argv: Sequence[str], command: Sequence[str]) -> Swept:
    """Return the sweep in the directory that `argv` names, with the words that are typed now.

    Raises:
        RefusedError: the directory is damaged, or says itself what code runs, which counts only when it is typed.
    """
    place = next(i for i, word in enumerate(argv) if SweepDir(Path(word)).is_sweep())
    folder = SweepDir(Path(argv[place]))
    typed = [*argv[:place], *argv[place + 1 :]]
    words, options = _asked(folder)
    keys = {_key(word) for word in typed}
    kept = [word for word in words if _key(word) not in keys and _key(word) != "hydra.sweep.dir"]
    missing = [word for word in kept if _runs_code(word)]
    if options and not any(word.startswith(_OPTIONS) for word in typed):
        missing = [*options, *missing]
    if missing:
        again = " ".join(shlex.quote(word) for word in [*command[1:], *missing])
        raise RefusedError(
            f"{rundir.typed(folder.path)} says itself whose code runs ({' '.join(missing[:2])}), which counts only when it is "
            f"typed again. If it is yours: python -m ddpexp {again}"
        )
    now = {_key(word): word for word in typed if "=" in word and word[0] != "-"}
    merged = [now.pop(_key(word), word) for word in words if _key(word) != "hydra.sweep.dir"]  # in their order, which names jobs
    rest = [word for word in typed if word not in merged]
    swept = compose_sweep([*merged, *rest])
    swept.cfg.hydra.sweep.dir = str(folder.path)
    return dataclasses.replace(swept, folder=str(folder.path))


def again_words(words: Sequence[str]) -> list[str]:
    """Return those words of a sweep that have to be typed again with `ddpexp resume`."""
    return [word for word in words if _runs_code(word)]


def _runs_code(word: str) -> bool:
    """Tell whether a word says what code runs, or whom the sweep connects to."""
    key = _key(word)
    if key.startswith("hydra"):
        return not _HARMLESS.match(word) and key != "hydra.sweep.dir"
    return key == "run.trust" or key.startswith("launcher.")


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _asked(folder: SweepDir) -> tuple[list[str], list[str]]:
    try:
        rundir.check_yaml(folder.asked)
        found = yaml.safe_load(folder.asked.read_text())
        words, options = found["words"], found["options"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise RefusedError(f"{folder.asked} cannot be read: {error}.") from None
    if not all(isinstance(part, list) and all(isinstance(word, str) for word in part) for part in (words, options)):
        raise RefusedError(f"{folder.asked} cannot be read: it holds no words.")
    return words, options
