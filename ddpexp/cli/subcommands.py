"""The commands beside training: `ddpexp evaluate`, `ddpexp resume`, and `ddpexp member` for launchers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddpexp.checkpoint import weights
from ddpexp.config import commands, trusted
from ddpexp.config.build import did_you_mean, nearest
from ddpexp.config.compose import compose
from ddpexp.config.instantiate import Trust
from ddpexp.config.names import named
from ddpexp.config.parse import load, parse
from ddpexp.config.restated import UnrestatedError
from ddpexp.config.schema import Experiment
from ddpexp.config.stored import override_file
from ddpexp.errors import RefusedError
from ddpexp.launch.launchers.base import Launcher, Starter
from ddpexp.run import directory
from ddpexp.run.directory import RunDir
from ddpexp.run.evaluation import Evaluation
from ddpexp.run.resume_arguments import merge_overrides, trust_arguments
from ddpexp.run.stored_config import check_config, check_config_exists
from ddpexp.run.training import Training
from ddpexp.system import files
from ddpexp.system.terminal import print_message
from ddpexp.system.yaml_text import load_yaml

_OPTIONS = ("--config-dir", "-cd")  # each with an argument behind it
_OF_EVALUATE = ("--split", "--json")
_RECORDS = (".yaml", ".json", ".jsonl", ".log", ".txt")  # files of a run directory that hold no weights
_SHOWN_RUNS = 3

_USAGE = f"""{commands.of("evaluate").usage}

Evaluate the newest weights of a run directory, or a safetensors file, on the
run's evaluation data. Weights that lie in no run directory need a recipe:

    ddpexp evaluate weights.safetensors recipe=mnist

--split NAME,NAME evaluates these sets; without it, all but the one named test.
--json prints the metrics for programs, and everything else on standard error."""

_RESUME = f"""{commands.of("resume").usage}

Resume the run in a directory from its newest checkpoint, as its config.yaml
says. Another launcher is typed as launcher=..., its settings as
launcher.key=..., and what is to change in the training itself as
trainer.epochs=4 or optimizer.lr=0.01. A run with code of your own needs
--config-dir DIR or run.trust=[...] again. A sweep's directory resumes it."""


