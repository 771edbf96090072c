"""Compose a sweep: what its jobs have in common, then each job."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ddpexp.compat.hydra import VERSION_BASE, apply_overrides
from ddpexp.compat.omegaconf import quick_yaml
from ddpexp.config.arguments import Arguments
from ddpexp.config.folders import added_folder, conf_folder
from ddpexp.config.hydra_section import (
    answered,
    answers_of,
    check_code_of_sweeper,
    dirname,
)
from ddpexp.config.hydra_tree import check_settings_of_hydra, compose_for_sweep, compose_tree
from ddpexp.config.instantiate import Trust
from ddpexp.config.interpolations import bounded_interpolations
from ddpexp.config.override_checks import (
    check_override_of_sweep,
    check_overrides,
    check_single_values,
    check_typed_once,
    choices,
)
from ddpexp.config.sentences import one_sentence
from ddpexp.config.typed_targets import forced, is_in, typed_targets
from ddpexp.config.user_files import check_user_files
from ddpexp.config.values import Composed, Tree, finish, warnings_of
from ddpexp.errors import RefusedError
from ddpexp.system.text import is_utf8
from ddpexp.system.yaml_text import load_yaml


@dataclass(frozen=True)
class Swept:
    """A sweep as requested, before its jobs are known."""

    cfg: DictConfig  # composed without the swept overrides, with Hydra's own section
    loader: ConfigLoader  # in which Hydra's sweepers look up groups
    settings: Mapping[str, Any]  # the section `sweep`
    keys: frozenset[str]  # that are swept
    intervals: tuple[str, ...]  # overrides with a range of values to choose from
    overrides: tuple[str, ...]  # as typed
    folder: str | None  # hydra.sweep.dir, where it was typed or a config file sets it
    config_dir: str | None
    warnings: tuple[str, ...]
    is_stored: bool = False  # overrides are those of the sweep's own files

    @property
    def sweeper(self) -> str:
        """Return the override that chooses the sweeper."""
        return f"hydra/sweeper={self.cfg.hydra.runtime.choices['hydra/sweeper']}"


def compose_sweep(arguments: Arguments) -> Swept:
    """Compose what a sweep's jobs have in common.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses, and Hydra's settings that would have no effect.
    """
    typed = arguments.settings
    for text in typed:
        check_override_of_sweep(text)
    check_overrides(typed, False, in_sweep=True)
    check_single_values(typed)
    check_typed_once(typed)
    added = added_folder(arguments.config_dir)
    for choice in choices(typed):
        check_user_files(choice, added)
    with (
        one_sentence(), bounded_interpolations(), quick_yaml(),
        hydra.initialize_config_dir(str(conf_folder()), job_name="ddpexp", **VERSION_BASE),
    ):  # fmt: skip
        loaded = GlobalHydra.instance().hydra
        assert loaded is not None
        parsed = OverridesParser.create(loaded.config_loader).parse_overrides(typed)
        cfg = compose_for_sweep(loaded, typed, added)
        check_settings_of_hydra(cfg, typed, added)
        check_code_of_sweeper(cfg.hydra.sweeper, Trust(_trusted(parsed), added.parent if added else None))
        of_sweeper = cfg.hydra.sweeper.get("params") or {}
        chosen = OmegaConf.to_container(cfg.hydra.sweep, resolve=False) != _default_sweep()
        with answered(answers_of(cfg)):
            settings = OmegaConf.to_container(cfg.sweep, resolve=True)
            never_evaluated = OmegaConf.select(cfg, "trainer.eval_every") == 0
            cfg.hydra.sweep.dir = str(cfg.hydra.sweep.dir)  # resolved here, where an error becomes one sentence
        of_file = OverridesParser.create(loaded.config_loader).parse_overrides(
            [f"{key}={values}" for key, values in of_sweeper.items()]
        )
    swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    for key in swept:
        if re.match(r"\+*(sweep\.|hydra)", key):
            raise RefusedError(f"{key} is a setting of the sweep itself: give it one value.")
    assert isinstance(settings, dict)
    objective = settings.get("objective")
    if never_evaluated and "trainer.eval_every" not in swept and re.match(r"(eval|validation)/", str(objective)):
        raise RefusedError(f"sweep.objective={objective} needs evaluations, and trainer.eval_every=0 makes none.")
    return Swept(
        cfg=cfg,
        loader=loaded.config_loader,
        settings={str(key): value for key, value in settings.items()},
        keys=frozenset({*swept, *map(str, of_sweeper)}),
        intervals=tuple(str(override.input_line) for override in (*parsed, *of_file) if override.is_interval_sweep()),
        overrides=tuple(typed),
        folder=cfg.hydra.sweep.dir if chosen else None,
        config_dir=arguments.config_dir,
        warnings=warnings_of(added, cfg.hydra.runtime.choices, typed),
    )


def _trusted(parsed: Sequence[Override]) -> tuple[str, ...]:
    """Return the prefixes of the last override of run.trust."""
    values = [override.value() for override in parsed if override.get_key_element().lstrip("+") == "run.trust"]
    return tuple(map(str, values[-1])) if values and isinstance(values[-1], list) else ()


def _default_sweep() -> Any:
    """Return the defaults of `hydra.sweep`: ddpexp's directory and Hydra's subdirectory."""
    written = load_yaml((conf_folder() / "config.yaml").read_text())
    return {"subdir": "${hydra.job.num}", **written["hydra"]["sweep"]}


class JobComposer:
    """Composes the jobs of a sweep: reads the files once for each choice of options, and sets values in a copy."""

    def __init__(self, swept: Swept) -> None:
        """Keep the sweep; composes nothing yet."""
        self._swept = swept
        self._bases: dict[tuple[str, ...], Tree] = {}
        self._dirname = partial(_dirname_of_job, OmegaConf.to_container(swept.cfg.hydra.job.config.override_dirname))
        self._parser = OverridesParser.create(swept.loader)

    def _is_value(self, override: str) -> bool:
        """Return whether an override is swept and sets a value: its key has a dot, a group's a slash."""
        key = override.partition("=")[0]
        return key in self._swept.keys and re.match(r"\w+\.", key) is not None

    def compose(self, overrides: Sequence[str], run: Path, number: int = 0) -> Composed:
        """Compose the job with this number from all its overrides; `run` is its directory.

        Raises:
            RefusedError: whatever Hydra or OmegaConf refuses.
        """
        if not is_utf8(str(run)):
            raise RefusedError(
                f"the path {run.parent} of the sweep is not UTF-8, as the configurations of its jobs, which record it, "
                "are: rename its folder, or type another hydra.sweep.dir=... ."
            )
        nodes = typed_targets(overrides)
        values = [override for override in overrides if self._is_value(override) and not is_in(override, nodes)]
        rest = tuple(override for override in overrides if override not in values)
        added = added_folder(self._swept.config_dir)
        with one_sentence(), bounded_interpolations():
            if rest not in self._bases:
                self._bases[rest] = Tree.of(compose_tree(list(rest), added))
            base = self._bases[rest]
            cfg = copy.deepcopy(base.cfg)
            apply_overrides(self._parser.parse_overrides(forced(values, ())), cfg)
            of_job = {
                "job.num": number, "sweep.dir": self._swept.cfg.hydra.sweep.dir, "mode": "MULTIRUN",
                "job.override_dirname": self._dirname(overrides),
            }  # fmt: skip
            return finish(replace(base, cfg=cfg, answers={**base.answers, **of_job}), overrides, added, run)


def _dirname_of_job(conf: Any, overrides: Sequence[str]) -> str:
    return dirname(overrides, conf["kv_sep"], conf["item_sep"], conf["exclude_keys"])
