"""A stored run with overrides, found, checked and parsed: for the verbs and for the functions of Python."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ddpexp.checkpoint import weights
from ddpexp.config import trusted
from ddpexp.config.compose import compose
from ddpexp.config.instantiate import Trust
from ddpexp.config.names import named
from ddpexp.config.parse import parse
from ddpexp.config.plugins import hidden
from ddpexp.config.recomposed import Recomposed, StoredExperiment, recompose
from ddpexp.config.restated import UnrestatedError
from ddpexp.config.schema import Experiment
from ddpexp.config.stored import override_file
from ddpexp.errors import RefusedError
from ddpexp.run import directory, links
from ddpexp.run.directory import RunDir
from ddpexp.run.resume_arguments import config_folder, trust_arguments
from ddpexp.run.stored_config import check_config, check_config_exists, read_stored, recorded_facts
from ddpexp.system import files
from ddpexp.system.secrets import with_references
from ddpexp.system.terminal import print_message

_RECORDS = (".yaml", ".json", ".jsonl", ".log", ".txt")  # files of a run directory that hold no weights
_SHOWN_RUNS = 3


@dataclass(frozen=True)
class StoredRun:
    """An experiment as it is stored, with overrides; its code is trusted."""

    experiment: Experiment
    text: str  # of the configuration
    home: RunDir | None  # the run directory; None: the weights lie in none, and the overrides are the whole experiment
    manifest: Mapping[str, Any] = field(default_factory=dict)  # of the run


@dataclass(frozen=True)
class StoredWeights:
    """A checkpoint or a file of weights, with the experiment that they are of."""

    path: Path
    run: StoredRun
    note: str | None = None  # that they are the best of their run

    def announce(self) -> None:
        """Print the note on standard error. Called by one command of a job."""
        if self.note is not None:
            print_message(f"ddpexp: {self.note}")


class Restate(Protocol):
    """Says how the code and the settings of a run are restated."""

    def __call__(self, run: RunDir, error: UnrestatedError | None = None) -> str | None:
        """Return what restates the run's code, or the settings of an error; None if only overrides can."""


def find_run(source: str, name: str) -> RunDir:
    """Return the run directory that the verb `name` is given.

    Raises:
        RefusedError: it is none.
    """
    run = RunDir(Path(source))
    if not run.path.exists():
        meant = weights.meant(run.path)
        advice = f"Did you mean ddpexp {name} {files.typed(meant[0])}?" if meant is not None else ""
        raise RefusedError("There is no such directory", place=f"{name} {source}", suggestion=advice)
    check_config_exists(run, f"{name} {source}")
    if not run.config.is_file() or not directory.is_ours(run.path):
        home = next((folder for folder in run.path.resolve().parents if weights.is_run(folder)), None)
        advice = f"Did you mean {files.typed(home)}?" if home is not None else runs_below(run.path)
        raise RefusedError("is not a run directory", place=f"{name} {source}", suggestion=advice)
    links.check_no_links(run, f"{name} {source}")
    return run


def read_run(
    run: RunDir,
    overrides: Sequence[str],
    description: str,
    restate: Restate,
    keeps: Collection[str] = (),
    is_own: bool = True,
) -> StoredRun:
    """Read a run directory with overrides.

    `description` names the run in messages; `keeps` as for `ddpexp.config.stored.override_file`. With `is_own`, the
    directory of another user is refused if it names code, even if that is trusted.

    Raises:
        RefusedError: it cannot be read, an override does not fit, or code or settings must be restated.
    """
    check_config(run, description)
    try:
        values, text = override_file(run.config, list(overrides), keeps)
    except UnrestatedError as error:
        again = restate(run, error)
        if again is None:
            raise
        raise RefusedError(error.reason, suggestion=error.advice(again), place=error.place) from None
    _check_code(run, values, restate, is_own)
    return StoredRun(parse(values), text, run, run.read_if_present(run.manifest) or {})


def read_to_rerun(
    run: RunDir, arguments: Sequence[str], description: str, restate: Restate, is_exact: bool
) -> tuple[Experiment, Recomposed]:
    """Read a run directory with the arguments of a command that trains its experiment again, in a directory of its own.

    Raises:
        RefusedError: as `read_run`, or the run was stopped before it had a configuration.
    """
    check_config(run, description)
    manifest = run.read_if_present(run.manifest)
    stored = read_stored(run, manifest)
    if stored is None:
        raise RefusedError("was stopped before it had a configuration", place=description)
    accepted = StoredExperiment(
        run.config, with_references(stored.tree), run.read_overrides(), recorded_facts(manifest), is_exact
    )
    try:
        recomposed = recompose(accepted, arguments)
    except UnrestatedError as error:
        raise RefusedError(
            error.reason, suggestion=error.advice(restate(run, error) or ""), place=error.place
        ) from None
    _check_code(run, recomposed.values, restate, is_own=True)
    edits = (
        f"config.yaml was edited since its last start, which does not count here: {', '.join(map(str, stored.edits))}"
    )
    notes = [*recomposed.notes, *([edits] if stored.edits else [])]
    return parse(recomposed.values), replace(recomposed, notes=notes)


