"""Python imports this at its start, where PYTHONPATH has this folder; see the package's docstring."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _show_gpus(hardware: Any) -> None:
    from ddpexp.system.gpus import Device

    devices = tuple(Device(f"GPU-{number}", f"GPU-{number}", str(number)) for number in range(8))
    hardware.visible_devices = lambda *_: devices


def _join_by_nccl(world: Any) -> None:
    from tests.apart.group import join_by_nccl

    join_by_nccl(world)


class _Finder:
    """Changes modules as soon as they are imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder({"ddpexp.system.hardware": _show_gpus, "ddpexp.distributed.world": _join_by_nccl}))
