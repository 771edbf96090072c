"""The answers to `--help` and `ddpexp help`: what to type first, then every key; or one part."""

from __future__ import annotations

import gc
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ddpexp.cli import verbs
from ddpexp.cli.keys import Catalogue, KeyHelp, OptionHelp, nearest
from ddpexp.cli.topics import TOPICS
from ddpexp.cli.verb import Call
from ddpexp.config.arguments import Arguments
from ddpexp.config.build import did_you_mean
from ddpexp.config.compose import overview
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.system.terminal import show

_FIRST = """\
usage: ddpexp [COMMAND] [group=option ...] [key=value ...] [--config-dir DIR]

Without a command ddpexp trains one experiment on any number of workers:

    python -m ddpexp recipe=mnist trainer.gpus=2
    python -m ddpexp --config-dir mine/conf recipe=mine optimizer.lr=0.01
    python -m ddpexp -m recipe=mnist optimizer.lr=0.01,0.1

The commands (ddpexp help COMMAND explains one):
{commands}

The options of a training:
  --config-dir DIR  your own groups and options; the code beside DIR is trusted
  -m, --multirun    a sweep: one run for each of the values in key=a,b
  --cfg job         print the whole configuration, and train nothing
  -h, --help        every group and key, as the other arguments make them
  --version         the version"""
_MORE = "ddpexp --help shows every group and key, ddpexp help PART explains one."
_PARTS = """\
ddpexp help launcher explains all options of a group, chosen or not; ddpexp help
trainer a section, and ddpexp help trainer.seed or ddpexp help seed a key."""
_WIDEST, _NARROWEST = 100, 40
_KIND = 44  # the column of what a value may be


def first() -> str:
    """Return what to type first."""
    return f"{_beginning()}\n\n{_MORE}"


def answer_topics(call: Call) -> int:
    """Explain the operands of `ddpexp help`."""
    return explain(call.operands, by_name=True)


def explain(arguments: Sequence[str], by_name: bool) -> int:
    """Print the help of the verbs and topics among the arguments, then the answer to the others.

    Return the exit code.
    """
    gc.disable()  # nothing lives long here: a tenth of the time
    named = [argument for argument in arguments if argument in verbs.NAMES or (by_name and argument in TOPICS)]
    for name in named:
        show(TOPICS[name] if name in TOPICS else verbs.BY_NAME[name].help())
    others = [argument for argument in arguments if argument not in named]
    if others or not named:
        show(answer(others, by_name))
    return EXIT_DONE


def answer(argv: Sequence[str], by_name: bool) -> str:
    """Return every group and key as the overrides make them, or the parts that the arguments name.

    `by_name` is for `ddpexp help`, where every argument names a part, `launcher=slurm` too; after `--help` one without
    = does.

    Raises:
        RefusedError: arguments that cannot be composed, or a part that is not known.
    """
    typed = Arguments.of(argv)
    arguments, directory = typed.overrides_without_mode, typed.config_dir
    catalogue = Catalogue(overview([], directory)) if by_name else None
    if catalogue is None:
        choices = [argument for argument in arguments if "=" in argument or argument[:1] == "~"]
    else:
        choices = [
            argument for argument in arguments if "=" in argument and argument.partition("=")[0] in catalogue.groups
        ]
    if catalogue is None or choices:
        catalogue = Catalogue(overview(choices, directory))
    parts = arguments if by_name else [argument for argument in arguments if argument not in choices]
    for group, option in itertools.pairwise(parts):
        if group in catalogue.groups and option in catalogue.options(group):
            raise RefusedError(
                "names a group and its option",
                place=f"help {group} {option}",
                suggestion=f"Type help {group}={option}.",
            )
    return "\n\n".join(_part(catalogue, argument) for argument in parts) if parts else _everything(catalogue)


def _everything(catalogue: Catalogue) -> str:
    width = max(map(len, catalogue.groups))
    groups = [
        line
        for group in catalogue.groups
        for line in _wrapped(", ".join(_marked(catalogue, group)), f"  {group:<{width}}  ", " " * (width + 4))
    ]
    keys = "\n\n".join(_section(catalogue, name) for name in catalogue.sections)
    return "\n".join([
        _beginning(), "", "The groups, each with its options; * is chosen now (group=option):", *groups, "", _PARTS, "",
        "Every key, with its value now, what it may be, and what it means (key=value):", "", keys,
    ])  # fmt: skip