def find_weights(
    source: str, overrides: Sequence[str], name: str, restate: Restate, checkpoint: str = "auto"
) -> StoredWeights:
    """Return the weights that the verb `name` is given, with the experiment of their run, or of the overrides.

    `checkpoint` is the word behind --checkpoint.

    Raises:
        RefusedError: no such weights, or as `read_run`.
    """
    path, description = Path(source), f"{name} {source}"
    home = _home_of(path, description, f"Name the weights first, as in {name} RUN_DIR {source}.")
    if home is not None:
        run = read_run(RunDir(home), overrides, description, restate, is_own=False)
    else:
        run = _of_overrides(overrides, description)
    typed = f"--checkpoint {checkpoint}"
    request = weights.Request(weights.parse_which(checkpoint, typed), typed)
    notes: list[str] = []
    found = weights.find(
        path, description, lambda text: print_message(f"ddpexp: warning: {text}"), request, notes.append
    )
    return StoredWeights(found, run, next(iter(notes), None))


def _home_of(path: Path, description: str, advice: str) -> Path | None:
    """Return the run directory in which a path lies, if it is in one.

    Raises:
        RefusedError: there is nothing, or something without weights.
    """
    if not path.exists():
        suggestion = advice if "=" in str(path) else ""
        if (meant := weights.meant(path)) is not None:
            name = description.partition(" ")[0]
            suggestion = f"Did you mean ddpexp {name} {files.typed(meant[0])} --checkpoint {meant[1]}?"
        raise RefusedError("There is no such directory or file", place=description, suggestion=suggestion)
    if path.suffix == ".py":
        raise RefusedError(
            "is a file of code",
            place=description,
            suggestion="Name a run directory, a checkpoint or a file of weights (.safetensors).",
        )
    home = next((folder for folder in (path, *path.resolve().parents) if weights.is_run(folder)), None)
    if home is None and path.is_dir() and (below := runs_below(path)):
        raise RefusedError("is not a run directory", place=description, suggestion=below)
    if home is None and path.is_dir() and not any(path.glob("*.safetensors")):
        reason = "is not a run directory, and holds no weights"
        raise RefusedError(reason, place=description, suggestion="Name a run directory.")
    if home is not None and path.is_file() and path.suffix in _RECORDS:
        raise RefusedError("holds no weights", place=description, suggestion=f"Did you mean {files.typed(home)}?")
    return home


def _of_overrides(overrides: Sequence[str], description: str) -> StoredRun:
    if not overrides:
        raise RefusedError(
            "is not in a run directory", place=description, suggestion="Name its recipe, for example recipe=mnist."
        )
    composed = compose(list(overrides))
    return StoredRun(parse(composed.values), composed.text, None)


def _check_code(run: RunDir, values: Mapping[str, Any], restate: Restate, is_own: bool) -> None:
    """Refuse code outside ddpexp that is not trusted, or that another user's directory would have run.

    Raises:
        RefusedError: with what restates it.
    """
    foreign = {
        key: target
        for key, target in named(values).items()
        if isinstance(target, str) and not Trust().allows(target, key.removesuffix("._target_"))
    }
    if not foreign:
        return
    if {run.path.stat().st_uid, run.config.stat().st_uid} != {os.getuid()}:
        if not is_own:
            return  # its code is refused as that of any configuration is
        key, target = next(iter(foreign.items()))
        raise RefusedError(
            f"{run.path} is another user's, and it names code outside ddpexp ({key}={target}): it must be your own."
        )
    section = values["run"]
    trust = Trust(tuple(section["trust"] or ()), Path(section["code"]) if section["code"] else None)
    for key, target in foreign.items():
        if trust.allows(target, key.removesuffix("._target_")):
            continue
        recorded = trust_arguments(run)
        if recorded and (advice := hidden(target)):
            raise RefusedError(f"{run.path} names code that is not there ({key}={target})", suggestion=advice)
        if (
            trust.code is not None
            and recorded == config_folder(run)
            and Path(recorded[-1]).resolve().parent == trust.code
        ):
            reason = f"There is no module {target.partition('.')[0]} in {trust.code} any more"
            raise RefusedError(reason, key=key, value=target, suggestion="Put it back.")
        if recorded:
            raise RefusedError(
                f"{run.path} names code of its own ({key}={target}), which runs only when it is restated. If it is "
                f"yours: {restate(run)}{trusted.advice(target)}"
            )


def runs_below(folder: Path) -> str:
    """Return a sentence that names a few runs in a folder, the newest first; empty where there is none."""
    runs = [path.parent for path in folder.glob("*/manifest.json")] + [
        path.parent for path in folder.glob("*/*/manifest.json")
    ]
    runs = sorted(filter(weights.is_run, runs), key=lambda run: (run / "manifest.json").stat().st_mtime, reverse=True)
    more = f" and {len(runs) - _SHOWN_RUNS} more" if len(runs) > _SHOWN_RUNS else ""
    return f"Runs in it: {', '.join(map(files.typed, runs[:_SHOWN_RUNS]))}{more}." if runs else ""
