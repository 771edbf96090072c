"""What the command gives to its workers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ddpexp.launch import Layout


@dataclass(frozen=True)
class Request:
    """The argument of a worker."""

    layout: Layout
    facts: str  # a path that holds the facts of this host; empty for the host of rank zero
    answer: str  # a path that rank zero appends its answers to, an object per line
    timeout_seconds: float  # of joining and of collectives

    @classmethod
    def of(cls, text: str) -> Request:
        """Parse a worker's argument."""
        values = json.loads(text)
        return cls(**{**values, "layout": Layout(**values["layout"])})

    def __str__(self) -> str:
        """Return it as a worker's argument."""
        return json.dumps(asdict(self))
