"""Building a model whose parameters have no memory, and giving them values one module at a time.

Unlike for a replay, the construction may look at values of tensors, but not at those of parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.compat.modules import parameters_of, reset_of
from ddpexp.errors import RefusedError

Model = TypeVar("Model", bound="nn.Module | Mapping[str, nn.Module]")

_META = torch.device("meta")


def build_empty(factory: Callable[[], Model], override: str) -> Model:
    """Run a factory; each parameter loses its memory as soon as a module has it. Buffers keep their values.

    Raises:
        RefusedError: the construction depends on values of parameters; names the `override` that asks for this.
    """
    try:
        with _parameters_lose_memory():
            return factory()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        first_line = str(error).partition("\n")[0]
        raise RefusedError(
            f"The construction of the model depends on values of parameters ({first_line}), which have none yet",
            key=override,
            suggestion="Use strategy.init=whole.",
        ) from None


class Resets:
    """Draws the values of a model's parameters by the `reset_parameters` of its modules."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Remember the modules as they are before they are sharded.

        Raises:
            RefusedError: a module with parameters has no method `reset_parameters`.
        """
        self._modules = {
            f"{model}.{name}".rstrip("."): module
            for model, root in deepcopy(dict(models)).items()  # of tensors without memory
            for name, module in root.named_modules()
            if any(parameter.device == _META for parameter in module.parameters(recurse=False))
        }
        for name, module in self._modules.items():
            if reset_of(module) is None:
                parameter = next(name for name, _ in module.named_parameters(recurse=False))
                raise RefusedError(
                    f"is a parameter of {type(module).__name__}, which has no method reset_parameters",
                    key="strategy.init",
                    value="reset_parameters",
                    suggestion="Write one that gives its parameters their first values, or use strategy.init=replay.",
                    place=f"{name}.{parameter}",
                )

    def draw(self, take: Callable[[str, Tensor], None]) -> None:
        """Give the values of each module's parameters to `take`, by name; then they are dropped."""
        for name, module in self._modules.items():
            for key, parameter in list(parameters_of(module).items()):
                if parameter is not None and parameter.device == _META:
                    parameters_of(module)[key] = nn.Parameter(torch.zeros_like(parameter, device="cpu"), False)
            reset = reset_of(module)
            assert reset is not None
            reset()
            for key, parameter in list(parameters_of(module).items()):
                if parameter is not None:
                    take(f"{name}.{key}", parameter)
            parameters_of(module).clear()


@contextmanager
def _parameters_lose_memory() -> Iterator[None]:
    """Replace each parameter by one on `meta` when a module registers it; tied ones stay tied."""
    plain = nn.Module.register_parameter
    replaced: dict[int, tuple[Any, nn.Parameter]] = {}  # with a weak reference: other objects get the same number

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        plain(module, name, parameter)
        if parameter is None or parameter.device == _META or is_lazy(parameter):
            return
        reference, on_meta = replaced.get(id(parameter), (None, None))
        if on_meta is None or reference is None or reference() is not parameter:
            on_meta = nn.Parameter(parameter.detach().to(_META), parameter.requires_grad)
            on_meta.__dict__.update(parameter.__dict__)
            replaced[id(parameter)] = weakref.ref(parameter), on_meta
        parameters_of(module)[name] = on_meta

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
