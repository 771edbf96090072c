"""The command `ddpexp completion`: a shell's script, and the answers to what that asks.

Which words can stand at the cursor. The line so far travels in the environment, which no other user sees. The scripts
leave every other module of Python to what completed it before.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import yaml

from ddpexp.cli import verbs
from ddpexp.cli.topics import TOPICS
from ddpexp.cli.verb import CONFIG_DIR, MULTIRUN, Call, Option, load
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.system.yaml_text import load_yaml

if TYPE_CHECKING:
    from ddpexp.cli.keys import Catalogue, KeyHelp

SHELLS = ("bash", "zsh", "fish")
LINE = "_DDPEXP_LINE"  # the command line up to the cursor
_BREAKS = "_DDPEXP_BREAKS"  # of bash: the characters at which readline takes a word apart
_SECONDS = 10.0  # after which a shell gets no answer: it waits
_ENTRIES = 10_000  # of a folder that are looked at
_LONGEST = 60  # characters of what is said beside a word
_TRAINING_OPTIONS = ("--config-dir", "--multirun", "--cfg", "--help", "--version")
_PATHS = ("run.dir", "run.init_from", "data.root", "hydra.sweep.dir", "launcher.python")  # keys whose value is one
_SPECIAL = re.compile(r"[^\w@%+=:,./~^-]")  # to bash and zsh, outside of quotes
_LIKE_A_PATH = re.compile(r"~|\.{0,2}/")


@dataclass(frozen=True)
class Line:
    """What is typed so far, as a shell takes it apart."""

    words: tuple[str, ...]  # the whole ones
    current: str  # the one at the cursor, as far as it is typed
    quote: str  # that is open in it
    kept: str  # how that one is written: what the shell replaces


@dataclass(frozen=True)
class Word:
    """A word that can stand at the cursor."""

    text: str
    about: str = ""
    is_whole: bool = True  # a blank follows, for nothing can be added


def completion(call: Call) -> int:
    """Print the script of a shell, or answer that script: it has put the line into the environment.

    Raises:
        RefusedError: another word than a shell.
    """
    gc.disable()
    if len(call.operands) != 1 or call.operands[0] not in SHELLS:
        raise RefusedError(
            f"completion for which shell? One of {', '.join(SHELLS)}.\n{verbs.BY_NAME[call.name].help()}"
        )
    shell = call.operands[0]
    typed = os.environ.get(LINE)
    if typed is None:
        print(_script(shell), end="")
        return EXIT_DONE
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    line = parse(typed, os.environ.get(_BREAKS, "") if shell == "bash" else "")
    for word in candidates(*_behind_the_program(line)):
        print(_written(word, line, shell))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return EXIT_DONE


def _script(shell: str) -> str:
    """Return what a shell evaluates; it completes the names under which Python is typed, too."""
    text = (Path(__file__).parent / "shells" / f"ddpexp.{shell}").read_text()
    return text.replace("@PYTHONS@", f"python python3 python3.{sys.version_info.minor}")


def _give_up(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_DONE)


def parse(text: str, breaks: str = "") -> Line:
    """Take a line apart as a shell does.

    `breaks` are the characters behind which only the rest of a word is replaced.
    """
    words: list[str] = []
    current = before = kept = quote = ""
    started = escaped = False
    for char in text:
        if escaped:
            current, kept, escaped = current + char, kept + char, False
        elif char == "\\" and quote != "'":
            kept, started, escaped = kept + char, True, True
        elif quote:
            quote = "" if char == quote else quote
            current, kept = (current + char if quote else current), kept + char
            kept = kept if quote else before + kept
        elif char in "'\"":
            quote, started = char, True
            # Readline replaces what stands behind an open quote, and the whole word where it is closed again.
            before, kept = (kept + char, "") if breaks else ("", kept + char)
        elif char.isspace():
            words += [current] if started else []
            current = kept = ""
            started = False
        else:
            current, kept, started = current + char, "" if char in breaks else kept + char, True
    return Line(tuple(words), current, quote, kept)


def _behind_the_program(line: Line) -> tuple[Sequence[str], str]:
    """Return the words that ddpexp gets."""
    words = line.words
    module = next((i for i, pair in enumerate(pairwise(words)) if pair == ("-m", "ddpexp")), None)
    return words[1:] if module is None else words[module + 2 :], line.current


def _written(word: Word, line: Line, shell: str) -> str:
    """Write a word as the script of a shell reads it.

    In bash and zsh quoted, with a blank where nothing can be added.
    """
    about = re.sub(r"\s+", " ", word.about)
    about = about if len(about) <= _LONGEST else f"{about[: _LONGEST - 3]}..."
    if shell == "fish":
        return f"{word.text}\t{about}"
    rest, blank = word.text[len(line.current) :], " " if word.is_whole else ""
    if not line.quote:
        text = line.kept + _SPECIAL.sub(r"\\\g<0>", rest)
    elif shell == "zsh":  # which writes it into the open quote itself
        text = word.text
    else:
        text = f"{line.kept}{rest}{line.quote if word.is_whole else ''}"
    return f"{text}{blank}" + (f"\t{f'  -- {about}' if about else ''}" if shell == "zsh" else "")


def candidates(words: Sequence[str], current: str) -> list[Word]:
    """Return what can stand at the cursor, after `words`; nothing where that cannot be determined."""
    try:
        found = [
            word
            for word in _candidates(list(words), current)
            if word.text.startswith(current) and word.text.isprintable()
        ]
    except (RefusedError, OSError, ValueError, yaml.YAMLError):
        return []
    return list({word.text: word for word in found}.values())


def _candidates(words: list[str], current: str) -> Iterable[Word]:
    verb = verbs.BY_NAME.get(words[0]) if words else None
    options = verb.options if verb is not None else ()
    last = words[-1] if words else ""
    if last in ("--cfg", "-c"):
        return map(Word, ("job", "hydra", "all"))
    name, equals, value = current.partition("=")
    if (values := _option_values(name if equals else last, options, value if equals else current)) is not None:
        return _behind(f"{name}=", values) if equals else values
    if current.startswith("-"):
        return map(Word, _TRAINING_OPTIONS if verb is None else verb.option_names)
    if verb is None:
        beginning = [] if words else [Word(verb.name, verb.summary) for verb in verbs.VERBS]
        return [*beginning, *_overrides(_catalogue(words), current, bool({*MULTIRUN} & set(words)))]
    valued = (*CONFIG_DIR, *(option.name for option in options if option.value))
    bare = [word for before, word in pairwise(words) if word[:1] != "-" and before not in valued]
    if verb.operands == "topics":
        return _topics(_catalogue(words[1:]), current)
    if verb.operands == "overrides":
        return _overrides(_catalogue(words[1:]), current, False)
    if verb.operands == "directories":
        return [*_of_table(current), *_paths(current)]
    if bare:
        is_source = verb.operands in ("run", "weights")
        return _overrides(_of_run(Path(bare[0]), words[1:]), current, False) if is_source else []
    if verb.operands == "shell":
        return map(Word, SHELLS)
    if verb.operands == "weights":
        return _paths(current, lambda path: path.endswith(".safetensors"))
    return [] if verb.operands == "names" else _paths(current)


def _option_values(name: str, options: Sequence[Option], begin: str) -> Iterable[Word] | None:
    """Return the values of the option of that name; None if it is none with known values."""
    if name in CONFIG_DIR:
        return _paths(begin)
    option = next((option for option in options if option.name == name), None)
    if option is None or not option.values:
        return None
    return _paths(begin) if option.values == "paths" else map(Word, load(option.values)())


def _catalogue(words: Sequence[str]) -> Catalogue:
    """Return what can be typed beside the words that choose options; where those are wrong, beside none."""
    from ddpexp.cli.keys import Catalogue
    from ddpexp.config.compose import overview

    directory = None
    for place, word in enumerate(words):
        if word in CONFIG_DIR:
            directory = words[place + 1] if place + 1 < len(words) else None
        elif word.startswith("--config-dir="):
            directory = word.partition("=")[2]
    directory = os.path.expanduser(directory) if directory else None
    choices = [word for word in words if re.fullmatch(r"\+?\w[\w/-]*=[\w.-]+", word)]  # a group's name has no dot
    for tried in ((choices, directory), ([], directory), ([], None)):
        try:
            return Catalogue(overview(*tried))
        except RefusedError:
            continue
    raise RefusedError("ddpexp's own configs cannot be composed.")


def _of_run(run: Path, words: Sequence[str]) -> Catalogue:
    """Return what can be changed in a run; of weights that lie in none, what can be typed for any."""
    from ddpexp.cli.keys import Catalogue
    from ddpexp.config.compose import Overview
    from ddpexp.config.folders import conf_folder
    from ddpexp.system.files import check_yaml

    file = run / "config.yaml"
    if not file.is_file():
        return _catalogue(words)
    check_yaml(file)
    values = load_yaml(file.read_text())
    return Catalogue(Overview(values if isinstance(values, dict) else {}, {}, {}, [conf_folder()]))


def _overrides(catalogue: Catalogue, current: str, multirun: bool) -> Iterator[Word]:
    """Yield groups, sections, keys and values."""
    sign = re.match(r"[+~]*", current)
    prefix = sign[0] if sign else ""
    name, equals, value = current[len(prefix) :].partition("=")
    if not equals:
        for word in _names(catalogue, name, multirun):
            yield Word(f"{prefix}{word.text}", word.about, word.is_whole)
        return
    begin = f"{prefix}{name}="
    if multirun and "[" not in value and "," in value:  # one of several values
        before = value.rpartition(",")[0] + ","
        begin, value = begin + before, value[len(before) :]
    yield from _behind(begin, _values(catalogue, name, value))


def _names(catalogue: Catalogue, begin: str, multirun: bool) -> Iterator[Word]:
    """Yield what stands before = : a group, or a key as far as the next dot."""
    for group in catalogue.groups:
        if catalogue.options(group) != ["default"]:
            yield Word(f"{group}=", f"one of {', '.join(catalogue.options(group))}", False)
    for section in catalogue.sections:
        if section == "sweep" and not multirun:
            continue
        for key in catalogue.keys(section):
            if not key.name.startswith(begin):
                continue
            end = key.name.find(".", len(begin))
            if end >= 0:
                top = key.name[: end + 1]
                yield Word(top, catalogue.about(section) if top == f"{section}." else "", False)
            elif not key.is_section:
                yield Word(f"{key.name}=", _described(key), False)


def _described(key: KeyHelp) -> str:
    return f"({key.typed.partition('=')[2]}) {key.meaning}"


def _values(catalogue: Catalogue, name: str, begin: str) -> Iterable[Word]:
    """Yield what stands behind = ."""
    if name in catalogue.groups:
        return [Word(option, catalogue.option(name, option).about) for option in catalogue.options(name)]
    section = "sweep" if name.startswith("hydra.") else name.partition(".")[0]
    known = catalogue.keys(section) if section in catalogue.values else []
    key = next((key for key in known if key.name == name), None)
    words = [Word(word) for word in key.values] if key is not None else []
    if name in _PATHS or _LIKE_A_PATH.match(begin):
        return [*words, *_paths(begin, lambda _: True)]
    default = key.typed.partition("=")[2] if key is not None else ""
    return [*words, *([Word(default)] if default and default not in (word.text for word in words) else [])]


def _topics(catalogue: Catalogue, current: str) -> Iterator[Word]:
    """Yield what `ddpexp help` explains."""
    name, equals, _ = current.partition("=")
    if equals:
        yield from _behind(f"{name}=", _values(catalogue, name, ""))
        return
    yield from (Word(verb.name, verb.summary) for verb in verbs.VERBS)
    yield from map(Word, TOPICS)
    for section in dict.fromkeys([*catalogue.groups, *catalogue.sections]):
        yield Word(section)
        if "." in current and section in catalogue.values:
            yield from (Word(key.name, _described(key)) for key in catalogue.keys(section))


def _of_table(current: str) -> Iterable[Word]:
    if current.startswith("sweep.mode="):
        return [Word("sweep.mode=min"), Word("sweep.mode=max")]
    return [Word(f"sweep.{name}=", is_whole=False) for name in ("objective", "mode")] if current else []


def _behind(begin: str, words: Iterable[Word]) -> Iterator[Word]:
    yield from (Word(f"{begin}{word.text}", word.about, word.is_whole) for word in words)


def _paths(begin: str, wanted: Callable[[str], bool] | None = None) -> Iterator[Word]:
    """Yield the folders, and the files that are wanted, whose path begins so; a run's folder is a whole word."""
    tail = begin.rpartition("/")[2]
    typed = begin[: len(begin) - len(tail)]
    folder = os.path.expanduser(os.path.expandvars(typed)) or "."
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_ENTRIES), entries, strict=False):
            if not entry.name.startswith(tail) or (entry.name.startswith(".") and not tail.startswith(".")):
                continue
            if entry.is_dir():
                is_run = any(os.path.isfile(os.path.join(entry.path, name)) for name in ("config.yaml", "sweep.yaml"))
                yield Word(f"{typed}{entry.name}{'' if is_run else '/'}", is_whole=is_run)
            elif wanted is not None and wanted(entry.name):
                yield Word(f"{typed}{entry.name}")
