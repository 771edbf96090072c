"""Read YAML with PyYAML's safe loader: the C implementation, if PyYAML has it, is ten times as fast."""

from __future__ import annotations

import re
from typing import Any

import yaml

RANGE = re.compile(r"\d+:\d+")
"""A text such as 5:15, which YAML reads as a number to the base of 60, and Hydra, where it is typed, as a text."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str) -> Any:
    """Return the values of a text. Raises yaml.YAMLError and ValueError."""
    return yaml.load(text, Loader=LOADER)
