"""Hydra composes the tree; its refusals become one sentence each, with the nearest right word."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddpexp.config.build import did_you_mean
from ddpexp.errors import RefusedError

_FULL_ERROR = "HYDRA_FULL_ERROR"


@dataclass(frozen=True)
class Composed:
    """A composed configuration: plain values, and how it came to be."""

    values: Mapping[str, Any]  # resolved
    text: str  # YAML, resolved but for references to the environment, which may be secrets
    overrides: tuple[str, ...]  # as typed
    warnings: tuple[str, ...]


def conf_folder() -> Path:
    """Return the folder of our YAML files, in a checkout and in an installed wheel alike."""
    import ddpexp

    for place in ddpexp.__path__:
        if (Path(place) / "conf" / "config.yaml").is_file():
            return Path(place) / "conf"
    raise RefusedError("ddpexp's own configs (ddpexp/conf) are not installed: reinstall ddpexp.")


def compose(argv: list[str]) -> Composed | None:
    """Compose the tree from the command line; None when Hydra itself answered (`--help`, `--cfg`, ...).

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses.
    """
    words = get_args_parser().parse_args(argv)
    if words.multirun or any(word.lower().startswith("hydra.mode=multirun") for word in words.overrides):
        raise RefusedError("Sweeps (-m, --multirun) are not there yet: start one run at a time.")
    if words.config_path or words.config_name or words.experimental_rerun:
        raise RefusedError("--config-path, --config-name and --experimental-rerun do not apply: use --config-dir DIR recipe=NAME.")
    answers = words.help or words.hydra_help or words.cfg or words.info or words.shell_completion
    with _full_errors():
        try:
            if answers:
                _let_hydra_answer(argv)
                return None
            return _composed(words.overrides, words.config_dir)
        except (HydraException, OmegaConfBaseException) as error:
            if os.environ.get(_FULL_ERROR) == "asked":
                raise
            raise RefusedError(_sentence(error)) from None


def _let_hydra_answer(argv: list[str]) -> None:
    arguments, sys.argv = sys.argv, ["ddpexp", *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(lambda cfg: None)()
    finally:
        sys.argv = arguments


def _composed(overrides: list[str], directory: str | None) -> Composed:
    # Hydra's own main composes twice, once to learn whether this is a sweep: the API does it once, in half the time.
    added = Path(directory).resolve() if directory else None
    if added is not None and not added.is_dir():
        raise RefusedError(f"--config-dir {directory} is not a directory.")
    search = [f"hydra.searchpath=[file://{added}]"] if added else []
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        cfg = hydra.compose("config", [*search, *overrides], return_hydra_config=True)
    choices = {str(group): option for group, option in cfg.hydra.runtime.choices.items() if isinstance(option, str)}
    with open_dict(cfg):
        del cfg["hydra"]
    values, kept = _plain(cfg), _resolve_but_secrets(cfg)
    _refuse_untyped_trust(values, overrides)
    for tree in (values, kept):
        tree["run"]["code"] = str(added.parent) if added else None
        tree.setdefault("recipe", {}).setdefault("name", choices.get("recipe", "run"))
    _refuse_other_types(values, choices, [folder for folder in (conf_folder(), added) if folder is not None])
    return Composed(values, OmegaConf.to_yaml(OmegaConf.create(kept)), tuple(overrides), tuple(_shadowed(added)))


@contextmanager
def _full_errors() -> Iterator[None]:
    """Make Hydra raise its errors instead of printing a traceback and leaving with 1."""
    previous = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "asked" if previous else "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = previous


def config_dir(argv: list[str]) -> Path | None:
    """Return the folder typed as `--config-dir`, which is also what trusts the code beside it."""
    for index, word in enumerate(argv):
        if word in ("--config-dir", "-cd") and index + 1 < len(argv):
            return Path(argv[index + 1]).resolve()
        if word.startswith("--config-dir="):
            return Path(word.split("=", 1)[1]).resolve()
    return None


def _resolve_but_secrets(cfg: DictConfig) -> dict[str, Any]:
    """Resolve every interpolation but those that read the environment, also where one refers to another."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    references: list[str] = []

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hide(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [hide(inner) for inner in value]
        if isinstance(value, str) and "oc.env" in value and "${" in value:
            references.append(value)
            return f"<<reference {len(references) - 1}>>"
        return value

    def show(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: show(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [show(inner) for inner in value]
        if isinstance(value, str) and "<<reference " in value:
            return re.sub(r"<<reference (\d+)>>", lambda found: references[int(found[1])], value)
        return value

    hidden = OmegaConf.create(hide(raw))
    assert isinstance(hidden, DictConfig)
    kept: dict[str, Any] = show(_plain(hidden))
    return kept


def _plain(cfg: DictConfig) -> dict[str, Any]:
    return {str(key): value for key, value in cast(dict[Any, Any], OmegaConf.to_container(cfg, resolve=True)).items()}


def _refuse_untyped_trust(values: Mapping[str, Any], typed: list[str]) -> None:
    run = values.get("run")
    if not isinstance(run, Mapping):
        raise RefusedError(f"run={run} is not a section: set its keys, such as run.dir=... .")
    if run.get("trust") and not any(word.lstrip("+").startswith("run.trust=") for word in typed):
        raise RefusedError(f"run.trust={run['trust']} stands in a file: it counts only when typed on the command line.")
    if run.get("code"):
        raise RefusedError(f"run.code={run['code']} cannot be set: type --config-dir DIR to use the code beside DIR.")


def _refuse_other_types(values: Mapping[str, Any], choices: Mapping[str, str], folders: list[Path]) -> None:
    """Compare the values in a group's section with the types of the same keys in the option's own file."""
    for group in ("model", "optimizer", "data", "recipe"):
        option = choices.get(group)
        for folder in folders:
            path = folder / group / f"{option}.yaml"
            if not path.is_file():
                continue
            written = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            if isinstance(written, dict):
                found = values if group == "recipe" else values.get(group)
                _compare(written, found, "" if group == "recipe" else group)
            break


def _compare(written: Mapping[str, Any], found: Any, where: str) -> None:
    if not isinstance(found, Mapping):
        return
    for key, default in written.items():
        here = f"{where}.{key}" if where else str(key)
        value = found.get(key)
        if isinstance(default, dict):
            _compare(default, value, here)
        elif value is None or default is None or key == "_target_" or isinstance(default, list):
            continue
        elif isinstance(default, bool) != isinstance(value, bool) or (
            isinstance(default, int | float) and not isinstance(value, int | float)
        ):
            kind = "true or false" if isinstance(default, bool) else "a number"
            raise RefusedError(f"{here}={value} is not {kind} (its default is {str(default).lower()}).")
        elif isinstance(default, int) and isinstance(value, float):
            raise RefusedError(f"{here}={value} is not a whole number (its default is {default}).")


def _shadowed(added: Path | None) -> Iterator[str]:
    """Warn of the user's options that our own of the same name hide: Hydra looks into our folder first."""
    if added is None:
        return
    ours = conf_folder()
    for path in sorted(added.glob("*/*.yaml")):
        name = path.relative_to(added)
        if (ours / name).is_file():
            yield f"{path} is not used: ddpexp has its own {name.with_suffix('')}. Give yours another name."


def _sentence(error: Exception) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if not group:
            return f"There is no config {option}."
        options = [name for name in error.options or [] if name]
        known = did_you_mean(option, options, f"{group}=") if options else f" There is no group {group}."
        return f"{group}={option} is not a known option.{known}"
    if isinstance(error, OverrideParseException):
        return f"{error.override} is not an override: write key=value, for example trainer.gpus=2."
    if isinstance(error, ConfigCompositionException):
        cause = error.__cause__
        unknown = re.match(r"Could not override '([^']+)'", str(error))
        if isinstance(cause, OmegaConfBaseException):
            key = cause.full_key or (unknown[1] if unknown else "")
            parent = cause.parent_node
            if unknown and isinstance(parent, DictConfig) and cause.key is not None:
                prefix = key[: -len(str(cause.key))] if key.endswith(str(cause.key)) else ""
                names = [str(name) for name in parent if name != "hydra"]
                return f"{unknown[1]} is not a known key.{did_you_mean(str(cause.key), names, prefix)}"
        return _first_line(error)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(error)}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


def override_file(path: Path, words: list[str]) -> tuple[Mapping[str, Any], str]:
    """Read a run directory's config.yaml and override it with `key=value` words; also return it as text.

    What the file says of whose code to trust does not count: run.trust and --config-dir are typed again.

    Raises:
        RefusedError: the file is damaged, or a word is no override of it.
    """
    added = config_dir(words)
    typed = [word for index, word in enumerate(words) if not _names_config_dir(words, index)]
    try:
        cfg = OmegaConf.load(path)
        assert isinstance(cfg, DictConfig)
        cfg.run.trust, cfg.run.code = [], str(added.parent) if added else None
        OmegaConf.set_struct(cfg, True)
        for word in typed:
            key, equals, value = word.partition("=")
            if not equals:
                raise RefusedError(f"{word} is not an override: write key=value, for example trainer.gpus=2.")
            OmegaConf.update(cfg, key, OmegaConf.create(f"x: {value}").x, force_add=False)
        values = _plain(cfg)
    except (OmegaConfBaseException, yaml.YAMLError, AssertionError, AttributeError) as error:
        raise RefusedError(f"{path}: {_first_line(error)}") from None
    return values, OmegaConf.to_yaml(cfg)


def _names_config_dir(words: list[str], index: int) -> bool:
    return words[index].startswith(("--config-dir", "-cd")) or (index > 0 and words[index - 1] in ("--config-dir", "-cd"))
