"""What Hydra and OmegaConf refuse, and words that they would not understand, in one sentence each."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ddpexp.config import commands
from ddpexp.config.build import did_you_mean, nearest, unknown_key
from ddpexp.config.folders import conf_folder, groups, options
from ddpexp.config.foreign import value_here
from ddpexp.config.hydra_section import no_effect
from ddpexp.config.kinds import several, takes_fraction, takes_list, takes_number, takes_text
from ddpexp.config.plugins import plugin_folders
from ddpexp.errors import RefusedError

_TRAINS = ("train", "fit", "run", "start", "launch", "main")  # what it is called elsewhere
_FULL_ERROR = "HYDRA_FULL_ERROR"
_KEY = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*")
_DASHES, _QUOTES = "\u2010\u2011\u2012\u2013\u2014\u2212", "\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb"
_FUNCTIONS = {  # of Hydra's sweeps
    "choice": "choice(1,2,3)",
    "range": "range(0,10,2)",
    "interval": "interval(0.001,0.1)",
    "glob": "glob(*)",
    "tag": "tag(log,interval(0.001,0.1))",
    "shuffle": "shuffle(1,2,3)",
    "sort": "sort(1,2,3)",
}
_CASTS = ("int", "float", "str", "bool", "json_str", "extend_list")  # functions of Hydra's for single runs
_RESOLVERS = ("oc.env", "oc.select", "oc.decode", "oc.create", "oc.dict.keys", "oc.dict.values", "hydra", "now")
_YAML = {  # what PyYAML says, and what it means to somebody who has not written PyYAML
    "found unexpected end of stream": " (a quote is not closed)",
    "found character '\\t'": " (a tab: indent with spaces)",
    "mapping values are not allowed here": " (a line is indented too far, or a value with a colon has no quotes)",
    "could not find expected ':'": " (a key without a colon)",
}
_UNITS = r"[kmgt]i?b?|seconds?|s|minutes?|mins?|m|hours?|h|days?|d|%"
_BRACKETS = (("[", "]"), ("{", "}"), ("(", ")"))
_EXAMPLE = "write key=value, for example trainer.gpus=2"


@contextmanager
def one_sentence() -> Iterator[None]:
    """Make one sentence of what Hydra and OmegaConf refuse."""
    with _full_errors():
        try:
            yield
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
            if os.environ.get(_FULL_ERROR) == "asked":
                raise
            raise RefusedError(sentence(error)) from None


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


def check_override(words: Sequence[str]) -> None:
    """Look for a word that cannot be an override at all.

    Raises:
        RefusedError: with what may be meant.
    """
    for place, word in enumerate(words):
        follows = [*words[place + 1 :], ""][0]
        empty = word.endswith("=") and word.strip("=") and (not follows or re.search("[=~]", follows))  # as in run.dir=
        if "=" in word.strip("=") or word.startswith("~") or empty:
            continue
        if place and (joined := _joined(words, place)) is not None:
            raise RefusedError(f"{words[place - 1]} {word} has a space, at which the shell cuts it: {joined}.")
        open_before = next(
            (one for one in words[:place] if any(one.count(a) > one.count(b) for a, b in _BRACKETS)), None
        )
        if open_before is not None and any(b in word for _, b in _BRACKETS):
            whole = " ".join(words[words.index(open_before) : place + 1])
            parts = re.sub(r",?\s+", ",", whole)
            raise RefusedError(
                f"{whole} has spaces, at which the shell cuts it into words: write {shlex.quote(parts)}."
            )
        raise RefusedError(_no_override(word, words[place - 1] if place else "", [*words[place + 1 :], "", ""]))


def _joined(words: Sequence[str], place: int) -> str | None:
    """Return what to type where a word is the rest of the override before it, such as the `gb` of `launcher.mem=64 gb`.

    None where it is not.
    """
    before, last = words[place - 1], place
    if not re.fullmatch(r"[^=]+=\S+", before) or not _KEY.fullmatch(before.partition("=")[0]):
        return None
    if any(before.count(opening) > before.count(closing) for opening, closing in _BRACKETS):
        return None
    if before.endswith(","):
        while words[last].endswith(",") and last + 1 < len(words):
            last += 1
    elif not (re.search(r"\d$", before) and re.fullmatch(_UNITS, words[place], re.IGNORECASE)):
        return None
    return f"leave out the space: {''.join(words[place - 1 : last + 1])}"


def _no_override(word: str, before: str, after: Sequence[str]) -> str:
    known = groups([conf_folder()])
    if word[:1] and word[0] in _DASHES:
        return f"{word} begins with a dash from a formatted text: type --{word.lstrip(_DASHES)}."
    apart = re.fullmatch(
        r"([A-Za-z_][\w./]*) *([=:]) *(\S*)", f"{word} {after[0]} {after[1]}".strip().replace("= =", "=")
    )
    if word.startswith("=") and _KEY.fullmatch(before):
        apart = re.fullmatch(r"([A-Za-z_][\w./]*) *(=) *(\S*)", f"{before} = {word.lstrip('=') or after[0]}")
    if apart is not None:
        return f"{word} is not an override: write {apart[1]}={apart[3] or '...'}, without spaces."
    if word in commands.NAMES:
        return f"{word} is a command and stands first: python -m ddpexp {word} ... ."
    value = after[0] if after[0] and not re.search(r"[=~]", after[0]) else "..."
    if word.partition(".")[0] in known:
        options_of = f" Known here: {', '.join(options(word, [conf_folder()]))}." if word in known else ""
        return f"{word} has no value: write {word}={value}{' ' if value == '...' else ''}.{options_of}"
    group = next((group for group in ("recipe", *known) if word in options(group, [conf_folder()])), None)
    if group is not None:
        return f"{word} is not an override: write {group}={word}."
    if re.search(r"\.(py|ya?ml)$", word):
        return (
            f"{word} is not an override: ddpexp takes no files. A recipe is chosen by name: --config-dir DIR "
            "recipe=NAME."
        )
    if (Path(word) / "config.yaml").is_file():
        return f"{word} is not an override: a run is resumed with python -m ddpexp resume {shlex.quote(word)}."
    if word in _TRAINS:
        return (
            f"{word} is not an override: a training needs no command, as in python -m ddpexp recipe=mnist "
            "trainer.gpus=2."
        )
    if not re.search(r"\w", word) or word.startswith("="):
        return f"{word} is not an override: {_EXAMPLE}."
    near = nearest(word, commands.NAMES)
    meant = f" Did you mean {near}?" if near else ""
    return (
        f"{word} is neither an override (key=value, for example trainer.gpus=2) nor a command. "
        f"The commands are {', '.join(commands.NAMES)}.{meant}"
    )


def _unread(word: str) -> str:
    """Say why Hydra's grammar does not take an override, and how the same is typed so that it does."""
    key, _, value = word.partition("=")
    if "=" not in word or not _KEY.fullmatch(key) or ".." in key:
        return f"{word} is not an override: {_EXAMPLE}."
    if value.startswith("="):
        return f"{word} has = twice: write {key}={value.lstrip('=')}."
    if value.endswith(",") and _is_read(f"{key}={value.rstrip(',')}"):
        return f"{word} ends with a comma: words are separated by spaces. Write {key}={value.rstrip(',')}."
    if (found := re.search(f"[{_QUOTES}]", value)) is not None:
        return f"{word} has the quote {found[0]} of a formatted text: write ' or \", or leave the quotes out."
    if (more := re.search(r"[;,&]\+?[a-z_]+([./][\w.]+)?=", value)) is not None:
        return f"{word} is not read: words are separated by spaces, not by {more[0][0]}."
    if (more := re.search(r"\s(\+{0,2}[A-Za-z_][\w./]*=.*)", value)) is not None:
        first = f"{key}={value[: more.start()]}"
        text = f", or a text that holds both: {_quoted(key, value)}" if takes_text(key) and "." in key else ""
        return f"{word} has two overrides inside one pair of quotes: write {first} {more[1]}, each on its own{text}."
    if (advice := _no_function(word, key, value)) is not None:
        return advice
    if value.startswith("~"):
        return (
            f"{word} is not read: neither the shell nor Hydra makes a folder of ~ there. Write {key}=$HOME{value[1:]}."
        )
    if value[:1] == "(" and value[-1:] == ")" and _is_read(f"{key}=[{value[1:-1]}]"):
        return f"{word} is not read: a list is written in brackets, {shlex.quote(f'{key}=[{value[1:-1]}]')}."
    for opening, closing in _BRACKETS:
        if value.count(opening) != value.count(closing):
            return (
                f"{word} has a bracket without its other half. A value with spaces is quoted for the shell: "
                f"{shlex.quote(f'{key}=[a, b]')}."
            )
    quoted = _quoted(key, value)
    if _is_read(shlex.split(quoted)[0]):
        return f"{word} is not read: its value has characters that mean something to Hydra. Quote it twice: {quoted}."
    return f"{word} is not an override: {_EXAMPLE}."


