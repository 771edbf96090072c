"""Keep torch's compiler out of runs that do not compile: half of torch's import time, for calls that do nothing.

Every optimizer step, every DistributedDataParallel and more say `import torch._dynamo`, to ask it for a graph break or
to keep a function out of compiled graphs. Without compilation the answers are known, and a stand-in gives them. It
gives way to the real module at any other question, and before any module of torch is imported that is not there yet. So
no module of torch ever sees it while being imported: each finds the compiler as in a program that has made an optimizer
before. What a later torch asks differently costs the time of that import, and nothing else.
"""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

_NAME = "torch._dynamo"
_PACKAGES = ("torch", "functorch", "triton")  # what the compiler imports, or is imported by, begins with one of these
_FIRST_STEP = (
    "torch.profiler._cupti_monitor",
    "torch.nested._internal.nested_tensor",
)  # what any training imports there


def defer() -> None:
    """Put the stand-in where the compiler would be imported; does nothing when it is already, or is configured.

    Whatever else of torch is needed should be imported before, and must not be in the middle of that.
    """
    configured = any(name.startswith("TORCHDYNAMO") for name in os.environ)
    if _NAME in sys.modules or configured:
        return
    for name in _FIRST_STEP:
        with suppress(ImportError):  # another version's
            importlib.import_module(name)
    standin = _StandIn()
    sys.modules[_NAME] = standin
    torch._dynamo = standin
    sys.meta_path.insert(0, standin._finder)


class _StandIn(types.ModuleType):
    """The known answers, and the way to the real module for every other question."""

    _finder: _Finder
    _kept_out: list[types.FunctionType]
    _lock: threading.Lock
    _is_gone: bool

    def __init__(self) -> None:
        super().__init__(_NAME)
        spec = importlib.machinery.PathFinder.find_spec(_NAME, torch.__path__)
        assert spec is not None
        self.__dict__.update(
            # What is read by those who look through all modules, such as `inspect`.
            __spec__=spec, __file__=spec.origin, __loader__=spec.loader, __package__=_NAME,
            __path__=list(spec.submodule_search_locations or ()),
            _finder=_Finder(self), _kept_out=[], _lock=threading.Lock(), _is_gone=False,
        )  # fmt: skip

    def graph_break(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: there is no graph."""
        if self._is_gone:
            self._real().graph_break(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if not self._is_gone:
            known = _ANSWERS.get((sys._getframe(1).f_globals.get("__name__"), name))
            if known is not None:
                return known(self)
            if name.startswith("__") and name != "__all__":  # looked for in all modules
                raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._real(), name)

    def __dir__(self) -> list[str]:
        return dir(self._real())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._real().__reduce_ex__(protocol)

    def _real(self) -> types.ModuleType:
        self.give_way()
        return importlib.import_module(_NAME)  # waits while another thread imports it

    def give_way(self) -> None:
        """Import the real module in place of this one, and let torch ask it about the functions.

        That it has asked us about.

        Of several threads the first one imports; the others continue, as where no stand-in was.
        """
        with self._lock:
            if self._is_gone:
                return
            self.__dict__["_is_gone"] = True
            sys.meta_path.remove(self._finder)
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
            if torch.__dict__.get("_dynamo") is self:
                del torch._dynamo
        for function in self._kept_out:
            function.__dict__.pop("__dynamo_disable", None)
        importlib.import_module(_NAME)

    def _disable(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """Return the function itself: nothing compiles it. torch remembers this answer, until we give way."""
        if self._is_gone or not isinstance(function, types.FunctionType):
            return self._real().disable(function, *arguments, **named)
        self._kept_out.append(function)
        return function


class _Part:
    """A submodule as far as torch asks it in a run that does not compile; the real one for everything else."""

    def __init__(self, standin: _StandIn, name: str, known: str, answer: Any) -> None:
        self._standin, self._name, self._known, self._answer = standin, name, known, answer

    def __getattr__(self, name: str) -> Any:
        if name == self._known and not self._standin._is_gone:
            return lambda: self._answer
        return getattr(getattr(self._standin._real(), self._name), name)


# What is answered, by who asks: anybody else may keep the answer for when something is compiled.
_ANSWERS: dict[tuple[Any, str], Callable[[_StandIn], Any]] = {
    ("torch._compile", "disable"): lambda standin: standin._disable,
    ("torch.nn.parallel.distributed", "utils"): lambda standin: _Part(
        standin, "utils", "get_optimize_ddp_mode", "ddp_optimizer"  # the default
    ),
    ("torch.distributed.distributed_c10d", "trace_rules"): lambda standin: _Part(
        standin, "trace_rules", "clear_lru_cache", None  # nothing is cached
    ),
}  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder):
    """Notice the import of anything that may want the compiler, which must be there first."""

    def __init__(self, standin: _StandIn) -> None:
        self._standin = standin

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Import the compiler; hand out what it has imported itself, and leave the rest to the next finder."""
        if not name.startswith(_PACKAGES):
            return None
        is_reload = name in sys.modules
        self._standin.give_way()
        module = sys.modules.get(name)
        if is_reload or module is None or module.__spec__ is None:
            return None
        spec = copy.copy(module.__spec__)
        spec.loader = _Loaded(module, module.__spec__)
        module.__spec__ = spec  # Python prefers it to the one that is returned
        return spec


class _Loaded(importlib.abc.Loader):
    """A module that is there already: importing it again would make a second one."""

    def __init__(self, module: types.ModuleType, spec: importlib.machinery.ModuleSpec) -> None:
        self._module, self._spec = module, spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader, name)
