"""The run directory or the weights that a verb names, with overrides."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpexp.checkpoint import weights
from ddpexp.cli.verb import Call
from ddpexp.config import trusted
from ddpexp.config.compose import compose
from ddpexp.config.instantiate import Trust
from ddpexp.config.names import named
from ddpexp.config.parse import parse
from ddpexp.config.restated import UnrestatedError
from ddpexp.config.schema import Experiment
from ddpexp.config.stored import override_file
from ddpexp.errors import RefusedError
from ddpexp.run import directory
from ddpexp.run.directory import RunDir
from ddpexp.run.resume_arguments import trust_arguments
from ddpexp.run.stored_config import check_config, check_config_exists
from ddpexp.system import files
from ddpexp.system.terminal import print_message

_RECORDS = (".yaml", ".json", ".jsonl", ".log", ".txt")  # files of a run directory that hold no weights
_SHOWN_RUNS = 3


def stored_run(call: Call, keeps: Collection[str] = ()) -> tuple[RunDir, Experiment, str]:
    """Return the run that a verb names, and its experiment with overrides.

    `keeps` as for `ddpexp.config.stored.override_file`.

    Raises:
        RefusedError: no such run, one whose code is not trusted, or arguments that do not fit.
    """
    source, arguments = call.source()
    run = run_at(source, call.name)
    check_config(run, f"{call.name} {source}")
    values, text = override(run, arguments, call.command, keeps)
    return run, parse(values), text


def override(
    run: RunDir, arguments: list[str], command: Sequence[str], keeps: Collection[str] = ()
) -> tuple[Mapping[str, Any], str]:
    """Return the configuration of a run with overrides, and its text.

    Raises:
        RefusedError: it does not fit, or has code or settings that must be restated, with what to type.
    """
    try:
        values, text = override_file(run.config, arguments, keeps)
    except UnrestatedError as error:
        again = [*command[1:], *(word for word in trust_arguments(run) if word not in command), *error.overrides]
        advice = error.advice(f"python -m ddpexp {shlex.join(again)}")
        raise RefusedError(error.reason, suggestion=advice, place=error.place) from None
    _check_code_is_typed(run, values, command)
    return values, text


def run_at(source: str, name: str) -> RunDir:
    """Return the run directory that the command `name` is given.

    Raises:
        RefusedError: it is none.
    """
    run = RunDir(Path(source))
    if not run.path.exists():
        raise RefusedError(f"{name} {source}: there is no such directory.")
    check_config_exists(run, f"{name} {source}")
    if not run.config.is_file() or not directory.is_ours(run.path):
        home = next((folder for folder in run.path.resolve().parents if weights.is_run(folder)), None)
        advice = f" Did you mean {files.typed(home)}?" if home is not None else runs_below(run.path)
        raise RefusedError(f"{name} {source}: it is no run directory.{advice}")
    directory.check_no_links(run, f"{name} {source}")
    return run


def foreign_code(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys and names of code outside ddpexp in a configuration."""
    return {
        key: target for key, target in named(values).items()
        if isinstance(target, str) and not Trust().allows(target, key.removesuffix("._target_"))
    }  # fmt: skip


def untrusted_code(values: Mapping[str, Any], foreign: Mapping[str, str]) -> dict[str, str]:
    """Return what of the `foreign` code run.trust and --config-dir do not cover."""
    run = values["run"]
    trust = Trust(tuple(run["trust"] or ()), Path(run["code"]) if run["code"] else None)
    return {key: target for key, target in foreign.items() if not trust.allows(target, key.removesuffix("._target_"))}