def _quoted(key: str, value: str) -> str:
    """Return an override whose value is a text for Hydra's grammar and for the shell."""
    return shlex.quote('{}="{}"'.format(key, value.replace("\\", "\\\\").replace('"', '\\"')))


def _no_function(word: str, key: str, value: str) -> str | None:
    """Report a function of sweeps that is misspelt, or that Hydra does not have; None where the value is none."""
    called = re.match(r"(\w+)([(\[])", value)
    if called is not None and called[1] in _FUNCTIONS:
        meant = f"{key}={_FUNCTIONS[called[1]]}"
        if called[2] == "[" and value.endswith("]") and _is_read(f"{key}={called[1]}({value[len(called[0]) : -1]})"):
            meant = f"{key}={called[1]}({value[len(called[0]) : -1]})"
        return f"{word} is not read: {called[1]} is written as in {shlex.quote(meant)}."
    braces = value[:1] + value[-1:] == "{}" and several(value)
    if braces:
        return f"{word} is not read: several values are written {key}={braces}, with -m."
    if called is not None and called[1] not in _CASTS and (called[2] == "(" or takes_number(key)):
        known = ", ".join(_FUNCTIONS[name] for name in ("choice", "range", "interval"))
        text = f" As a text: {_quoted(key, value)}." if takes_text(key) else ""
        return (
            f"{word} is not read: there is no function {called[1]}. With -m there are {known}, and several values as "
            f"0.1,0.01.{text}"
        )
    return None


