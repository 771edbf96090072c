"""All mistakes in the overrides of one command at once, each with a sentence of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from ddpexp.config.arguments import Arguments
from ddpexp.config.folders import our_options
from ddpexp.config.habits import answered_at_once
from ddpexp.config.tree import SweepInFileError
from ddpexp.errors import RefusedError, SweptError

T = TypeVar("T")


def with_all_mistakes(compose: Callable[[Arguments], T], arguments: Arguments) -> T:
    """Compose what a command asks for.

    Raises:
        RefusedError: the first mistake, and in `further` those in other overrides.
    """
    try:
        return compose(arguments)
    except (SweepInFileError, SweptError):
        raise
    except RefusedError as error:
        error.further = tuple(_further(error, compose, arguments))
        raise


def _further(
    error: RefusedError, compose: Callable[[Arguments], object], arguments: Arguments
) -> Iterator[RefusedError]:
    """Yield the errors of the command without the overrides that were refused before, as far as they name others."""
    left = arguments.overrides
    while wrong := _wrong(error, left):
        if error.key == "recipe":  # whatever else is typed belongs to it
            return
        at_once = answered_at_once(left)
        answered = {*wrong, *(at_once if wrong[0] in at_once else ())}
        if error.key in our_options():
            answered |= {typed for typed in left if _key(typed).startswith(f"{error.key}.")}
        left = tuple(typed for typed in left if typed not in answered)
        try:
            compose(replace(arguments, overrides=left))
            return
        except (SweepInFileError, SweptError):
            return
        except RefusedError as another:
            error = another
        if _wrong(error, left):
            yield error


def _wrong(error: RefusedError, overrides: tuple[str, ...]) -> list[str]:
    """Return the overrides that an error is about."""
    return [typed for typed in overrides if _key(typed) == error.key]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
