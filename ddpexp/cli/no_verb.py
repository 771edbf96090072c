"""Words that are no verb, or stand where none can: what to type instead."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise

from ddpexp.cli import verbs
from ddpexp.errors import RefusedError

_WORD = re.compile(r"[A-Za-z][\w-]*")  # neither key=value nor an option
_EXAMPLE = "python -m ddpexp recipe=mnist trainer.gpus=2"


def unknown(argument: str) -> RefusedError | None:
    """Return the error for a first word that is written like a command and is none."""
    typed = shlex.quote(argument)
    directory = RefusedError(
        "is a directory",
        place=argument,
        suggestion=f"Say first what to do with it, such as ddpexp status {typed} or ddpexp resume {typed}.",
    )
    if "/" in argument and os.path.isdir(argument):
        return directory
    if not _WORD.fullmatch(argument) or argument in verbs.NAMES:
        return None
    if argument.lower() == "train":
        reason = "is not a command, for ddpexp trains when it gets none"
        return RefusedError(reason, place=argument, suggestion=f"Leave it out, as in {_EXAMPLE}.")
    other = next((verb.name for verb in verbs.VERBS if argument.lower() in verb.also), None)
    near = [other] if other else difflib.get_close_matches(argument.lower(), verbs.NAMES, n=1, cutoff=0.7)
    if near:
        return RefusedError("is not a command", place=argument, suggestion=f"Did you mean ddpexp {near[0]}?")
    if os.path.isdir(argument):
        return directory
    lines = "\n".join(verbs.listed())
    return RefusedError(
        "is not a command",
        place=argument,
        suggestion=f"To train, write key=value, as in {_EXAMPLE}. The commands are:\n{lines}",
    )


def misplaced(argv: Sequence[str]) -> RefusedError | None:
    """Return the error for a command behind another argument; None where there is none."""
    for before, word in pairwise(argv):
        if word in verbs.NAMES and not before.startswith("-"):
            reason = "is a command and stands first"
            return RefusedError(reason, place=word, suggestion=f"Type python -m ddpexp {word} ... .")
    return None
