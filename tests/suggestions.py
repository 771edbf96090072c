"""Whether what a suggestion tells the user to type is accepted: grammar, keys, types, commands and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ddpexp.cli import verbs
from ddpexp.cli.verb import CONFIG_DIR, HELP, MULTIRUN, Verb
from ddpexp.config import suggestions
from ddpexp.config.declared import FIELDS, SECTIONS
from ddpexp.config.folders import conf_folder, groups, options
from ddpexp.config.suggestions import is_placeholder, overrides_in
from ddpexp.settings.data import DATA_KEYS

_SURE = re.compile(r"python -m ddpexp ([a-z]+)\b(?![=./])|`ddpexp ([a-z]+)\b(?![=./])|you mean ddpexp ([a-z]+)")
_COMMAND = re.compile(rf"\bddpexp ({'|'.join(verbs.NAMES)})\b(?![=./])")
_QUOTED = re.compile(r"'([+~]{0,2}[a-z][\w.]*(?:/\w+)*=[^']*)'")
_BARE = re.compile(r"(?<![\w./'\"$={\[:,-])([+~]{0,2}[a-z][\w.]*(?:/\w+)*=[^\s`'\"]+)(?=[\s`)]|$)")
_OPERAND = re.compile(r"[A-Z][A-Z_.]*|.*[/{\d].*|'.*'|\w+\.\w+")  # and no word of a sentence
_OPEN = ("data", "launcher", "strategy")  # sections whose keys depend on the chosen option


def refusals(suggestion: str, shipped_only: bool = False) -> Iterator[str]:
    """Yield why a suggestion would be refused.

    `shipped_only`: neither packages nor the user's folders add options, so that the options
    of groups and the keys of data, launchers and strategies are checked too.
    """
    for match in _SURE.finditer(suggestion):
        if (name := match[1] or match[2] or match[3]) not in verbs.NAMES:
            yield f"there is no command {name}"
    for match in _COMMAND.finditer(suggestion):
        yield from _refused_options(verbs.BY_NAME[match[1]], suggestion[match.end() :])
    for word in typed(suggestion):
        if "{" not in word or not shipped_only:  # a template has its expressions in braces
            yield from _unread(word)
    yield from suggestions.refusals(suggestion)
    for section, rest, value in overrides_in(suggestion) if shipped_only else ():
        if section not in FIELDS or section == "data" or not rest:
            yield from _shipped_refusals(section, rest, value)


def typed(suggestion: str) -> Iterator[str]:
    """Yield each override in a suggestion, as the program gets it from the shell."""
    for match in _QUOTED.finditer(suggestion):
        yield match[1]
    for match in _BARE.finditer(_QUOTED.sub("", suggestion)):
        if "..." not in match[1]:
            yield match[1].rstrip(".,;:?!)") if "(" not in match[1] else match[1].rstrip(".,;:?!")


def _unread(override: str) -> Iterator[str]:
    """Yield that Hydra's grammar does not read an override; nothing if it does, or if it is none of ours."""
    section = re.split(r"[./=]", override.lstrip("+~"), maxsplit=1)[0]
    cut = override.count("{") != override.count("}")  # at a space, as in data.missing={b: median} in a sentence
    if section not in (*SECTIONS, "hydra") or override.endswith("=") or cut:
        return
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        yield f"{override} is not read"


def _refused_options(verb: Verb, rest: str) -> Iterator[str]:
    """Yield which options behind a command are refused; `rest` is the text behind it, a sentence's end included."""
    known = {*verb.option_names, *CONFIG_DIR, *HELP, *MULTIRUN}
    words = iter(re.findall(r" ('[^']*'|\S+)", rest.partition("\n")[0]))
    for word in words:
        name, _, value = word.rstrip(".,;:?!)`").partition("=")
        if name.startswith("--"):
            if name not in known:
                yield f"ddpexp {verb.name} has no option {name}"
            option = next((option for option in verb.options if option.name == name), None)
            if option is not None and option.value:
                value = value or next(words, "").rstrip(".,;:?!)`")
                if not value:
                    yield f"ddpexp {verb.name} {name} lacks its value"
        elif not (value or _OPERAND.fullmatch(name)):
            return
        if word.endswith((".", "?", ",", ";", ":", "`")) and not word.endswith("..."):
            return


def _shipped_refusals(section: str, rest: str, value: str) -> Iterator[str]:
    if not rest:
        known = section in groups([conf_folder()]) and value and not is_placeholder(value)
        if known and not set(value.strip("[]").split(",")) <= set(options(section, [conf_folder()])):
            yield f"{section} has no option {value}"
    elif rest and section in _OPEN and rest.rpartition(".")[2] not in _shipped_keys(section):
        yield f"no {section} has the key {rest}"


@cache
def _shipped_keys(section: str) -> frozenset[str]:
    """Return the keys that a section has with one of its shipped options, and those of its sections."""
    keys = {*DATA_KEYS} | _names(yaml.safe_load((conf_folder() / "config.yaml").read_text()).get(section))
    for path in (conf_folder() / section).glob("*.yaml"):
        keys |= _names(yaml.safe_load(path.read_text()))
    return frozenset(keys)


def _names(values: Any) -> set[str]:
    if not isinstance(values, Mapping):
        return set()
    return {str(key) for key in values}.union(*(_names(value) for value in values.values()))
