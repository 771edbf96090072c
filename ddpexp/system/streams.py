"""Texts that leave a process: standard output, standard error, and files that grow by lines, with secrets masked."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import TextIO

from ddpexp.system.secrets import masked


class MaskedText(io.TextIOWrapper):
    """A stream that masks the secrets in each text that is written to it.

    A reader that goes away, as in `ddpexp schema | head`, is no error.
    """

    def write(self, text: str, /) -> int:
        """Write a text; return its length."""
        with suppress(BrokenPipeError):
            super().write(masked(text))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with suppress(BrokenPipeError):
            super().flush()


def mask_standard_streams() -> None:
    """Mask the output of this process and its forks from now on, except for bytes that bypass Python's streams."""
    sys.stdout, sys.stderr = _masked(sys.stdout), _masked(sys.stderr)


def _masked(stream: TextIO) -> TextIO:
    """Return a stream for the same descriptor; one that is not Python's own, as in a notebook, stays as it is."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    # A new one, since the stream remembers whether its descriptor was a file when it was made.
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    return MaskedText(
        raw if stream.write_through else io.BufferedWriter(raw), stream.encoding, stream.errors,
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip
