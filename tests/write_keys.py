"""Write docs/keys.md anew: `python -m tests.write_keys`. It lists every key, from its declaration and from conf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpexp.cli.keys import Catalogue, KeyHelp, typed
from ddpexp.config.compare import resume_rule
from ddpexp.config.compose import overview
from ddpexp.config.declared import FIELDS, declared, default_of
from ddpexp.config.keys import MISSING
from ddpexp.settings.key import Key
from tests.conftest import ROOT

FILE = ROOT / "docs/keys.md"
GROUPS = ("strategy", "launcher", "data", "scheduler", "logger", "callbacks")  # their options have keys of their own
HEAD = """# Keys

Every key of the configuration, with its default, the values that it takes, whether a run can be resumed with another
value, and what other frameworks call it. A recipe sets some of them: `ddpexp help trainer recipe=cifar10` shows its
values, and `ddpexp help seed` explains one key. `ddpexp schema` prints the same for editors. This page is written by
`python -m tests.write_keys` from the declarations beside the fields and from the comments in [conf](../conf).

On resume: *free* keys can change at any time, *typed* ones when the new value is typed in the command that resumes, and
*fixed* ones never, because the steps so far depend on them.
"""
NAMES_OF_PARTS = ("_target_", "kind", "prepare")  # which the option itself says
ALL_DATA = "Keys of every kind of data."
COLUMNS = "| key | default | values | on resume | elsewhere | meaning |\n|---|---|---|---|---|---|"


def tables() -> Iterator[str]:
    """Yield a table for each section, and one for each option with keys of its own."""
    catalogue = Catalogue(overview([], None))
    for section in FIELDS:
        if section != "recipe":  # it has no default to show
            keys = [key for key in catalogue.keys(section) if key.name in declared()]
            yield from _table(section, catalogue.about(section) if section != "data" else ALL_DATA, keys)
    for group in GROUPS:
        for name in catalogue.options(group):
            option = catalogue.option(group, name)
            keys = [key for key in option.keys if key.name.rpartition(".")[2] not in NAMES_OF_PARTS]
            yield from _table(f"{group}={name}", option.about, keys)


def _table(title: str, about: str, keys: Sequence[KeyHelp]) -> Iterator[str]:
    rows = [_row(key) for key in keys if not key.is_section]
    if rows:
        yield "\n\n".join(filter(None, (f"## {title}", _plain(about), "\n".join([COLUMNS, *rows]))))


def _row(key: KeyHelp) -> str:
    declaration, _ = declared().get(key.name, (Key(), None))
    default = default_of(key.name)
    rule = resume_rule(key.name, {name: inner for name, (inner, _) in declared().items()})
    on_resume = f"fixed: {rule.fixed_because}" if rule.fixed_because else rule.on_resume
    elsewhere = ", ".join(f"`{word}`" for word in declaration.also.split())
    meaning = key.meaning.partition("\nrecipe=")[0]  # what the recipe that was composed adds
    shown = typed(key.default if default is MISSING else default)
    cells = (f"`{key.name}`", shown, key.kind, on_resume, elsewhere, _plain(meaning))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _plain(text: str) -> str:
    """Return a comment as one line of Markdown."""
    return " ".join(text.split()).replace("*", "\\*").replace("<", "&lt;")


def text() -> str:
    return "\n\n".join([HEAD.rstrip(), *tables()]) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
