"""Compose a sweep: what its jobs have in common, then each job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpexp.config.all_mistakes import with_all_mistakes
from ddpexp.config.arguments import Arguments
from ddpexp.config.folders import conf_folder, config_dir_of
from ddpexp.config.hydra_section import check_code_of_sweeper
from ddpexp.config.instantiate import Trust
from ddpexp.config.interpolations import override_dirname
from ddpexp.config.override_checks import (
    check_override_of_sweep,
    check_overrides,
    check_single_values,
    check_typed_once,
)
from ddpexp.config.replaced_targets import is_in, typed_targets, with_plus_plus
from ddpexp.config.resolve import ResolvedConfig, resolve, resolved_at
from ddpexp.config.tree import SweepTree, Tree, compose_sweep_tree, compose_tree, sweeper_targets, with_values
from ddpexp.config.value_checks import warnings_of
from ddpexp.errors import RefusedError
from ddpexp.system.text import is_utf8
from ddpexp.system.yaml_text import load_yaml


@dataclass(frozen=True)
class Swept:
    """A sweep as requested, before its jobs are known."""

    composed: SweepTree
    settings: Mapping[str, Any]  # the section `sweep`, resolved
    directory: str  # hydra.sweep.dir, resolved
    is_named: bool  # whether that was typed, or a config file sets it
    config_dir: str | None
    warnings: tuple[str, ...]
    is_stored: bool = False  # the overrides are those of the sweep's own files

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides as typed."""
        return self.composed.tree.overrides

    @property
    def keys(self) -> frozenset[str]:
        """The keys that are swept."""
        return self.composed.keys

    @property
    def sweeper(self) -> Mapping[str, Any]:
        """The section `hydra.sweeper`."""
        section: Mapping[str, Any] = self.composed.tree.hydra["sweeper"]
        return section

    @property
    def sweeper_choice(self) -> str:
        """The override that chooses the sweeper."""
        return f"hydra/sweeper={self.composed.tree.choices['hydra/sweeper']}"


def compose_sweep(arguments: Arguments) -> Swept:
    """Compose what a sweep's jobs have in common.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses, and Hydra's settings that would have no effect.
    """
    return with_all_mistakes(_compose_sweep, arguments)


def _compose_sweep(arguments: Arguments) -> Swept:
    typed = arguments.overrides_without_mode
    for text in typed:
        check_override_of_sweep(text)
    check_overrides(typed, in_sweep=True)
    check_single_values(typed)
    check_typed_once(typed)
    config_dir = config_dir_of(arguments.config_dir)
    composed = compose_sweep_tree(typed, config_dir)
    for key in composed.swept:
        if re.match(r"\+*(sweep\.|hydra)", key):
            raise RefusedError("is a setting of the sweep itself", key=key, suggestion="Give it one value.")
    tree = composed.tree
    keys = ("hydra.sweeper", "sweep", "hydra.sweep.dir", "trainer.eval_every")
    sweeper, settings, directory, eval_every = resolved_at(tree, *keys)
    check_code_of_sweeper(sweeper, sweeper_targets(), Trust(composed.trust, config_dir.parent if config_dir else None))
    objective = settings.get("objective")
    needs_evaluations = re.match(r"(eval|validation)/", str(objective)) is not None
    if needs_evaluations and eval_every == 0 and "trainer.eval_every" not in composed.swept:
        raise RefusedError(
            "needs evaluations, and trainer.eval_every=0 makes none", key="sweep.objective", value=objective
        )
    return Swept(
        composed=composed,
        settings=settings,
        directory=str(directory),
        is_named=tree.hydra["sweep"] != _default_sweep(),
        config_dir=arguments.config_dir,
        warnings=warnings_of(tree),
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

    def _is_value(self, override: str) -> bool:
        """Return whether an override is swept and sets a value: its key has a dot, a group's a slash."""
        key = override.partition("=")[0]
        return key in self._swept.keys and re.match(r"\w+\.", key) is not None

    def compose(self, overrides: Sequence[str], run: Path, number: int = 0) -> ResolvedConfig:
        """Compose the job with this number from all its overrides; `run` is its directory.

        Raises:
            RefusedError: whatever Hydra or OmegaConf refuses.
        """
        if not is_utf8(str(run)):
            raise RefusedError(
                "is not UTF-8, as the configurations of the sweep's jobs, which record it, are",
                suggestion="Rename the folder, or type another hydra.sweep.dir=... .",
                place=f"the path {run.parent}",
            )
        nodes = typed_targets(overrides)
        values = [override for override in overrides if self._is_value(override) and not is_in(override, nodes)]
        rest = tuple(override for override in overrides if override not in values)
        if rest not in self._bases:
            self._bases[rest] = compose_tree(rest, config_dir_of(self._swept.config_dir))
        tree = replace(with_values(self._bases[rest], with_plus_plus(values, ())), overrides=tuple(overrides))
        of_hydra = {
            "job.num": number, "sweep.dir": self._swept.directory, "mode": "MULTIRUN",
            "job.override_dirname": override_dirname(self._swept.composed.tree.hydra, overrides),
        }  # fmt: skip
        return resolve(tree, run, of_hydra)
