"""A verb as a command line calls it."""

from __future__ import annotations

from ddpexp.cli import verbs
from ddpexp.cli.verb import Call


def call(name: str, *words: str) -> Call:
    """Return what `ddpexp NAME WORDS` asks for."""
    return verbs.BY_NAME[name].parse(words, ["ddpexp", name, *words])
