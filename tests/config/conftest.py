"""A composed experiment, whose keys tests walk."""

from __future__ import annotations

from typing import Any

import pytest

from ddpexp.config.compose import compose
from ddpexp.system.yaml_text import load_yaml


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    composed = compose(["recipe=mnist", "trainer.gpus=1"])
    tree: dict[str, Any] = load_yaml(composed.text)
    return tree
