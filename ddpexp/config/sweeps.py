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
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ddpexp.config.command_line import (
    SWEEPS,
    check_override_of_sweep,
    check_overrides,
    check_single_values,
    check_typed_once,
    choices,
    is_question,
    parse_arguments,
)
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
from ddpexp.config.quick_yaml import quick_yaml
from ddpexp.config.sentences import one_sentence
from ddpexp.config.typed_targets import is_in, typed_targets
from ddpexp.config.user_files import check_user_files
from ddpexp.config.values import Composed, Tree, finish, warnings_of
from ddpexp.config.versions import VERSION_BASE
from ddpexp.errors import RefusedError
from ddpexp.system.yaml_text import load_yaml


@dataclass(frozen=True)
class Swept:
    """A sweep as requested, before its jobs are known."""

    cfg: DictConfig  # composed without the swept overrides, with Hydra's own section
    loader: ConfigLoader  # in which Hydra's sweepers look up groups
    settings: Mapping[str, Any]  # the section `sweep`
    keys: frozenset[str]  # that are swept
    intervals: tuple[str, ...]  # overrides with a range of values to choose from
    words: tuple[str, ...]  # the overrides, as typed
    folder: str | None  # hydra.sweep.dir, where it was typed or a config file sets it
    config_dir: str | None
    warnings: tuple[str, ...]

    @property
    def sweeper(self) -> str:
        """Return the override that chooses the sweeper."""
        return f"hydra/sweeper={self.cfg.hydra.runtime.choices['hydra/sweeper']}"


def compose_sweep(argv: list[str]) -> Swept:
    """Compose what a sweep's jobs have in common.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses, and Hydra's settings that would have no effect.
    """
    arguments = parse_arguments(argv)
    is_question(arguments)
    overrides = [word for word in arguments.overrides if not SWEEPS.match(word)]
    for word in overrides:
        check_override_of_sweep(word)
    check_overrides(overrides, False, in_sweep=True)
    check_single_values(overrides)
    check_typed_once(overrides)
    added = added_folder(arguments.config_dir)
    for choice in choices(overrides):
        check_user_files(choice, added)
    with (
        one_sentence(), bounded_interpolations(), quick_yaml(),
        hydra.initialize_config_dir(str(conf_folder()), job_name="ddpexp", **VERSION_BASE),
    ):  # fmt: skip
        found = GlobalHydra.instance().hydra
        assert found is not None
        parsed = OverridesParser.create(found.config_loader).parse_overrides(overrides)
        cfg = compose_for_sweep(found, overrides, added)
        check_settings_of_hydra(cfg, overrides, added)
        trusted = next(
            (one.value() for one in reversed(parsed) if one.get_key_element().lstrip("+") == "run.trust"), None
        )
        prefixes = tuple(map(str, trusted)) if isinstance(trusted, list) else ()
        check_code_of_sweeper(cfg.hydra.sweeper, Trust(prefixes, added.parent if added else None))
        of_sweeper = cfg.hydra.sweeper.get("params") or {}
        chosen = OmegaConf.to_container(cfg.hydra.sweep, resolve=False) != _default_sweep()
        with answered(answers_of(cfg)):
            settings = OmegaConf.to_container(cfg.sweep, resolve=True)
            never_evaluated = OmegaConf.select(cfg, "trainer.eval_every") == 0
            cfg.hydra.sweep.dir = str(cfg.hydra.sweep.dir)  # resolved here, where an error becomes one sentence
        of_file = OverridesParser.create(found.config_loader).parse_overrides(
            [f"{key}={one}" for key, one in of_sweeper.items()]
        )
    swept = {one.get_key_element() for one in parsed if one.is_sweep_override()}
    for key in swept:
        if re.match(r"\+*(sweep\.|hydra)", key):
            raise RefusedError(f"{key} is a setting of the sweep itself: give it one value.")
    assert isinstance(settings, dict)
    objective = settings.get("objective")
    if never_evaluated and "trainer.eval_every" not in swept and re.match(r"(eval|validation)/", str(objective)):
        raise RefusedError(f"sweep.objective={objective} needs evaluations, and trainer.eval_every=0 makes none.")
    return Swept(
        cfg=cfg,
        loader=found.config_loader,
        settings={str(key): value for key, value in settings.items()},
        keys=frozenset({*swept, *map(str, of_sweeper)}),
        intervals=tuple(str(one.input_line) for one in (*parsed, *of_file) if one.is_interval_sweep()),
        words=tuple(overrides),
        folder=cfg.hydra.sweep.dir if chosen else None,
        config_dir=arguments.config_dir,
        warnings=warnings_of(added, cfg.hydra.runtime.choices, overrides),
    )


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

    def _is_value(self, word: str) -> bool:
        """Return whether an override is swept and sets a value: its key has a dot, a group's a slash."""
        key = word.partition("=")[0]
        return key in self._swept.keys and re.match(r"\w+\.", key) is not None

    def compose(self, words: Sequence[str], run: Path, number: int = 0) -> Composed:
        """Compose the job with this number from all its overrides; `run` is its directory.

        Raises:
            RefusedError: whatever Hydra or OmegaConf refuses.
        """
        nodes = typed_targets(words)
        values = [word for word in words if self._is_value(word) and not is_in(word, nodes)]
        rest = tuple(word for word in words if word not in values)
        added = added_folder(self._swept.config_dir)
        with one_sentence(), bounded_interpolations():
            if rest not in self._bases:
                self._bases[rest] = Tree.of(compose_tree(list(rest), added))
            base = self._bases[rest]
            cfg = copy.deepcopy(base.cfg)
            ConfigLoaderImpl._apply_overrides_to_config(self._parser.parse_overrides(values), cfg)
            of_job = {
                "job.num": number, "sweep.dir": self._swept.cfg.hydra.sweep.dir, "mode": "MULTIRUN",
                "job.override_dirname": self._dirname(words),
            }  # fmt: skip
            return finish(replace(base, cfg=cfg, answers={**base.answers, **of_job}), words, added, run)


def _dirname_of_job(conf: Any, words: Sequence[str]) -> str:
    return dirname(words, conf["kv_sep"], conf["item_sep"], conf["exclude_keys"])
