"""Errors of Hydra, OmegaConf and PyYAML as RefusedError, with what to type or write."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ddpexp.compat.omegaconf import tree_of
from ddpexp.config.build import did_you_mean, nearest, unknown_key
from ddpexp.config.declared import takes_fraction, takes_list, takes_number
from ddpexp.config.folders import LISTED, conf_folder, options, our_options
from ddpexp.config.foreign import advice_on_key, advice_on_value, value_here
from ddpexp.config.hydra_section import no_effect
from ddpexp.config.plugins import hidden, plugin_folders, uninstalled
from ddpexp.errors import RefusedError, SweptError, subject

FULL_ERROR = "HYDRA_FULL_ERROR"  # the variable with which Hydra shows whole errors
_RESOLVERS = (
    "facts",
    "oc.env",
    "oc.select",
    "oc.decode",
    "oc.create",
    "oc.dict.keys",
    "oc.dict.values",
    "hydra",
    "now",
)
_YAML = {  # PyYAML's messages, each with what it mostly means
    "found unexpected end of stream": " (a quote is not closed)",
    "found character '\\t'": " (a tab: indent with spaces)",
    "mapping values are not allowed here": " (a line is indented too far, or a value with a colon has no quotes)",
    "expected the node content, but found '?'": ' (inside braces a required value has quotes: "???")',
    "could not find expected ':'": " (a key without a colon)",
}


@contextmanager
def one_sentence() -> Iterator[None]:
    """Convert the errors of OmegaConf and PyYAML to RefusedError."""
    try:
        yield
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        if os.environ.get(FULL_ERROR):
            raise
        raise refusal(error) from None


def refusal(error: Exception) -> RefusedError:
    """Convert an error of OmegaConf or PyYAML."""
    if isinstance(error, MissingMandatoryValue):
        return RefusedError(
            "is missing", key=str(error.full_key), suggestion=f"Give it a value, for example as {error.full_key}=... ."
        )
    unset = re.search(r"Environment variable '(\w+)' not found", str(error))
    if unset and isinstance(error, OmegaConfBaseException):
        return RefusedError(
            f"is read from the environment, and {unset[1]} is not set there",
            key=str(error.full_key),
            suggestion=f"Export {unset[1]}=... first.",
        )
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return RefusedError(
            f"is invalid: {first_line(error)}", key=str(error.full_key), suggestion=_interpolated(error)
        )
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        advice = next((advice for start, advice in _YAML.items() if str(error.problem).startswith(start)), "")
        place = f"{error.problem_mark.name}, line {error.problem_mark.line + 1}"
        return RefusedError(f"is not valid YAML: {error.problem}{advice}", place=place)
    if isinstance(error, UnicodeDecodeError):
        return RefusedError(f"A config file is not UTF-8 text: {error}.")
    return RefusedError(first_line(error))


def _interpolated(error: OmegaConfBaseException) -> str:
    """Return what an interpolation that does not resolve may stand for."""
    key = re.match(r"Interpolation key '([^']+)' not found", str(error))
    if key is not None and key[1].isupper():
        return f"A variable of the environment is written ${{oc.env:{key[1]}}}."
    if key is not None:
        near = nearest(key[1], _keys(tree_of(error)))
        return f"Did you mean ${{{near}}}?" if near else ""
    kind = re.match(r"Unsupported interpolation type (\S+)", str(error))
    if kind is not None:
        return did_you_mean(kind[1], _RESOLVERS, "${", ":...}")
    return ""


def unknown_option(file: str, known: Sequence[str] | None, message: str) -> RefusedError:
    """Return the error for an option that is not there: Hydra's `message` names the folders that it searched."""
    searched = [Path(folder) for folder in re.findall(r"path=file://(.+)", message)]
    # Of an option in a list, such as logger=[a,b], Hydra gives none.
    known = [name for name in known or options(file.rpartition("/")[0], searched) if name]
    added = any(folder not in (conf_folder(), *plugin_folders()) for folder in searched)
    group, _, option = file.rpartition("/")
    if not group:
        return RefusedError(f"There is no config {option}.")
    ours = our_options()
    head, _, inner = group.partition("/")
    if head == "recipe" and inner in ours:
        return RefusedError(
            "in a recipe's defaults is looked for in the folder recipe",
            key=inner,
            value=option,
            suggestion=f"Write - override /{inner}: {option}.",
        )
    if head in ours and inner:  # a path
        name = option.removesuffix(".yaml")
        others = (
            f"--config-dir {inner.removesuffix(f'/{head}')} "
            if Path(inner).is_dir() and head not in options(head, [])
            else ""
        )
        return RefusedError(
            "is a path, and options are named",
            key=head,
            value=f"{inner}/{option}",
            suggestion=f"Type {'' if name in known else others}{head}={name}.",
        )
    if group.startswith("hydra/") and group.partition("/")[2].partition("/")[0] != "sweeper":
        return no_effect(f"{group}={option}", group)
    known = known or options(group, [conf_folder(), *plugin_folders()])
    elsewhere = option.lower().replace("-", "_")
    if (here := value_here(group, elsewhere)) is not None:
        return RefusedError(
            "is not a known option", key=group, value=option, suggestion=f"Did you mean {group}={here}?"
        )
    if advice := advice_on_value(group, elsewhere):
        return RefusedError("is not a known option", key=group, value=option, suggestion=advice)
    meant = did_you_mean(option, known, f"{group}=") if known else f"There is no group {group}."
    if option and known and "Did you mean" not in meant:
        own = " Recipes of your own are in the folder that --config-dir names." if group == "recipe" else ""
        meant = meant if added else uninstalled(option) or hidden() or f"{meant}{own}"
    return RefusedError("is not a known option", key=group, value=option, suggestion=meant)


