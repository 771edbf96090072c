"""Hydra's own section: which settings count here, which are refused as without effect."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpexp.config.folders import conf_folder
from ddpexp.config.instantiate import Trust, targets
from ddpexp.config.keys import override_key
from ddpexp.config.replaced_targets import in_package
from ddpexp.errors import RefusedError, SweptError, shown
from ddpexp.system.yaml_text import load_yaml

# Settings with an effect, wherever they are written. Of the others what Hydra fills in itself differs from command to
# command.
_SUPPORTED = re.compile(
    r"hydra[./](mode$|sweep\.dir$|sweeper\b|help\b|job\.name$|job\.config\.override_dirname\.)|"
    r"hydra\.(hydra_help|searchpath|overrides|runtime|job\.(override_dirname|config_name|num|id))\b"
)
_OF_SWEEPS = re.compile(r"hydra(\.sweep\.dir$|[./]sweeper\b)")
_OF_A_RUN = re.compile(r"hydra\.job\.(name$|config\.override_dirname\.)")
_UNCHANGED = {"hydra.run.dir": ".", "hydra.sweep.subdir": "${hydra.job.num}"}  # a file may repeat these values
_ADVICE = (
    ("sweep.subdir", "The jobs' directories are named by their number and what is their own."),
    (
        "launcher",
        "ddpexp starts the jobs of a sweep itself. sweep.slots=... says how many at once, launcher=slurm submits them.",
    ),
    ("run", "run.dir=... names the run directory."),
    ("output_subdir", "run.dir=... names the run directory, which holds all of it."),
    ("searchpath", "--config-dir DIR adds your configs."),
    ("job.env", "Set variables in the shell."),
    ("job.chdir", "Every run stays in the current folder."),
    ("callbacks", "There are no callbacks."),
    ("verbose", "A run's log is run.log in its directory, and each rank's ranks/RANK.log."),
    ("job_logging", "A run's log is run.log in its directory, and each rank's ranks/RANK.log."),
    ("hydra_logging", "A run's log is run.log in its directory, and each rank's ranks/RANK.log."),
)
_NO_CHOICE = (None, "none", "default", "basic")


def check_has_effect(override: str) -> None:
    """Refuse an override of Hydra's own section that would have no effect.

    Raises:
        RefusedError: with what to type instead.
    """
    key = _key(override)
    if re.match(r"hydra([./]|$)", key) and not (_OF_A_RUN.match(key) or _OF_SWEEPS.match(key) or key == "hydra.mode"):
        raise no_effect(override, key)


def check_of_one_run(overrides: Sequence[str]) -> None:
    """Refuse overrides that only a sweep has.

    Raises:
        RefusedError: with what to type instead.
    """
    for override in overrides:
        if _OF_SWEEPS.match(_key(override)) or _key(override).startswith("sweep."):
            raise SweptError("is for sweeps", suggestion="Add -m, or leave it out.", place=override)


def _key(override: str) -> str:
    return override_key(override).partition("@")[0]


def no_effect(setting: str, key: str) -> RefusedError:
    """Return the error for what sets a key of Hydra's section that has no effect."""
    name = key[len("hydra.") :].replace("/", ".")
    advice = next(
        (advice for start, advice in _ADVICE if name.startswith(start)), "Use run.dir=... and --config-dir DIR."
    )
    return RefusedError("Hydra's own settings have no effect here", suggestion=advice, place=setting)


def check_files(files: Sequence[tuple[Path, str]]) -> None:
    """Look at what config files, each with the package of its keys, choose and set of Hydra's own.

    Raises:
        RefusedError: one of them chooses or sets what has no effect.
    """
    for path, package in files:
        text = path.read_text(errors="replace")
        written = load_yaml(text) if "hydra" in f"{text} {package}" else None
        if not isinstance(written, Mapping) or path.is_relative_to(conf_folder()):
            continue
        for group, option in _choices(written.get("defaults")):
            if group.startswith("hydra/") and not _SUPPORTED.match(group) and option not in _NO_CHOICE:
                raise no_effect(f"{path} chooses {group}={option}", group)
        for key, value in _settings(in_package(package, written).get("hydra"), "hydra"):
            raise no_effect(f"{path} sets {key}={shown(value)}", key)


def check_code_of_sweeper(sweeper: Any, offered: Collection[str], trust: Trust) -> None:
    """Look at every `_target_` of a sweeper: its class and those of its settings, which this process calls.

    `offered` are those that Hydra and its plugins have registered for sweeps.

    Raises:
        RefusedError: one that neither an installed plugin has brought nor anybody has trusted.
    """
    for key, target in targets(sweeper, "hydra.sweeper"):
        itself = key == "hydra.sweeper._target_" and str(target).startswith(
            "hydra_plugins."
        )  # Hydra sees that it is a sweeper
        if not (itself or target in offered or trust.allows(str(target), key.removesuffix("._target_"))):
            raise RefusedError(
                "is not allowed: a configuration may name what an installed plugin of Hydra's offers for "
                "sweeps, modules beside a typed --config-dir and prefixes typed as run.trust=[...]",
                key=key,
                value=target,
            )


def _choices(defaults: Any) -> Iterator[tuple[str, Any]]:
    """Yield the groups of a list of defaults, each with the option that it chooses."""
    for entry in defaults if isinstance(defaults, list) else ():
        for key, option in entry.items() if isinstance(entry, Mapping) else ():
            yield str(key).removeprefix("override").strip().lstrip("/").partition("@")[0], option


def _settings(values: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in Hydra's section that have no effect, by whole keys."""
    if isinstance(values, Mapping) and where != "hydra.callbacks":
        for key, value in values.items():
            yield from _settings(value, f"{where}.{key}")
    elif values and not _SUPPORTED.match(where) and values != _UNCHANGED.get(where):
        yield where, values