def _beginning() -> str:
    return _FIRST.format(commands="\n".join(verbs.listed()))


def _part(catalogue: Catalogue, argument: str) -> str:
    name, equals, option = argument.partition("=")
    name = name.lstrip("+~")
    if name in catalogue.groups:
        if equals and option in catalogue.options(name):
            return _option(catalogue.option(name, option), name in catalogue.values)
        return _group(catalogue, name)
    if name in catalogue.values:
        return _section(catalogue, name)
    known = [key for section in catalogue.sections for key in catalogue.keys(section)]
    found = nearest(name, known)
    if found:
        return "\n".join(map(_key, found))
    choosable = list(_all_options(catalogue))
    elsewhere = [(one, key) for one in choosable for key in nearest(name, one.keys)]
    if elsewhere:
        return "\n\n".join(f"with {one.group}={one.name}:\n{_key(key)}" for one, key in elsewhere)
    keys = [*known, *(key for one in choosable for key in one.keys)]
    names = [*verbs.NAMES, *TOPICS, *catalogue.groups, *catalogue.values, *(key.name for key in keys)]
    raise RefusedError(
        "is not a command, group, option or key", place=f"help {argument}", suggestion=_near(name, names)
    )


def _group(catalogue: Catalogue, name: str) -> str:
    options = [catalogue.option(name, one) for one in catalogue.options(name)]
    is_section = name in catalogue.values
    if is_section and len(options) == 1:
        return _section(catalogue, name)
    head = _lines(f"{name}: a group; {name}=OPTION chooses one of {', '.join(_marked(catalogue, name))}.", indent="")
    of_options = {key.name for one in options for key in one.keys}
    common = (
        [key for key in catalogue.keys(name) if key.name not in of_options] if is_section and name != "recipe" else []
    )
    whatever = [_titled("Whichever is chosen", "", common)] if common else []
    return "\n\n".join([head, *whatever, *(_option(one, is_section) for one in options)])


def _all_options(catalogue: Catalogue) -> Iterator[OptionHelp]:
    for group in catalogue.groups:
        for name in catalogue.options(group):
            yield catalogue.option(group, name)


def _near(name: str, names: Iterable[str]) -> str:
    near = did_you_mean(name, dict.fromkeys(names), "ddpexp help ")
    return near if near.startswith("Did") else "ddpexp --help shows all."


def _marked(catalogue: Catalogue, group: str) -> list[str]:
    return [
        f"{name}*" if name in (catalogue.chosen(group) or "").split(",") else name for name in catalogue.options(group)
    ]


def _section(catalogue: Catalogue, name: str) -> str:
    chosen = catalogue.chosen(name)
    if chosen in (None, "default"):
        title = name
    elif "," in chosen:
        title = f"{name}=[{chosen}]"
    else:
        title = f"{name}={chosen}"
    return _titled(title, catalogue.about(name), catalogue.keys(name))


def _option(option: OptionHelp, in_tree: bool) -> str:
    title = f"{option.group}={option.name}"
    chooses = f"It chooses {', '.join(option.chooses)}." if option.chooses else ""
    return _titled(title if in_tree else f"+{title}", "\n".join(filter(None, [option.about, chooses])), option.keys)


def _titled(title: str, about: str, keys: Sequence[KeyHelp]) -> str:
    return "\n".join(filter(None, [_lines(about, f"{title}: ") if about else f"{title}:", *map(_key, keys)]))


def _key(key: KeyHelp) -> str:
    line = f"  {key.typed}"
    if key.kind:
        beside = [f"{line:<{_KIND - 2}}  {key.kind}", f"{line}  {key.kind}"]
        line = next((one for one in beside if len(one) <= _width()), f"{line}\n{_lines(key.kind, indent=' ' * 6)}")
    return f"{line}\n{_lines(key.meaning, indent=' ' * 6)}" if key.meaning else line


def _lines(text: str, title: str = "", indent: str = "  ") -> str:
    """Wrap a text behind a title; its own line breaks stay, and what is indented there."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        margin = indent + " " * (len(paragraph) - len(paragraph.lstrip()))
        lines += _wrapped(paragraph.strip(), title if title and not lines else margin, margin) or [""]
    return "\n".join(lines)


def _wrapped(text: str, begin: str, then: str) -> list[str]:
    return textwrap.wrap(
        text, _width(), initial_indent=begin, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def _width() -> int:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    return max(_NARROWEST, min(_WIDEST, columns))
