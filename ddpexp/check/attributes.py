"""What the objects of a recipe hold besides parameters and buffers, and what of it has changed."""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddpexp.compat.autograd import version

_MODULE = frozenset(vars(nn.Module()))  # parameters, buffers, hooks: what torch keeps itself
_SMALL = 1 << 16  # elements of a tensor that is compared by value
_DEPTH = 4


class Attributes:
    """The attributes of some objects at one moment."""

    def __init__(self, objects: Sequence[Any]) -> None:
        """Read the attributes of the objects, of their submodules, and the plain globals of their modules."""
        self._kept: list[Any] = []  # so that no id is used again
        self._identities: dict[str, tuple[Any, str, Any]] = {}  # owner, name there, what the value is compared by
        for name, owner, attribute, value in _attributes(objects):
            self._identities.setdefault(name, (owner, attribute, self._identity(value, _DEPTH)))

    def changed(self, later: Attributes) -> dict[str, str]:
        """Return the attributes that differ later, each with the file and line that may set it."""
        return {
            name: place_of(owner, attribute)
            for name, (owner, attribute, value) in later._identities.items()
            if name not in self._identities or self._identities[name][2] != value
        }

    def _identity(self, value: Any, depth: int) -> Any:
        """Return a value that differs when this one has changed."""
        self._kept.append(value)
        if isinstance(value, bool | int | float | complex | str | bytes | None):
            return repr(value)
        if isinstance(value, Tensor):
            small = value.numel() <= _SMALL and value.layout is torch.strided
            return value.tolist().__repr__() if small else (id(value), version(value))
        if isinstance(value, nn.Module):
            return [self._identity(tensor, 1) for tensor in value.state_dict().values() if isinstance(tensor, Tensor)]
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if depth == 0 or isinstance(value, FunctionType | MethodType | ModuleType | type):
            return id(value)
        if isinstance(value, Mapping):
            return [(repr(key), self._identity(inner, depth - 1)) for key, inner in list(value.items())[:_SMALL]]
        if isinstance(value, list | tuple | set | frozenset):
            return [self._identity(inner, depth - 1) for inner in list(value)[:_SMALL]]
        if isinstance(value, np.ndarray):
            return value.tobytes() if value.size <= _SMALL else id(value)
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, random.Random):
            return value.getstate()
        inner = getattr(value, "__dict__", None)
        return [id(value), self._identity(inner, depth - 1) if isinstance(inner, dict) else None]


def _attributes(objects: Sequence[Any]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the name of each attribute as a message shows it, its owner, its own name and the value."""
    modules = {}
    for root in objects:
        parts = root.named_modules() if isinstance(root, nn.Module) else [("", root)]
        for place, part in parts:
            if type(part).__module__.partition(".")[0] in ("torch", "ddpexp", "builtins"):
                continue
            modules[type(part).__module__] = sys.modules.get(type(part).__module__)
            values = getattr(part, "__dict__", None)
            for attribute, value in values.items() if isinstance(values, dict) else ():
                if not (isinstance(part, nn.Module) and attribute in _MODULE):
                    of = f" of {place}" if place else ""
                    yield f"{type(part).__qualname__}.{attribute}{of}", part, attribute, value
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()) if module is not None else ():
            if not attribute.startswith("__") and isinstance(value, bool | int | float | str | list | dict | set):
                yield f"{name}.{attribute}", module, attribute, value


def place_of(owner: Any, attribute: str) -> str:
    """Return the file and line that sets an attribute outside of `__init__`, else that of the owner's class."""
    subjects = [owner] if inspect.ismodule(owner) else list(type(owner).__mro__)
    assigned = re.compile(
        rf"\b{re.escape(attribute)}(\[[^\]]*\])?\s*(//|[-+*/|&])?=(?!=)|\b{re.escape(attribute)}\.(append|add|update)\b"
    )
    for subject in subjects:
        try:
            lines, first = inspect.getsourcelines(subject)
        except (OSError, TypeError):
            continue
        function = ""
        for number, line in enumerate(lines, start=max(first, 1)):
            if match := re.match(r"\s*(async )?def (\w+)", line):
                function = match[2]
            if function not in ("", "__init__") and assigned.search(line.partition("#")[0]):
                return f"{inspect.getsourcefile(subject)}:{number}"
    try:
        return f"{inspect.getsourcefile(subjects[0])}:{max(inspect.getsourcelines(subjects[0])[1], 1)}"
    except (OSError, TypeError):
        return str(subjects[0])
