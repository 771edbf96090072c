"""What tests of launching share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Give back at the end what a test has opened."""
    with ExitStack() as stack:
        yield stack
