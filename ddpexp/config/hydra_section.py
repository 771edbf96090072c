"""Hydra's own section: what of it counts here, what is refused because it would have no effect.

What `${hydra:...}` stands for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from ddpexp.compat.omegaconf import register_resolver
from ddpexp.config.build import shown
from ddpexp.config.instantiate import Trust, targets
from ddpexp.errors import RefusedError
from ddpexp.system.yaml_text import load_yaml

# Settings with an effect, wherever they are written. Of the others what Hydra fills in itself differs from command to
# command.
_OBEYED = re.compile(
    r"hydra[./](mode$|sweep\.dir$|sweeper\b|help\b|job\.name$|job\.config\.override_dirname\.)|"
    r"hydra\.(hydra_help|searchpath|overrides|runtime|job\.(override_dirname|config_name|num|id))\b"
)
_OF_SWEEPS = re.compile(r"hydra(\.sweep\.dir$|[./]sweeper\b)")
_OF_A_RUN = re.compile(r"hydra\.job\.(name$|config\.override_dirname\.)")
# What the others are here, as Hydra 1.3 composes it.
_HERE: Mapping[str, Any] = {
    "hydra.run.dir": ".",
    "hydra.sweep.subdir": "${hydra.job.num}",
    "hydra.launcher._target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    **{
        f"hydra.{section}.{key}": value
        for section in ("hydra_logging", "job_logging")
        for key, value in (("version", 1), ("root", None), ("disable_existing_loggers", False))
    },
    "hydra.env": {},
    "hydra.callbacks": {},
    "hydra.output_subdir": None,
    "hydra.job.chdir": False,
    "hydra.job.env_set": {},
    "hydra.job.env_copy": [],
    "hydra.verbose": False,
}
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
_ANSWERED = ("runtime.cwd", "runtime.version", "runtime.choices", "job.name", "job.config_name", "mode")
_FORMED = re.compile(r"\$\{hydra:([\w./-]+)\}")


def check_not_typed(override: str, in_sweep: bool) -> None:
    """Look at a typed word for Hydra's own section.

    Raises:
        RefusedError: it would have no effect.
    """
    key = override.lstrip("+~").partition("=")[0].partition("@")[0]
    if not re.match(r"hydra[./]|hydra$", key) or _OF_A_RUN.match(key) or key == "hydra.mode":
        return
    if _OF_SWEEPS.match(key):
        if not in_sweep:
            raise RefusedError(f"{override} is for sweeps: add -m, or leave it out.")
    else:
        raise RefusedError(no_effect(override, key))


def no_effect(setting: str, key: str) -> str:
    """Return the sentence for what sets a key of Hydra's section that has no effect."""
    name = key[len("hydra.") :].replace("/", ".")
    advice = next(
        (advice for start, advice in _ADVICE if name.startswith(start)), "Use run.dir=... and --config-dir DIR."
    )
    return f"{setting}: Hydra's own settings have no effect here. {advice}"


def check_nothing_ignored(
    cfg: DictConfig, plain: Callable[[], DictConfig], files: Callable[[], Sequence[Path]]
) -> None:
    """Look at what config files set in Hydra's own section, as it is composed in `cfg`.

    `plain` composes the same without anybody's files but ours, and `files` lists those that were read: both take time,
    and are only called where something is other than it should be.

    Raises:
        RefusedError: one of them sets what would have no effect.
    """
    found = _settings(cfg)
    if found == _HERE:
        return
    expected = _settings(plain())
    changed = next((key for key in (*found, *expected) if found.get(key, expected) != expected.get(key, found)), None)
    if changed is None:
        return
    setting = f"{changed}={shown(found.get(changed, expected.get(changed)))}"
    last = changed.rpartition(".")[2]
    file = next((path for path in reversed(files()) if all(text in path.read_text() for text in ("hydra", last))), None)
    where = f"{file} sets {setting}" if file is not None else f"a config file sets {setting}"
    raise RefusedError(no_effect(where, changed))


def check_no_ignored_options(files: Sequence[Path]) -> None:
    """Look at what config files choose of Hydra's own groups: ours are chosen first, and later ones have no effect.

    Raises:
        RefusedError: one of them chooses something.
    """
    for path in files:
        text = path.read_text(errors="replace")
        if "hydra/" not in text:
            continue
        written = load_yaml(text)
        for entry in written.get("defaults") or () if isinstance(written, dict) else ():
            for key, option in entry.items() if isinstance(entry, dict) else ():
                group = str(key).removeprefix("override").strip().lstrip("/").partition("@")[0]
                if (
                    group.startswith("hydra/")
                    and not _OBEYED.match(group)
                    and option not in (None, "none", "default", "basic")
                ):
                    raise RefusedError(no_effect(f"{path} chooses {group}={option}", group))


def check_code_of_sweeper(sweeper: Any, trust: Trust) -> None:
    """Look at every `_target_` of a sweeper.

    Its own class and those of its settings, which are called in the command's process.

    Raises:
        RefusedError: one that neither an installed plugin has brought nor anybody has trusted.
    """
    plain = OmegaConf.to_container(sweeper, resolve=True) if OmegaConf.is_config(sweeper) else sweeper
    for key, target in targets(plain, "hydra.sweeper"):
        itself = key == "hydra.sweeper._target_" and str(target).startswith(
            "hydra_plugins."
        )  # Hydra sees that it is a sweeper
        if not (itself or target in _of_plugins() or trust.allows(str(target), key.removesuffix("._target_"))):
            raise RefusedError(
                f"{key}={target} is not allowed: a configuration may name what an installed plugin of Hydra's offers "
                "for sweeps, "
                f"modules beside a typed --config-dir and prefixes typed as run.trust=[...]."
            )


def _of_plugins() -> set[str]:
    """Return what Hydra and its plugins have registered for sweeps."""

    def walk(tree: Any) -> Iterator[str]:
        for value in tree.values():
            if isinstance(value, dict):
                yield from walk(value)
            elif OmegaConf.is_config(value.node):
                yield from (str(target) for _, target in targets(OmegaConf.to_container(value.node, resolve=False), ""))

    values = ConfigStore.instance().repo.get("hydra", {})
    return {"hydra._internal.core_plugins.basic_sweeper.BasicSweeper", *walk(values.get("sweeper", {}))}


def _settings(cfg: DictConfig) -> dict[str, Any]:
    """Return what is in Hydra's section beside what is obeyed and what Hydra fills in itself, by whole keys."""
    found: dict[str, Any] = {}

    def walk(values: Any, where: str) -> None:
        if isinstance(values, dict) and values and where != "hydra.callbacks":
            for key, value in values.items():
                walk(value, f"{where}.{key}")
        elif not _OBEYED.match(where):
            found[where] = values

    walk(OmegaConf.to_container(cfg.hydra, resolve=False, enum_to_str=True), "hydra")
    return found


# What `${hydra:...}` stands for


def answers_of(cfg: DictConfig) -> dict[str, Any]:
    """Return what `${hydra:...}` can be answered with, by its words; `cfg` still has Hydra's section."""
    plain: Any = OmegaConf.to_container(cfg.hydra, resolve=False, enum_to_str=True)
    values: dict[str, Any] = {name: reduce(getitem, name.split("."), plain) for name in _ANSWERED}
    values["mode"] = values["mode"] or "RUN"
    conf = cfg.hydra.job.config.override_dirname
    values["job.override_dirname"] = dirname(
        plain["overrides"]["task"], conf.kv_sep, conf.item_sep, list(conf.exclude_keys)
    )
    return values


def dirname(overrides: Sequence[str], between: str = "=", joint: str = ",", left_out: Sequence[str] = ()) -> str:
    """Return what was typed as part of a path, as Hydra does; what may have such a part itself is left out."""
    kept = [
        override
        for override in overrides
        if "${" not in override and override.partition("=")[0].lstrip("+~") not in ("run.dir", *left_out)
    ]
    return joint.join(sorted(kept)).replace("=", between)


@contextmanager
def answered(answers: Mapping[str, Any]) -> Iterator[None]:
    """Have `${hydra:...}` stand for these answers in what is resolved inside; what else is asked for is refused."""

    def answer(path: str) -> Any:
        return _answer(answers, path)

    register_resolver("hydra", answer, replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("hydra")


def written_out(text: str, answers: Mapping[str, Any]) -> str:
    """Put the answers into a text that is kept as it is written for other references: nobody else can give them."""
    return _FORMED.sub(lambda found: str(_answer(answers, found[1])), text)


def _answer(answers: Mapping[str, Any], path: str) -> Any:
    name = next((name for name in answers if path == name or path.startswith(f"{name}.")), None)
    if name is not None:
        value = answers[name]
        if path == name:
            return value
        rest = path[len(name) + 1 :]
        if isinstance(value, Mapping) and rest in value:
            return value[rest]
        raise ValueError(f"${{hydra:{path}}} has no value: no option of {rest} is chosen")
    if path in ("runtime.output_dir", "run.dir", "sweep.subdir"):
        raise ValueError(
            f"${{hydra:{path}}} has no value: the run directory is made when the configuration is accepted. Type "
            "run.dir=..., and "
            f"write ${{run.dir}}"
        )
    if path in ("job.num", "sweep.dir"):
        raise ValueError(f"${{hydra:{path}}} has a value only in the jobs of a sweep (-m)")
    raise ValueError(f"${{hydra:{path}}} has no value here: there is {', '.join(answers)}")