def member(argv: list[str]) -> tuple[Launcher, Training]:
    """Return the job that the launcher of another command has sent this one to.

    A run directory, or a JSON file of a job.

    Raises:
        RefusedError: neither is there, or its launcher does not work that way.
    """
    if len(argv) != 1:
        raise RefusedError(
            "ddpexp member is for launchers: it takes the run directory, or the file, that they have made."
        )
    place = Path(argv[0])
    if place.is_dir():
        run = RunDir(place)
        if run.config.is_file() and run.config.stat().st_uid != os.getuid():
            raise RefusedError(
                f"{place} is another user's: its configuration says whose code runs, so it must be your own."
            )
        try:
            files.check_yaml(run.config)
            files.check_yaml(run.overrides)
            text, overrides = run.config.read_text(), load_yaml(run.overrides.read_text())
            command = run.command() or ["ddpexp", *overrides]
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RefusedError(f"{place} is not a run directory: {error}.") from None
        experiment = load(text)
        job = Training(experiment, text, overrides, command, run)
    else:
        try:
            described = files.read_json(place)
            text, resume_from = described["config"], described["resume_from"]
            arguments = described["overrides"], described["command"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RefusedError(f"{place} describes no job: {error}.") from None
        experiment = load(text)
        home = RunDir(Path(resume_from)) if resume_from is not None else None
        job = Training(experiment, text, *arguments, new_overrides=described["new_overrides"], resume_from=home)
    if not isinstance(experiment.launcher, Starter):
        raise RefusedError(f"{place}: its launcher starts no further commands.")
    return experiment.launcher, job


def resume(argv: list[str], command: Sequence[str]) -> tuple[Launcher, Training] | None:
    """Return how to resume the run that `argv` names, or None when it only asked for help, which is printed.

    Raises:
        RefusedError: no such run, one whose code is not trusted, or arguments that do not fit.
    """
    if not argv:
        raise RefusedError(f"resume what?\n{_RESUME}")
    if {"--help", "-h"} & set(argv):
        print(_RESUME)
        return None
    source, arguments = _source(argv, "resume")
    _check_options(arguments, "resume")
    run = _run_at(source, "resume")
    if "run.resume=never" in arguments:
        raise RefusedError("resume continues a run, and run.resume=never forbids that: leave it out.")
    moved = next((argument for argument in arguments if argument.startswith("run.dir=")), None)
    if moved is not None:
        raise RefusedError(f"{moved}: resume continues in {source} itself.")
    check_config(run, f"resume {source}")
    values, text = _override(run, arguments, command, keeps=("launcher", "logger"))
    typed = [
        argument
        for i, argument in enumerate(arguments)
        if "=" in argument and argument[0] != "-" and (i == 0 or arguments[i - 1] not in _OPTIONS)
    ]
    experiment = parse(values)
    return experiment.launcher, Training(
        experiment, text, merge_overrides(run, typed), command, new_overrides=typed, resume_from=run
    )


def stored_run(
    name: str, argv: list[str], command: Sequence[str], keeps: Collection[str] = ()
) -> tuple[RunDir, Experiment, str]:
    """Return the run that the arguments of the command `name` name, and its experiment with their overrides.

    `keeps` as for `ddpexp.config.stored.override_file`.

    Raises:
        RefusedError: no such run, one whose code is not trusted, or arguments that do not fit.
    """
    source, arguments = _source(argv, name)
    _check_options(arguments, name)
    run = _run_at(source, name)
    check_config(run, f"{name} {source}")
    values, text = _override(run, arguments, command, keeps)
    return run, parse(values), text


def _override(
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


def _run_at(source: str, name: str) -> RunDir:
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


def _check_options(arguments: Sequence[str], name: str) -> None:
    for place, argument in enumerate(arguments):
        known = (
            argument in _OPTIONS or argument.startswith("--config-dir=") or (place and arguments[place - 1] in _OPTIONS)
        )
        if argument.startswith("-") and not known:
            raise RefusedError(
                f"{name} {argument}: it takes a run directory, key=value and --config-dir DIR, and nothing else."
            )


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


def evaluate(argv: list[str], command: Sequence[str]) -> tuple[Launcher, Evaluation] | None:
    """Return how to evaluate the weights that `argv` names, or None when it only asked for help, which is printed.

    `command` is the whole command line.

    Raises:
        RefusedError: no such weights, or a configuration that does not fit.
    """
    if not set(argv) - {"--json"}:
        raise RefusedError(f"evaluate what?\n{_USAGE}")
    if {"--help", "-h"} & set(argv):
        print(_USAGE)
        return None
    _check_spelling(argv)
    split, argv = _split_option(argv)
    found = weights_of([argument for argument in argv if argument != "--json"], "evaluate", command)
    experiment = found.experiment
    answers = "--json" in argv
    return experiment.launcher, Evaluation(experiment, found.text, found.weights, split, answers, found.home)


def option_values(argv: Sequence[str], command: str, examples: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of a command's own options, each with an example in `examples`, and the other arguments.

    Raises:
        RefusedError: an unknown option, or one without a value or given twice.
    """
    options: dict[str, str] = {}
    others: list[str] = []
    remaining = iter(argv)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name in examples:
            value = value if equals else next(remaining, "")
            if not value or value.startswith("-") or name in options:
                raise RefusedError(f"{command} {name}: it takes one value, once, such as {examples[name]}.")
            options[name] = value
        elif argument.startswith("--") and name not in _OPTIONS:
            raise RefusedError(f"{command} {name}: no such option.{did_you_mean(name, (*examples, *_OPTIONS))}")
        else:
            others.append(argument)
    return options, others


@dataclass(frozen=True)
class Weights:
    """Weights that a command names, and their configuration."""

    weights: Path
    home: Path | None  # the run directory that they lie in
    experiment: Experiment
    text: str  # of the configuration


def weights_of(argv: list[str], name: str, command: Sequence[str]) -> Weights:
    """Return the weights that the arguments of the command `name` name, with the configuration that the others make.

    Raises:
        RefusedError: no such weights, or a configuration that does not fit.
    """
    named, arguments = _source(argv, name)
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


def _check_spelling(argv: Sequence[str]) -> None:
    """Refuse a misspelt option of `ddpexp evaluate` itself; the others are those of any command."""
    for option in (argument.partition("=")[0] for argument in argv if argument.startswith("--")):
        meant = nearest(option, _OF_EVALUATE, 0.8)
        if meant not in (None, option):
            raise RefusedError(f"evaluate {option}: no such option. Did you mean {meant}?")


def _split_option(argv: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the evaluation sets that `--split` names, none if it is not there, and the other arguments.

    Raises:
        RefusedError: it names none, or is there twice.
    """
    places = [place for place, argument in enumerate(argv) if argument.partition("=")[0] == "--split"]
    if not places:
        return (), argv
    place = places[0]
    _, equals, value = argv[place].partition("=")
    if not equals:
        value = argv[place + 1] if place + 1 < len(argv) else ""
    names = tuple(value.split(","))
    if len(places) > 1 or not all(names) or value.startswith("-"):
        raise RefusedError(
            "--split takes the names of evaluation sets once, such as --split test or --split eval,test."
        )
    return names, argv[:place] + argv[place + (1 if equals else 2) :]


def _source(argv: list[str], name: str) -> tuple[str, list[str]]:
    """Return the argument that names what the command `name` is about, and the other ones.

    Options may stand before it, as in `--config-dir DIR SOURCE`.

    Raises:
        RefusedError: there is none, or a second one.
    """
    bare = [i for i, argument in enumerate(argv) if argument[:1] != "-" and (i == 0 or argv[i - 1] not in _OPTIONS)]
    place = bare[0] if bare else 0
    key, _, value = argv[place].partition("=")
    if key == "run.dir" and value and not os.path.exists(argv[place]):
        raise RefusedError(f"{name} {argv[place]}: the run is named without a key. Did you mean {name} {value}?")
    second = next((argv[i] for i in bare[1:] if "=" not in argv[i] and os.path.exists(argv[i])), None)
    if second is not None and os.path.exists(argv[place]):
        raise RefusedError(f"{name} {argv[place]} {second}: it takes one directory or file: type a command for each.")
    return argv[place], argv[:place] + argv[place + 1 :]


def runs_below(folder: Path) -> str:
    """Return a sentence that names a few runs in a folder, the newest first; empty where there is none."""
    runs = [path.parent for path in folder.glob("*/manifest.json")] + [
        path.parent for path in folder.glob("*/*/manifest.json")
    ]
    runs = sorted(filter(weights.is_run, runs), key=lambda run: (run / "manifest.json").stat().st_mtime, reverse=True)
    more = f" and {len(runs) - _SHOWN_RUNS} more" if len(runs) > _SHOWN_RUNS else ""
    return f" Runs in it: {', '.join(map(files.typed, runs[:_SHOWN_RUNS]))}{more}." if runs else ""


def _of_run(home: Path, arguments: list[str], command: Sequence[str]) -> tuple[str, Experiment]:
    values, text = _override(RunDir(home), arguments, command)
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
