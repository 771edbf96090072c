"""What a verb of the command line declares, and what was typed for it."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ddpexp.errors import RefusedError

if TYPE_CHECKING:
    from ddpexp.config.restated import UnrestatedError
    from ddpexp.launch.workers.client import Server
    from ddpexp.run.directory import RunDir

HELP = frozenset({"--help", "-h"})
CONFIG_DIR = ("--config-dir", "-cd")  # each with a folder behind it
MULTIRUN = ("-m", "--multirun")
_COLUMN = 18  # characters of an option, beside which its explanation stands

Typed = TypeVar("Typed")
Operands = Literal["overrides", "run", "weights", "directory", "directories", "topics", "shell", "names"]
"""What stands behind a verb, beside its options.

overrides: those of a training. run: a run directory, and overrides. weights: a run directory or a file of weights, and
overrides. directory, directories: of runs and sweeps. topics: what `ddpexp help` explains. names: new or unlisted ones.
"""
Forks = Literal["never", "always", "launcher", "stored launcher"]
"""Whether a verb forks workers.

launcher: if the chosen launcher, or the one of a training, forks them in this process. stored launcher: if no launcher
is chosen, that of the run counts.
"""


@dataclass(frozen=True)
class Option:
    """An option of a single verb."""

    name: str
    about: str
    value: str = ""  # its placeholder in the usage; empty: a switch
    example: str = ""  # a value
    needs_value: bool = True
    may_be_empty: bool = False
    values: str = ""  # for completion: "paths", or module:function that returns the values

    @property
    def typed(self) -> str:
        """The option as the usage shows it."""
        return f"{self.name} {self.value}".rstrip()


@dataclass(frozen=True)
class Verb:
    """A verb: `ddpexp NAME ARGUMENTS`."""

    name: str
    arguments: str  # as the usage shows them
    summary: str  # one line
    about: str  # what it does, in the usage
    function: str = ""  # module:function, which gets a Call and returns the exit code; empty: ddpexp.cli.NAME:NAME
    operands: Operands = "overrides"
    options: tuple[Option, ...] = ()
    notes: str = ""  # below the options
    # What to type for other programs' options, by their names without dashes.
    foreign_options: Mapping[str, str] = field(default_factory=dict)
    list_more: str = ""  # module:function that returns the last lines of the usage
    missing_prompt: str = ""  # the question if there are no operands; empty: it needs none
    forks: Forks = "never"
    is_interruptible: bool = False  # whether a stop signal raises StoppedError from the start, to undo what was begun
    also: tuple[str, ...] = ()  # what other programs call it

    @property
    def usage(self) -> str:
        """The first line of its help."""
        return f"usage: ddpexp {self.name} {self.arguments}"

    @property
    def takes_overrides(self) -> bool:
        """Whether overrides, and --config-dir, can be typed."""
        return self.operands in ("overrides", "run", "weights")

    def load(self) -> Callable[[Call], int]:
        """Import and return the function that answers it."""
        return load(self.function or f"ddpexp.cli.{self.name}:{self.name}")

    def help(self) -> str:
        """Return what `ddpexp NAME --help` prints."""
        listed = "\n".join(load(self.list_more)()) if self.list_more else ""
        options = "\n".join(map(_explained, self.options))
        return "\n\n".join(filter(None, [self.usage, self.about, options, self.notes, listed]))

    def parse(self, argv: Sequence[str], command: Sequence[str] = (), server: Server | None = None) -> Call:
        """Return what `argv`, the words behind the verb, ask for; `command` is the whole command line.

        Raises:
            RefusedError: an unknown option, one without its value or given twice, or nothing where something is needed.
        """
        typed: dict[str, str] = {}
        operands: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            plain = name.replace("-", "_")
            option = next((option for option in self.options if option.name.replace("-", "_") == plain), None)
            if option is not None:
                is_separate = option.value != "" and not equals and self._is_value(words[:1], option)
                value = words.pop(0) if is_separate else value
                self._check(option, value, is_given=is_separate or equals != "", is_repeated=option.name in typed)
                typed[option.name] = value
            elif name in CONFIG_DIR and CONFIG_DIR[0] in self.option_names:
                operands += [word] if equals else [word, *words[:1]]
                words = words if equals else words[1:]
            elif word.startswith("-"):
                raise self._no_option(word, value or "".join(words[:1]), words)
            elif self.operands == "overrides" and not equals and os.path.isdir(word):
                raise RefusedError(
                    "The command takes key=value, as a training does, and no directory",
                    place=f"{self.name} {word}",
                    suggestion="Type the overrides of the run, which its overrides.yaml lists.",
                )
            else:
                operands.append(word)
        if self.missing_prompt and not operands:
            raise RefusedError(f"{self.missing_prompt}\n{self.help()}")
        return Call(self.name, operands, typed, command, server)

    def _is_value(self, words: Sequence[str], option: Option) -> bool:
        """Return whether the word behind an option, if there is one, is its value."""
        if not words:
            return False
        if not option.needs_value:
            return not words[0].startswith("-") and "=" not in words[0]
        return words[0].partition("=")[0] not in (*self.option_names, *CONFIG_DIR)

    def _check(self, option: Option, value: str, is_given: bool, is_repeated: bool) -> None:
        """Check how an option was typed.

        Raises:
            RefusedError: twice, without the value that it needs, or with one although it is a switch.
        """
        if not option.value:
            if is_given:
                raise RefusedError("takes no value", place=f"{self.name} {option.name}")
        elif is_repeated or (option.needs_value and not (value or (is_given and option.may_be_empty))):
            raise RefusedError(
                "takes one value, once",
                place=f"{self.name} {option.name}",
                suggestion=f"For example, type {option.name} {option.example}.",
            )

    def _no_option(self, word: str, value: str, others: Sequence[str]) -> RefusedError:
        """Refuse an unknown option, with the nearest one, or the key that it may stand for."""
        from ddpexp.config.arguments import as_overrides
        from ddpexp.config.build import did_you_mean
        from ddpexp.config.declared import section_with
        from ddpexp.config.foreign import advice_on_key
        from ddpexp.config.habits import answer

        place = f"{self.name} {word}"
        if word in MULTIRUN and self.takes_overrides:
            reason = "The command takes one run"
            return RefusedError(reason, place=place, suggestion=f"Leave {word} out, and give each key one value.")
        name = word.partition("=")[0]
        key = name.lstrip("-").replace("-", "_")
        suggestion = self.foreign_options.get(key, "")
        if not suggestion and self.takes_overrides:
            unknown = [
                meant for other, meant in as_overrides(others) if other.partition("=")[0] not in self.option_names
            ]
            keys = [other for other in others if "=" in other and not other.startswith("-")]
            suggestion = answer([meant := f"{key}={value}"]) and answer([meant, *unknown, *keys])
            suggestion = suggestion or advice_on_key(key)
            if not suggestion and (section := section_with(key)) is not None:
                suggestion = f"Did you mean {section}.{key}={value or '...'}?"
        suggestion = suggestion or did_you_mean(name, self.option_names)
        return RefusedError("is not an option", place=place, suggestion=suggestion)

    @property
    def option_names(self) -> tuple[str, ...]:
        """The options that can be typed."""
        config_dir = CONFIG_DIR[:1] if self.takes_overrides or self.operands == "topics" else ()
        return (*(option.name for option in self.options), *config_dir, "--help")


@dataclass(frozen=True)
class Call:
    """A verb with what was typed for it."""

    name: str
    operands: Sequence[str]  # all but its own options
    options: Mapping[str, str] = field(default_factory=dict)  # by name; a switch has an empty value
    command: Sequence[str] = ()  # the whole command line
    server: Server | None = None  # which forks workers, if one has been started

    @property
    def as_json(self) -> bool:
        """Whether the output is for programs."""
        return "--json" in self.options

    @property
    def checkpoint(self) -> str:
        """What was typed behind --checkpoint."""
        return self.options.get("--checkpoint", "auto")

    def typed(self, defaults: Typed) -> Typed:
        """Return the options that were typed in place of the defaults, which are the fields of a dataclass.

        Raises:
            RefusedError: a value of another type, or out of the range that its field declares.
        """
        from ddpexp.config.build import convert  # late: every command starts here
        from ddpexp.settings.key import annotations_of, declaration

        hints, values = annotations_of(type(defaults)), {}
        for name, text in self.options.items():
            field_name = name.removeprefix("--").replace("-", "_")
            hint = hints[field_name]
            key, plain = declaration(hint)
            if text.lower() in key.advice:
                raise RefusedError(place=f"{self.name} {name} {text}", suggestion=key.advice[text.lower()])
            text = next((here for here, names in key.synonyms.items() if text.lower() in names.split()), text)
            value: Any = text
            if plain is bool:
                value = True
            elif str not in (plain, *get_args(plain)):
                value = _number(text)
            values[field_name] = convert(value, hint, f"{self.name} {name}")
        return type(defaults)(**{**vars(defaults), **values})

    def restate(self, run: RunDir, error: UnrestatedError | None = None) -> str:
        """Return this command with what restates the code of a run, and the settings of an error."""
        from ddpexp.run.resume_arguments import trust_arguments

        recorded = [word for word in trust_arguments(run) if word not in self.command]
        words = [*self.command[1:], *recorded, *(error.overrides if error is not None else ())]
        return f"python -m ddpexp {shlex.join(words)}"

    def source(self) -> tuple[str, list[str]]:
        """Return the operand that names a run directory or a file, and the other ones.

        Options may stand before it, as in `--config-dir DIR SOURCE`.

        Raises:
            RefusedError: there is a second one.
        """
        words = list(self.operands)
        bare = [i for i, word in enumerate(words) if word[:1] != "-" and (i == 0 or words[i - 1] not in CONFIG_DIR)]
        first = bare[0] if bare else 0
        source = words[first]
        key, _, value = source.partition("=")
        if key == "run.dir" and value and not os.path.exists(source):
            raise RefusedError(
                "The run is named without a key",
                place=f"{self.name} {source}",
                suggestion=f"Did you mean {self.name} {value}?",
            )
        second = next((words[i] for i in bare[1:] if "=" not in words[i] and os.path.exists(words[i])), None)
        if second is not None and os.path.exists(source):
            suggestion = "Type a command for each."
            if self.name == "predict":
                suggestion = f"Did you mean ddpexp predict {shlex.join([source, '--input', second])}?"
            if "--input" in self.options:
                suggestion = "--input takes one file, or a folder of them; type a command for each file, or its folder."
            place = f"{self.name} {source} {second}"
            raise RefusedError("The command takes one directory or file", place=place, suggestion=suggestion)
        return source, words[:first] + words[first + 1 :]


def _number(text: str) -> Any:
    """Return a number, None for null, or the text itself."""
    if text in ("null", "none"):
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def load(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _explained(option: Option) -> str:
    typed, indent = option.typed, " " * (_COLUMN + 4)
    lines = option.about.split("\n")
    if len(typed) > _COLUMN:
        return "\n".join([f"  {typed}", *(indent + line for line in lines)])
    return "\n".join([f"  {typed:<{_COLUMN}}  {lines[0]}", *(indent + line for line in lines[1:])])
