"""Avoid importing torch's compiler in runs that do not compile: it takes half of torch's import time.

Every optimizer step, every DistributedDataParallel and more call `import torch._dynamo`, to request a graph break or to
exclude a function from compiled graphs. Without compilation the results are known, and a stand-in module returns them.
The stand-in is replaced by the real module on any other access, and before any further module of torch is imported, so
that no module of torch sees it during its own import. The empty folder that it leaves in the temporary directory is
removed.

Private: `torch._dynamo`, `torch._compile` and the attribute `__dynamo_disable` of functions; torch 2.10 to 2.13.
Why: torch has no switch that leaves its compiler out.
When it goes: a torch that uses other attributes imports the compiler, which costs the time of that import. Add them to
`_RESULTS`. Delete this file when `import torch` and an optimizer's step no longer import `torch._dynamo`.
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
_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # variable of the environment, which torch sets when it makes that folder
_PACKAGES = ("torch", "functorch", "triton")  # packages that import the compiler, or that it imports
_FIRST_STEP = ("torch.profiler._cupti_monitor", "torch.nested._internal.nested_tensor")  # imported by any first step
_ON_META = ("torch.utils._device", "torch.fx.experimental.symbolic_shapes")  # by any operation on the meta device


def defer(on_meta: bool = False) -> None:
    """Install the stand-in; does nothing if the compiler is already imported, or configured in the environment.

    Import everything else that is needed from torch before. `on_meta`: operations on the meta device follow.
    """
    configured = any(name.startswith("TORCHDYNAMO") for name in os.environ)
    if _NAME in sys.modules or configured:
        return
    for name in (*_FIRST_STEP, *(_ON_META if on_meta else ())):
        with suppress(ImportError):  # of another version of torch
            importlib.import_module(name)
    standin = _StandIn()
    sys.modules[_NAME] = standin
    torch._dynamo = standin
    sys.meta_path.insert(0, standin._finder)


class _StandIn(types.ModuleType):
    """Returns known results, and is replaced by the real module on any other access."""

    _finder: _Finder
    _kept_out: list[types.FunctionType]
    _lock: threading.Lock
    _is_replaced: bool

    def __init__(self) -> None:
        super().__init__(_NAME)
        spec = importlib.machinery.PathFinder.find_spec(_NAME, torch.__path__)
        assert spec is not None
        self.__dict__.update(
            # Attributes that are read by code that iterates over all modules, such as `inspect`.
            __spec__=spec, __file__=spec.origin, __loader__=spec.loader, __package__=_NAME,
            __path__=list(spec.submodule_search_locations or ()),
            _finder=_Finder(self), _kept_out=[], _lock=threading.Lock(), _is_replaced=False,
        )  # fmt: skip

    def graph_break(self, *arguments: Any, **named: Any) -> None:
        """Do nothing, since there is no graph."""
        if self._is_replaced:
            self._real().graph_break(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if not self._is_replaced:
            known = _RESULTS.get((sys._getframe(1).f_globals.get("__name__"), name))
            if known is not None:
                return known(self)
            if name.startswith("__") and name != "__all__":  # read by code that iterates over all modules
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
        self.replace()
        return importlib.import_module(_NAME)  # waits while another thread imports it

    def replace(self) -> None:
        """Import the real module in place of this one, and discard the results torch has cached on functions.

        Of several threads the first one imports; the others continue as without a stand-in.
        """
        with self._lock:
            if self._is_replaced:
                return
            self.__dict__["_is_replaced"] = True
            sys.meta_path.remove(self._finder)
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
            if torch.__dict__.get("_dynamo") is self:
                del torch._dynamo
        for function in self._kept_out:
            function.__dict__.pop("__dynamo_disable", None)
        is_chosen = _CACHE in os.environ
        importlib.import_module(_NAME)
        if not is_chosen and (folder := os.environ.get(_CACHE)):  # which its import has made in the temporary folder
            with suppress(OSError):  # it is not empty: somebody compiles
                os.rmdir(folder)

    def _disable(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """Return the function itself, since nothing compiles it. torch caches this until the stand-in is replaced."""
        if self._is_replaced or not isinstance(function, types.FunctionType):
            return self._real().disable(function, *arguments, **named)
        self._kept_out.append(function)
        return function


class _Part:
    """A submodule with the one function that torch calls without compilation; the real one for everything else."""

    def __init__(self, standin: _StandIn, name: str, known: str, answer: Any) -> None:
        self._standin = standin
        self._name = name
        self._known = known
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        if name == self._known and not self._standin._is_replaced:
            return lambda: self._answer
        return getattr(getattr(self._standin._real(), self._name), name)


# Known results, by the module that asks: any other module might cache them for later compilation.
_RESULTS: dict[tuple[Any, str], Callable[[_StandIn], Any]] = {
    ("torch._compile", "disable"): lambda standin: standin._disable,
    ("torch.nn.parallel.distributed", "utils"): lambda standin: _Part(
        standin, "utils", "get_optimize_ddp_mode", "ddp_optimizer"  # the default
    ),
    ("torch.distributed.distributed_c10d", "trace_rules"): lambda standin: _Part(
        standin, "trace_rules", "clear_lru_cache", None  # nothing is cached
    ),
}  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder):
    """Detects imports of modules that may need the compiler, which must be imported first."""

    def __init__(self, standin: _StandIn) -> None:
        self._standin = standin

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Import the compiler; return the module if that has imported it, otherwise leave it to the next finder."""
        if not name.startswith(_PACKAGES):
            return None
        is_reload = name in sys.modules
        self._standin.replace()
        module = sys.modules.get(name)
        if is_reload or module is None or module.__spec__ is None:
            return None
        spec = copy.copy(module.__spec__)
        spec.loader = _Loaded(module, module.__spec__)
        # Python prefers it to the one that is returned. Modules of configuration let nobody set what is no option.
        module.__dict__["__spec__"] = spec
        return spec


class _Loaded(importlib.abc.Loader):
    """Loads a module that is already imported: importing it again would create a second one."""

    def __init__(self, module: types.ModuleType, spec: importlib.machinery.ModuleSpec) -> None:
        self._module, self._spec = module, spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__spec__"] = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader, name)
