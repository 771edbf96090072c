"""Words that are no verb, or stand where none can: what to type instead."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

from ddpexp.cli import verbs

_WORD = re.compile(r"[A-Za-z][\w-]*")  # neither key=value nor an option
_EXAMPLE = "python -m ddpexp recipe=mnist trainer.gpus=2"


def unknown(argument: str) -> str | None:
    """Say that a first word is no command, and which there are; None where it is not written like one."""
    named = shlex.quote(argument)
    directory = (
        f"{argument} is a directory: say first what to do with it, such as ddpexp status {named} or ddpexp resume "
        f"{named}."
    )
    if "/" in argument and os.path.isdir(argument):
        return directory
    if not _WORD.fullmatch(argument) or argument in verbs.NAMES:
        return None
    if argument.lower() == "train":
        return f"{argument} is not a command, for ddpexp trains when it gets none: leave it out, as in {_EXAMPLE}."
    suggestion = next((verb.name for verb in verbs.VERBS if argument.lower() in verb.also), None)
    near = [suggestion] if suggestion else difflib.get_close_matches(argument.lower(), verbs.NAMES, n=1, cutoff=0.7)
    if near:
        return f"{argument} is not a command. Did you mean ddpexp {near[0]}?"
    if os.path.isdir(argument):
        return directory
    lines = "\n".join(verbs.listed())
    return f"{argument} is not a command. To train, write key=value, as in {_EXAMPLE}. The commands are:\n{lines}"


def misplaced(argv: Sequence[str]) -> str | None:
    """Say that a verb stands first; None where no other word is one."""
    for before, word in pairwise(argv):
        if word in verbs.NAMES and not before.startswith("-"):
            return f"{word} is a command and stands first: python -m ddpexp {word} ... ."
    return None
