"""Ask for the fields of an error, so that its prose can be mended in one place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ddpexp.errors import EXIT_REFUSED, DdpexpError, RefusedError
from tests.conftest import Done


def is_about(error: BaseException, expected: str) -> bool:
    """Return whether an error is about `KEY`, `KEY=VALUE` (as typed) or a place that ends so.

    Behind `: ` stands a word that its reason or suggestion must have; of an error without a
    subject, both are words.
    """
    assert isinstance(error, DdpexpError), error
    subject, _, word = expected.partition(": ")
    prose = f"{error.reason} {error.suggestion}".lower()
    if error.key is None and error.place is None:
        return expected.lower() in prose or (subject.lower() in prose and word.lower() in prose)
    typed = error.key if error.typed_value is None else f"{error.key}={error.typed_value}"
    if expected == typed:
        return True
    is_subject = subject in ("", error.key, typed) or str(error.place).endswith(subject)
    return is_subject and word.lower() in prose


def located(code: Any) -> str:
    """Return how an error names a function or class of a test: with its file and line."""
    return f"{code.__qualname__} ({inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]})"


@contextmanager
def refused(expected: str, kind: type[DdpexpError] = RefusedError) -> Iterator[pytest.ExceptionInfo[DdpexpError]]:
    """Expect an error about what is expected (`is_about`)."""
    with pytest.raises(kind) as caught:
        yield caught
    assert is_about(caught.value, expected), f"{caught.value.as_dict()} is not about {expected}"
    del caught  # its traceback has this frame: without the cycle the objects of the call are freed at once


def command_refused(done: Done, expected: str, out: str | None = "") -> None:
    """Check that a command was refused: with `out` on stdout, None for anything, and a last line about `expected`.

    `expected` is as for `is_about`. What a line is about stands at its beginning: a place with the folders above it
    or in the parentheses of its checkpoint, and behind KEY=VALUE or a verb with its argument where both are there.
    """
    assert (done.code, done.out) == (EXIT_REFUSED, done.out if out is None else out), (done.code, done.out, done.err)
    assert "Traceback" not in done.err, done.err
    line = done.err.splitlines()[-1]
    subject, _, word = expected.partition(": ")
    before = r"(([a-z]+ )?\S+: )?(the checkpoint of step \d+ \()?(\S*/)?"
    begin = re.match(rf"ddpexp: {before}{re.escape(subject)}(?=[:= )])", line)
    assert begin is not None, f"{done.err} is not about {subject}"
    assert word.lower() in line[begin.end() :].lower(), f"{done.err} does not say {word}"