def _is_read(word: str) -> bool:
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def sentence(error: Exception) -> str:
    """Say in one sentence what Hydra, OmegaConf or PyYAML refuses."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, [name for name in error.options or () if name])
    if isinstance(error, OverrideParseException):
        return _unread(str(error.override))
    if isinstance(error, ConfigCompositionException):
        return _composition(error)
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing: give it a value, for example as {error.full_key}=... ."
    unset = re.search(r"Environment variable '(\w+)' not found", str(error))
    if unset and isinstance(error, OmegaConfBaseException):
        return (
            f"{error.full_key} is read from the environment, and {unset[1]} is not set there: export {unset[1]}=... "
            "first."
        )
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {first_line(error)}{_interpolated(error)}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        advice = next((advice for start, advice in _YAML.items() if str(error.problem).startswith(start)), "")
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}{advice}."
    if isinstance(error, UnicodeDecodeError):
        return f"A config file is not UTF-8 text: {error}."
    return first_line(error)


def _interpolated(error: OmegaConfBaseException) -> str:
    """Say what may be meant by ${...} that leads to nothing."""
    key = re.match(r"Interpolation key '([^']+)' not found", str(error))
    if key is not None and key[1].isupper():
        return f". A variable of the environment is written ${{oc.env:{key[1]}}}."
    if key is not None and error.parent_node is not None:
        near = nearest(key[1], _keys(error.parent_node._get_root()))
        return f". Did you mean ${{{near}}}?" if near else "."
    kind = re.match(r"Unsupported interpolation type (\S+)", str(error))
    if kind is not None:
        return f".{did_you_mean(kind[1], _RESOLVERS, '${', ':...}')}"
    return ""


def _unknown_option(file: str, known: Sequence[str]) -> str:
    group, _, option = file.rpartition("/")
    if not group:
        return f"There is no config {option}."
    ours = groups([conf_folder()])
    head, _, inner = group.partition("/")
    if head == "recipe" and inner in ours:
        return (
            f"{inner}={option} in a recipe's defaults is looked for in the folder recipe: write - override "
            f"/{inner}: {option}."
        )
    if head in ours and inner:  # a path
        name = option.removesuffix(".yaml")
        others = (
            f"--config-dir {inner.removesuffix(f'/{head}')} "
            if Path(inner).is_dir() and head not in options(head, [])
            else ""
        )
        return (
            f"{head}={inner}/{option} is a path, and options are named: {'' if name in known else others}{head}={name}."
        )
    if group.startswith("hydra/") and group.partition("/")[2].partition("/")[0] != "sweeper":
        return no_effect(f"{group}={option}", group)
    known = known or options(group, [conf_folder(), *plugin_folders()])
    if (here := value_here(group, option.lower())) is not None:
        known = [here]
        option_here = f" Did you mean {group}={here}?"
        return f"{group}={option} is not a known option.{option_here}"
    meant = did_you_mean(option, known, f"{group}=") if known else f" There is no group {group}."
    return f"{group}={option} is not a known option.{meant}"


def _composition(error: ConfigCompositionException) -> str:
    several = re.match(r"Ambiguous value for argument '([^']+)'", str(error))
    if several:
        key, _, value = several[1].partition("=")
        or_list = f", or write a list as {key}=[{value}]" if takes_list(key) else ""
        if takes_number(key) and re.fullmatch(r"\d+,\d+", value):  # a decimal comma
            or_list = f", or {key}={value.replace(',', '.')}" if takes_fraction(key) else or_list
        return f"{several[1]} gives several values: add -m for a run with each{or_list}."
    sweeps = re.match(r"Sweep parameters '(.+)' requires --multirun", str(error))
    if sweeps:
        return f"{sweeps[1]} gives several values: add -m for a run with each."
    unchosen = re.match(r"Could not override '([^']+)'\. No match in the defaults list", str(error))
    if unchosen:
        added = re.search(r"use (\+\S+)", str(error))
        return (
            f"Of {unchosen[1]} no option is chosen by default, so one is added: "
            f"{added[1] if added else '+' + unchosen[1]}."
        )
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown and isinstance(error.__cause__, OmegaConfBaseException):
        return str(unknown_key_of(unknown[1], error.__cause__))
    there = re.match(r"Could not append to config\. An item is already at '([^']+)'", str(error))
    if there:
        return f"{there[1]} is a key already: leave the + out."
    twice = re.match(r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: (.+)'", str(error))
    if twice:
        name = twice[1]
        return (
            f"{name} is chosen already: leave the + out, {name}={twice[2]}; in a config's defaults write override "
            f"/{name}."
        )
    unmatched = re.match(r"In '([^']+)': Could not override '(?:[\w/]+/)?(\w+)(?:@[\w.]+)?'\.", str(error))
    if unmatched:
        group = unmatched[2]
        way = f"override /{group}" if group in groups([conf_folder()]) else f"/{group}, without override"
        return (
            f"{unmatched[1]}.yaml overrides {group}, which is not chosen before it under that name: write - {way}: "
            "... ."
        )
    in_file = re.match(r"In '([^']+)': \w+ raised while composing config:\n(.*)\n.*?full_key: (\S+)", str(error), re.S)
    if in_file:
        if in_file[3].startswith("hydra."):
            return no_effect(f"{in_file[1]}.yaml sets {in_file[3]}", in_file[3])
        return f"{in_file[1]}.yaml, {in_file[3]}: {in_file[2].splitlines()[0]}."
    if listed := re.match(r"In '([^']+)': ConfigTypeError .*\n.*Cannot merge DictConfig with ListConfig", str(error)):
        return f"{listed[1]}.yaml is a list, and a config holds keys: a line that begins with - stands below a key."
    unmerged = re.match(r"Error merging override (.+)", str(error))
    if unmerged and isinstance(error.__cause__, OmegaConfBaseException):
        return f"{unmerged[1]}: {first_line(error.__cause__)}."
    return first_line(error)


def unknown_key_of(typed: str, cause: OmegaConfBaseException) -> RefusedError:
    """Say which key is nearest to the typed one, at the level where it leaves the tree.

    Or what it is called elsewhere.
    """
    parent, key, full_key = cause.parent_node, str(cause.key), str(cause.full_key)
    if not isinstance(parent, DictConfig) or not full_key.endswith(key):
        return RefusedError(f"{typed} is not a known key.")
    names = [str(name) for name in parent if name != "hydra"]
    where = full_key[: -len(key)].rstrip(".")
    others = _options_with(where, key)
    if others and nearest(key, names) is None:
        return RefusedError(f"{typed} is not a known key: it is one of {' and '.join(others)}.")
    return unknown_key(key + typed[len(full_key) :], names, where, _keys(parent._get_root()))


def _options_with(group: str, key: str) -> list[str]:
    """Return the other options of a group that have a key, as they are typed."""
    folders = [conf_folder(), *plugin_folders()]
    paths = [folder / group / f"{name}.yaml" for folder in folders for name in options(group, folders)] if group else []
    return [
        f"{group}={path.stem}"
        for path in paths
        if path.is_file() and re.search(f"^{re.escape(key)}:", path.read_text(), re.M)
    ]


def _keys(tree: Any) -> list[str]:
    """Return the whole keys of all values in a tree."""
    plain = OmegaConf.to_container(tree, resolve=False) if OmegaConf.is_config(tree) else {}

    def walk(values: Any, where: str) -> Iterator[str]:
        for key, value in values.items() if isinstance(values, dict) else ():
            yield f"{where}{key}"
            yield from walk(value, f"{where}{key}.")

    return [key for key in walk(plain, "") if not key.startswith("hydra")]


def first_line(error: Exception) -> str:
    """Return the words of an error without the lines in which OmegaConf repeats the key and its types."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", " ".join(said[:2])) or type(error).__name__
