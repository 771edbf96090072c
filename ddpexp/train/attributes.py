"""What the objects of a recipe hold besides parameters and buffers, and what of it has changed."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_MODULE = frozenset(vars(nn.Module()))  # parameters, buffers, hooks: what torch keeps itself
_SMALL = 1 << 16  # elements of a tensor that is compared by value
_DEPTH = 4


class Attributes:
    """The attributes of some objects at one moment."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Read the attributes of the objects, of their submodules, and the plain globals of their modules."""
        self._kept: list[Any] = []  # so that no id is used again
        self._values: dict[str, tuple[Any, Any]] = {}  # the owner, and what its attribute is compared by
        for name, owner, attribute, value in _attributes(objects):
            self._values.setdefault(f"{name}.{attribute}", (owner, self._identity(value, _DEPTH)))

    def changed(self, later: Attributes) -> dict[str, str]:
        """Return the attributes that differ later, each with the file and line that may set it."""
        return {
            name: place_of(owner, name.rpartition(".")[2])
            for name, (owner, value) in later._values.items()
            if name not in self._values or self._values[name][1] != value
        }

    def _identity(self, value: Any, depth: int) -> Any:
        """Return a value that differs when this one has changed."""
        self._kept.append(value)
        if isinstance(value, bool | int | float | complex | str | bytes | None):
            return repr(value)
        if isinstance(value, Tensor):
            small = value.numel() <= _SMALL and value.layout is torch.strided
            return value.tolist().__repr__() if small else (id(value), value._version)
        if isinstance(value, nn.Module):
            return [self._identity(tensor, 1) for tensor in value.state_dict().values() if isinstance(tensor, Tensor)]
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if depth == 0 or callable(value):
            return id(value)
        if isinstance(value, Mapping):
            return [(repr(key), self._identity(inner, depth - 1)) for key, inner in list(value.items())[:_SMALL]]
        if isinstance(value, list | tuple | set | frozenset):
            return [self._identity(inner, depth - 1) for inner in list(value)[:_SMALL]]
        try:
            return pickle.dumps(value)
        except Exception:  # whatever an object of the user raises
            return id(value)


def _attributes(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield a name, the object, the name of its attribute and the value."""
    modules = {}
    for name, root in objects.items():
        parts = root.named_modules() if isinstance(root, nn.Module) else [("", root)]
        for place, part in parts:
            if type(part).__module__.partition(".")[0] in ("torch", "ddpexp", "builtins"):
                continue
            modules[type(part).__module__] = sys.modules.get(type(part).__module__)
            values = getattr(part, "__dict__", None)
            for attribute, value in values.items() if isinstance(values, dict) else ():
                if not (isinstance(part, nn.Module) and attribute in _MODULE):
                    where = f"{name}.{place}" if place else name
                    yield f"{where} ({type(part).__qualname__})", part, attribute, value
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()) if module is not None else ():
            if not attribute.startswith("__") and isinstance(value, bool | int | float | str | list | dict | set):
                yield f"the module {name}", module, attribute, value


def place_of(owner: Any, attribute: str) -> str:
    """Return the file and line that sets an attribute outside of `__init__`, else that of the owner's class."""
    subject = owner if inspect.ismodule(owner) else type(owner)
    try:
        lines, first = inspect.getsourcelines(subject)
        path = inspect.getsourcefile(subject)
    except (OSError, TypeError):
        return subject.__name__
    pattern = re.compile(
        rf"\b{re.escape(attribute)}\b(\[[^\]]*\])?\s*([-+*/|&]|//)?=(?!=)|\b{re.escape(attribute)}\.(append|add|update)\b"
    )
    inside_init, found = False, None
    for number, line in enumerate(lines):
        if match := re.match(r"\s*def (\w+)", line):
            inside_init = match[1] == "__init__"
        if not inside_init and line[:1].isspace() and pattern.search(line.partition("#")[0]):
            found = number
            break
    return f"{path}:{max(first, 1) + (found or 0)}"
