"""YAML read by libyaml instead of OmegaConf 2.3's parser in Python, which takes ten times as long.

40 ms of every command.

OmegaConf 2.4 reads with libyaml itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import yaml
from omegaconf import _utils

from ddpexp.config.versions import OMEGACONF_2_4, get_yaml_loader


@contextmanager
def quick_yaml() -> Iterator[None]:
    """Have OmegaConf read with libyaml, where PyYAML has it: the same values, and of what is wrong the same words."""
    if OMEGACONF_2_4 or not yaml.__with_libyaml__:
        yield
        return
    _utils.get_yaml_loader = _quick_loader  # OmegaConf 2.3 looks it up for each text
    try:
        yield
    finally:
        _utils.get_yaml_loader = get_yaml_loader


@cache
def _quick_loader() -> Any:
    slow: Any = get_yaml_loader()

    class Quick(yaml.CSafeLoader, slow):  # type: ignore[misc]
        """What OmegaConf makes of the nodes, from another parser's."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._stream = stream

        def get_single_data(self) -> Any:
            try:
                return super().get_single_data()
            except yaml.YAMLError:
                if not isinstance(self._stream, str):
                    self._stream.seek(0)
                return slow(self._stream).get_single_data()  # says it in the words that are known

    return Quick
