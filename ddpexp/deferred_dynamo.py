"""Keep torch's compiler out of runs that do not compile: half of torch's import time, for calls that do nothing.

Every optimizer step, every DistributedDataParallel and more say `import torch._dynamo`, to ask it for a graph break or to
keep a function out of compiled graphs. Without compilation the answers are known. So a stand-in answers those calls, and the
moment that anything else of the compiler is wanted (`torch.compile` in a recipe, say) it gives way to the real module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

_NAME = "torch._dynamo"


def defer() -> None:
    """Put the stand-in where the compiler would be imported; does nothing when it is already, or is configured."""
    configured = any(name.startswith("TORCHDYNAMO") for name in os.environ)
    if _NAME not in sys.modules and not configured:
        standin = _Compiler()
        sys.modules[_NAME] = standin
        torch._dynamo = standin
        sys.meta_path.insert(0, standin.finder)


class _Compiler(types.ModuleType):
    """The known answers, and the way to the real module for every other question."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        spec = importlib.machinery.PathFinder.find_spec(_NAME, torch.__path__)
        assert spec is not None
        self.__path__ = list(spec.submodule_search_locations or [])  # so that submodules are looked for: see the finder
        self.finder = _Finder(self)
        self.utils = _Part(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the configuration's default
        self.trace_rules = _Part(self, "trace_rules", clear_lru_cache=lambda: None)  # nothing is cached
        self._kept_out: list[Any] = []

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: there is no graph."""

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Return the function itself: nothing compiles it. torch remembers this answer until `load`."""
        self._kept_out.append(function)
        return function

    def load(self) -> types.ModuleType:
        """Give way to the real module, and let torch ask it again about the functions that it asked us about."""
        if sys.modules.get(_NAME) is self:
            sys.meta_path.remove(self.finder)
            del sys.modules[_NAME]
            importlib.import_module(_NAME)
            for function in self._kept_out:
                function.__dict__.pop("__dynamo_disable", None)
        return sys.modules[_NAME]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)


class _Part:
    """A submodule as far as it is asked in a run that does not compile; the real one for everything else."""

    def __init__(self, compiler: _Compiler, name: str, **known: Callable[[], Any]) -> None:
        self.__dict__.update(known)
        self._compiler = compiler
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._compiler.load(), self._name), name)


class _Finder(importlib.abc.MetaPathFinder):
    """Notice the import of a submodule, for which the real package must be there first."""

    def __init__(self, compiler: _Compiler) -> None:
        self._compiler = compiler

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Load the real package, then hand out its submodule as it stands."""
        if not name.startswith(f"{_NAME}."):
            return None
        self._compiler.load()
        module = importlib.import_module(name)
        return importlib.util.spec_from_loader(name, _Loaded(module))


class _Loaded(importlib.abc.Loader):
    """A module that is there already: importing it again would make a second one."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
