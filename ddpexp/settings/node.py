"""A section that names its object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Node:
    """The full name or the key of a class or function (`_target_`), and the arguments of the call."""

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