def _check_code_is_typed(run: RunDir, values: Mapping[str, Any], command: Sequence[str]) -> None:
    """Refuse code outside ddpexp that this command does not trust, or that another user's directory would have run.

    Raises:
        RefusedError: with what to type.
    """
    foreign = foreign_code(values)
    if not foreign:
        return
    if {run.path.stat().st_uid, run.config.stat().st_uid} != {os.getuid()}:
        if command[1:2] in (["evaluate"], ["predict"], ["export"]):
            return  # its code is refused as that of any configuration is
        key, target = next(iter(foreign.items()))
        raise RefusedError(
            f"{run.path} is another user's, and it names code outside ddpexp ({key}={target}): it must be your own."
        )
    for key, target in untrusted_code(values, foreign).items():
        recorded = trust_arguments(run)
        if recorded:
            arguments = " ".join(
                shlex.quote(argument)
                for argument in [*command[1:], *(argument for argument in recorded if argument not in command)]
            )
            raise RefusedError(
                f"{run.path} names code of its own ({key}={target}), which runs only when it is restated. If it is "
                f"yours: python -m ddpexp {arguments}{trusted.advice(target)}"
            )


@dataclass(frozen=True)
class Weights:
    """Weights that a command names, and their configuration."""

    weights: Path
    home: Path | None  # the run directory that they lie in
    experiment: Experiment
    text: str  # of the configuration


def weights_of(call: Call) -> Weights:
    """Return the weights that a verb names, with the configuration that the overrides make.

    Raises:
        RefusedError: no such weights, or a configuration that does not fit.
    """
    (named, arguments), name, command = call.source(), call.name, call.command
    source = Path(named)
    if not source.exists():
        first = "" if "=" not in named else f" Name the weights first, as in {name} RUN_DIR {named}."
        raise RefusedError(f"{name} {source}: there is no such directory or file.{first}")
    if source.suffix == ".py":
        raise RefusedError(
            f"{name} {source}: this is code. Name a run directory, a checkpoint or a file of weights (.safetensors)."
        )
    home = next((folder for folder in (source, *source.resolve().parents) if weights.is_run(folder)), None)
    if home is None and source.is_dir() and (below := runs_below(source)):
        raise RefusedError(f"{name} {source}: it is no run directory.{below}")
    if home is None and source.is_dir() and not any(source.glob("*.safetensors")):
        raise RefusedError(f"{name} {source}: it is no run directory, and holds no weights. Name a run directory.")
    if home is not None and source.is_file() and source.suffix in _RECORDS:
        raise RefusedError(f"{name} {source}: this file holds no weights. Did you mean {files.typed(home)}?")
    if home is not None:
        text, experiment = _of_run(home, arguments, command)
    else:
        text, experiment = _of_arguments(source, arguments, name)
    found = weights.find(source, f"{name} {source}", lambda text: print_message(f"ddpexp: warning: {text}"))
    return Weights(found, home, experiment, text)


def runs_below(folder: Path) -> str:
    """Return a sentence that names a few runs in a folder, the newest first; empty where there is none."""
    runs = [path.parent for path in folder.glob("*/manifest.json")] + [
        path.parent for path in folder.glob("*/*/manifest.json")
    ]
    runs = sorted(filter(weights.is_run, runs), key=lambda run: (run / "manifest.json").stat().st_mtime, reverse=True)
    more = f" and {len(runs) - _SHOWN_RUNS} more" if len(runs) > _SHOWN_RUNS else ""
    return f" Runs in it: {', '.join(map(files.typed, runs[:_SHOWN_RUNS]))}{more}." if runs else ""


def _of_run(home: Path, arguments: list[str], command: Sequence[str]) -> tuple[str, Experiment]:
    values, text = override(RunDir(home), arguments, command)
    return text, parse(values)


def _of_arguments(source: Path, arguments: list[str], name: str) -> tuple[str, Experiment]:
    if not arguments:
        raise RefusedError(
            f"{name} {source}: it lies in no run directory, so name its recipe, for example recipe=mnist."
        )
    composed = compose(arguments)
    if composed is None:
        raise RefusedError(f"{name} {source}: {' '.join(arguments)} is no configuration.")
    return composed.text, parse(composed.values)