def composition(message: str, cause: BaseException | None) -> RefusedError:  # noqa: C901, PLR0912  (a list of messages)
    """Return the error for Hydra's message about what it cannot compose."""
    several = re.match(r"Ambiguous value for argument '([^']+)'", message)
    if several:
        return _several_values(several[1])
    sweeps = re.match(r"Sweep parameters '(.+)' requires --multirun", message)
    if sweeps:
        return SweptError("gives several values", key=sweeps[1], suggestion="Add -m for a run with each.")
    unchosen = re.match(r"Could not override '([^']+)'\. No match in the defaults list", message)
    if unchosen:
        added = re.search(r"use (\+\S+)", message)
        return RefusedError(
            "No option of this group is chosen by default",
            key=unchosen[1],
            suggestion=f"Add one: {added[1] if added else '+' + unchosen[1]}.",
        )
    unknown = re.match(r"Could not override '([^']+)'", message)
    if unknown and isinstance(cause, OmegaConfBaseException):
        return unknown_key_in(tree_of(cause), unknown[1])
    there = re.match(r"Could not append to config\. An item is already at '([^']+)'", message)
    if there:
        return RefusedError("is a key already", key=there[1], suggestion="Leave the + out.")
    twice = re.match(r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: (.+)'", message)
    if twice:
        name = twice[1]
        return RefusedError(
            "is chosen already",
            key=name,
            suggestion=f"Leave the + out, {name}={twice[2]}; in a config's defaults write override /{name}.",
        )
    again = re.match(r"([\w/]+) appears more than once in the final defaults list", message)
    if again:
        return RefusedError("is chosen already", key=again[1], suggestion="Leave the + out.")
    unmatched = re.match(r"In '([^']+)': Could not override '(?:[\w/]+/)?(\w+)(?:@[\w.]+)?'\.", message)
    if unmatched:
        group = unmatched[2]
        way = f"override /{group}" if group in our_options() else f"/{group}, without override"
        return RefusedError(
            f"overrides {group}, which is not chosen before it under that name",
            suggestion=f"Write - {way}: ... .",
            place=f"{unmatched[1]}.yaml",
        )
    in_file = re.match(r"In '([^']+)': \w+ raised while composing config:\n(.*)\n.*?full_key: (\S+)", message, re.S)
    if in_file:
        if in_file[3].startswith("hydra."):
            return no_effect(f"{in_file[1]}.yaml sets {in_file[3]}", in_file[3])
        return RefusedError(f"is invalid: {in_file[2].splitlines()[0]}", place=f"{in_file[1]}.yaml, {in_file[3]}")
    if listed := re.match(r"In '([^']+)': ConfigTypeError .*\n.*Cannot merge DictConfig with ListConfig", message):
        return RefusedError(
            "is a list, and a config holds keys",
            suggestion="A line that begins with - stands below a key.",
            place=f"{listed[1]}.yaml",
        )
    unmerged = re.match(r"Error merging override (.+)", message)
    if unmerged and "Cannot merge DictConfig with ListConfig" in str(cause):
        return _of_two_kinds(unmerged[1])
    if unmerged and isinstance(cause, OmegaConfBaseException):
        return RefusedError(f"cannot be merged: {first_line(cause)}", key=unmerged[1])
    return refusal(cause) if not message and isinstance(cause, Exception) else RefusedError(first_line(message))


def _several_values(override: str) -> RefusedError:
    """Return the error for several values of one run, which may be meant as a list or as one number."""
    key, _, value = override.partition("=")
    or_list = f", or write a list as {key}=[{value}]" if key in LISTED or takes_list(key) else ""
    if key == "trainer.keep_best":
        or_list = f", or name one metric, as in {override.partition(',')[0]}"
    if key == "callbacks" and "none" in value.split(","):
        or_list = ""
    if takes_number(key) and not takes_fraction(key) and re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", value):
        or_list = f", or {key}={value.replace(',', '')}"
    elif takes_number(key) and re.fullmatch(r"\d+,\d+", value):  # a decimal comma
        or_list = f", or {key}={value.replace(',', '.')}" if takes_fraction(key) else or_list
    return SweptError("gives several values", suggestion=f"Add -m for a run with each{or_list}.", place=override)


def _of_two_kinds(override: str) -> RefusedError:
    """Return the error for a list in place of a section in a file, or the other way round."""
    key, _, value = override.partition("=")
    if value.lstrip().startswith("{"):
        return RefusedError(
            f"is a section, and {key} is a list in a file",
            suggestion=f"Write {key}=[{{...}}], or {key}=null before it.",
            **subject(override),
        )
    return RefusedError(
        f"is a list, and {key} is a section in a file", suggestion=f"Type {key}=null before it.", **subject(override)
    )


def unknown_key_in(tree: Mapping[str, Any], typed: str) -> RefusedError:
    """Return the error of an unknown key: the nearest key at the level where it leaves the tree, or elsewhere."""
    section = tree
    names = list[str]()
    rest = typed.split(".")
    while len(rest) > 1 and isinstance(section, Mapping) and rest[0] in section:
        section = section[rest[0]]
        names.append(rest.pop(0))
    if isinstance(section, list):
        return RefusedError("is not a known key", key=typed)
    where, key = ".".join(names), rest[0]
    known = [str(name) for name in section if name != "hydra"] if isinstance(section, Mapping) else []
    if not where and key in our_options():
        listed = ", ".join(f"{key}={option}" for option in our_options()[key])
        return RefusedError(
            f"No {key} is chosen, by the recipe or by {key}=...", key=typed, suggestion=f"Available: {listed}."
        )
    others = _options_with(where, key) if not advice_on_key(typed) else []
    if others and nearest(key, known) is None:
        return RefusedError(
            f"is not a known key: it is a key of {', '.join(others)}",
            key=typed,
            suggestion=f"Add {_chosen_too(where, others[0], known)}." if len(others) == 1 else "",
        )
    return unknown_key(".".join(rest), known, where, _keys(tree))


def _chosen_too(group: str, choice: str, known: Sequence[str]) -> str:
    """Return how an option is chosen, beside those that are, where a group is a list."""
    chosen = [name for name in known if name in our_options()[group]] if group in LISTED else []
    return shlex.quote(f"{group}=[{','.join([*chosen, choice.partition('=')[2]])}]") if chosen else choice


def _options_with(group: str, key: str) -> list[str]:
    """Return the other options of a group that have a key, as they are typed."""
    folders = [conf_folder(), *plugin_folders()]
    paths = [folder / group / f"{name}.yaml" for folder in folders for name in options(group, folders)] if group else []
    return [
        f"{group}={path.stem}"
        for path in paths
        if path.is_file() and re.search(f"^{re.escape(key)}:", path.read_text(), re.M)
    ]


def _keys(tree: Mapping[str, Any]) -> list[str]:
    """Return the full keys of all values in a tree."""

    def walk(values: Any, where: str) -> Iterator[str]:
        for key, value in values.items() if isinstance(values, Mapping) else ():
            yield f"{where}{key}"
            yield from walk(value, f"{where}{key}.")

    return [key for key in walk(tree, "") if not key.startswith("hydra")]


def first_line(error: Exception | str) -> str:
    """Return an error's message without the lines in which OmegaConf repeats the key and its types."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", " ".join(said[:2])) or type(error).__name__
