"""Dividing the layers of a model into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.errors import RefusedError
from ddpexp.strategy.pipeline.schedule import Pipe
from ddpexp.system.text import first_few

_SPLIT = "strategy.split_before"


@runtime_checkable
class HasLayers(Protocol):
    """A model whose layers the stages of a pipeline can divide. An `nn.Sequential` needs no such methods."""

    @property
    def pipeline_layers(self) -> Sequence[Sequence[str]]:
        """Return the layers in the order in which they compute: for each the names of its modules and parameters.

        Each parameter of the model belongs to a layer; a tied one may belong to several.
        """
        ...

    def forward_layers(self, layers: range, x: Any, /, *arguments: Any, **named: Any) -> Tensor:
        """Return what these layers make of `x`: what the layer before them has returned, or the input of the model.

        The other arguments are those of `forward`, on all stages.
        """
        ...


@dataclass(frozen=True)
class Division:
    """Which stage computes which layers of a model, and holds which parameters and buffers."""

    layers: Sequence[Sequence[str]]
    bounds: Sequence[int]  # the first layer of each stage, and the number of layers
    forward: Callable[..., Any]  # as `HasLayers.forward_layers`
    pipe: Pipe

    def of_stage(self, stage: int) -> range:
        """Return the layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stages_of(self, name: str) -> list[int]:
        """Return the stages that hold a parameter or a buffer: several if it is tied, none if no layer has it."""
        having = [number for number, layer in enumerate(self.layers) if any(map(_has(name), layer))]
        stages = range(len(self.bounds) - 1)
        return [stage for stage in stages if any(number in self.of_stage(stage) for number in having)]

    def places_of(self, name: str) -> list[int]:
        """Return the places in the pipe of the workers that hold a parameter or a buffer, in the order of stages."""
        return list(dict.fromkeys(stage % self.pipe.size for stage in self.stages_of(name)))


class InStages:
    """A model for a task to call, all of whose stages are computed here, one after the other."""

    def __init__(self, module: nn.Module, division: Division, enter: Callable[[int, Any], None]) -> None:
        """Call `enter` before each stage, with its number and what it is given."""
        self._module = module
        self._division = division
        self._enter = enter

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        return getattr(self._module, name)

    def __call__(self, x: Any, /, *arguments: Any, **named: Any) -> Any:
        """Compute the model."""
        for stage in range(self._division.pipe.num_stages):
            self._enter(stage, x)
            x = self._division.forward(self._division.of_stage(stage), x, *arguments, **named)
        return x


def divide(models: Mapping[str, nn.Module], pipe: Pipe, split_before: Sequence[str] | None) -> Division:
    """Divide the layers of the model into the stages of a pipe.

    Raises:
        RefusedError: it cannot be divided, has fewer layers than stages, or no layer as named.
    """
    if len(models) > 1:
        raise RefusedError(
            f"divides the layers of one model, and the model section builds {first_few(list(models))}",
            key="strategy",
            value="pipeline",
            suggestion="Use strategy=fsdp.",
        )
    model = next(iter(models.values()))
    layers, forward = _layers_of(model)
    size, each = pipe.num_stages, pipe.stages_per_worker
    if len(layers) < size:
        fewer = f"strategy.pp_size={len(layers) // each}" if len(layers) >= 2 * each else "fewer stages"
        raise RefusedError(
            f"needs {size} layers or more, and {type(model).__name__} has {len(layers)}",
            key="strategy.pp_size",
            value=pipe.size,
            suggestion=f"Use {fewer} or less.",
        )
    if split_before is None:
        bounds = [number * len(layers) // size for number in range(size + 1)]
    else:
        bounds = [0, *(_layer_named(name, layers) for name in split_before), len(layers)]
        if any(first >= second for first, second in pairwise(bounds)):
            raise RefusedError(
                "leaves a stage without layers",
                key=_SPLIT,
                value=f"[{','.join(split_before)}]",
                suggestion=f"Name later layers one after the other, of {_names(layers)}.",
            )
    division = Division(layers, bounds, forward, pipe)
    _check_parameters(model, division)
    return division


def _layers_of(model: nn.Module) -> tuple[Sequence[Sequence[str]], Callable[..., Any]]:
    if isinstance(model, HasLayers):
        return [tuple(layer) for layer in model.pipeline_layers], model.forward_layers
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        modules = list(model)

        def forward(layers: range, x: Any) -> Any:
            for number in layers:
                x = modules[number](x)
            return x

        return [(name,) for name, _ in model.named_children()], forward
    raise RefusedError(
        f"cannot tell the layers of {type(model).__name__}",
        key="strategy",
        value="pipeline",
        suggestion="Make it an nn.Sequential, or give it pipeline_layers and forward_layers (see "
        "docs/strategies.md), or use strategy=fsdp.",
    )


def _layer_named(name: str, layers: Sequence[Sequence[str]]) -> int:
    for number, layer in enumerate(layers):
        if name in layer:
            return number
    raise RefusedError(f"is not a layer of the model, which has {_names(layers)}", key=_SPLIT, place=name)


def _check_parameters(model: nn.Module, division: Division) -> None:
    """Check that each parameter belongs to a stage, and has rows, of which the other stages hold none."""
    kind = type(model).__name__
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for name in (name for layer in division.layers for name in layer):
        if name not in names:
            raise RefusedError(
                f"names {name}, which is not a module or parameter of it", place=f"{kind}.pipeline_layers"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise RefusedError(
                f"{name} has no shape before the first batch, and strategy=pipeline divides the model before",
                suggestion="Use a layer that is not lazy, or strategy=ddp.",
            )
        if not division.stages_of(name):
            raise RefusedError(
                f"leaves out {name}", suggestion="Add it to the layer that uses it.", place=f"{kind}.pipeline_layers"
            )
        if parameter.dim() == 0:
            raise RefusedError(
                f"{name} is a parameter without dimensions, of which strategy=pipeline cannot leave a part to "
                "other workers",
                suggestion="Give it the shape (1,), or use strategy=ddp.",
            )


def _has(name: str) -> Callable[[str], bool]:
    return lambda part: name == part or name.startswith(f"{part}.")


def _names(layers: Sequence[Sequence[str]]) -> str:
    return first_few([layer[0] for layer in layers], 8)
