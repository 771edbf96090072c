"""Layers of which this rank holds a part. Source: Shoeybi et al., "Megatron-LM", 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.errors import RefusedError
from ddpexp.strategy.tensor.cut import Cut, Share
from ddpexp.strategy.tensor.group import Exchanges, TensorGroup
from ddpexp.strategy.tensor.options import EMBEDDING, GATHERED, ROWWISE, DividedLayers
from ddpexp.strategy.tensor.plan import Layer, layers_of
from ddpexp.strategy.tensor.sequence import LinearOfTokens, Tokens, between, gathered, scattered


def divide(
    models: Mapping[str, nn.Module], layers: list[Layer], group: TensorGroup, compiles: bool = False
) -> dict[str, Share]:
    """Leave this rank its share of the layers, and have them communicate; return the shares of parameters.

    The names are those of a checkpoint, such as `model.0.weight`. Parameters may be on torch's meta device. `compiles`:
    the layers will be parts of compiled blocks.

    Raises:
        RefusedError: a parameter belongs to several modules of which not all are divided in the same way.
    """
    cuts = _cuts(models, layers)
    wholes = {id(whole): whole for layer in layers for key in layer.cuts for whole in [getattr(layer.module, key)]}
    shares: dict[int, nn.Parameter] = {}
    tokens = Tokens(group, compiles)
    inputs = _Inputs(tokens, Exchanges(group))
    for layer in layers:
        if layer.is_between:
            between(layer.module, layer.style, tokens)
            continue
        for key, cut in layer.cuts.items():
            whole = getattr(layer.module, key)
            if id(whole) in wholes:  # of a tied one, the share is there already
                with torch.no_grad():
                    share = nn.Parameter(cut.cut(whole, group.rank), whole.requires_grad)
                setattr(layer.module, key, shares.setdefault(id(whole), share))
        _set_sizes(layer.module)
        _communicate(layer, group, inputs)
    return {name: Share(cut, group.rank) for name, cut in cuts.items()}


def _set_sizes(module: nn.Module) -> None:
    """Let the attributes of a layer say what it has now."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = len(module.weight)


def _cuts(models: Mapping[str, nn.Module], layers: list[Layer]) -> dict[str, Cut]:
    by_parameter: dict[int, tuple[Cut, str]] = {}
    for layer in layers:
        for key, cut in layer.cuts.items():
            other, name = by_parameter.setdefault(id(getattr(layer.module, key)), (cut, layer.name))
            if other != cut:
                raise RefusedError(
                    f"{name} and {layer.name} have the same {key}, and the plan of tensor parallelism divides "
                    "it in two ways",
                    suggestion="Leave both out of the plan, or build the model with separate ones.",
                )
    divided = {id(layer.module) for layer in layers}
    cuts = {}
    for model, root in models.items():
        for path, module in root.named_modules(remove_duplicate=False):
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) not in by_parameter:
                    continue
                cut, name = by_parameter[id(parameter)]
                if id(module) not in divided:
                    raise RefusedError(
                        f"{name} and {path} have the same {key}, and the plan of tensor parallelism divides "
                        "only that of the first",
                        suggestion="Leave it out of the plan, or build the model with separate ones.",
                    )
                cuts[".".join(part for part in (model, path, key) if part)] = cut
    return cuts


def summed_parameters(layers: Sequence[Layer]) -> list[nn.Parameter]:
    """Return the whole parameters whose gradient a rank has of some tokens only: those of modules between the layers.

    The bias of a rowwise layer is one of them.
    """
    found: dict[int, nn.Parameter] = {}
    if not any(layer.is_between for layer in layers):
        return []
    for layer in layers:
        own = [getattr(layer.module, "bias", None)] if layer.style == ROWWISE else []
        for parameter in layer.module.parameters() if layer.is_between else own:
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = parameter
    return list(found.values())


class _Inputs:
    """Gives layers with the same input, such as those of queries and keys, one copy: its gradient is summed once."""

    def __init__(self, tokens: Tokens, exchanges: Exchanges) -> None:
        self.tokens, self.exchanges = tokens, exchanges
        self._last: tuple[Tensor, Tensor] | None = None

    def copied(self, x: Tensor) -> Tensor:
        """Return the input as `copied` does, with the tokens of all ranks where each has some."""
        divided = self.tokens.are_divided
        if not (divided or (torch.is_grad_enabled() and x.requires_grad)):
            return x
        if self._last is None or self._last[0] is not x:
            copy = gathered(x, self.tokens) if divided else self.exchanges.copied(x)
            self._last = x, copy
        return self._last[1]

    def summed(self, x: Tensor) -> Tensor:
        """Return the output as `summed` does, of this rank's tokens where each has some."""
        self.clear()
        return scattered(x, self.tokens) if self.tokens.are_divided else self.exchanges.summed(x)

    def clear(self) -> None:
        """Forget the last input."""
        self._last = None


def divide_for_a_rank(
    models: Mapping[str, nn.Module], plan: Sequence[DividedLayers] | None, size: int, by_tokens: bool = False
) -> None:
    """Reduce models to the shard of the first rank of a tensor group, without a group.

    Raises:
        RefusedError: a layer does not divide.
    """
    divide(models, layers_of(models, plan, size, by_tokens), TensorGroup(0, size))


def _communicate(layer: Layer, group: TensorGroup, inputs: _Inputs) -> None:
    """Have a divided layer communicate in its forward and backward passes."""
    module = layer.module
    if layer.style == EMBEDDING:
        module.forward = _Embedding(module, inputs.exchanges, layer.cuts["weight"].ranges(group.rank)[0].start).forward
    elif layer.style == ROWWISE:
        module.forward = _Rowwise(module, inputs, layer.transposed).forward
    elif layer.style == GATHERED:
        module.forward = _Gathered(module, inputs, layer.transposed).forward
    else:
        module.forward = _Colwise(module, inputs, layer.transposed).forward


# The forward of a layer is a method: torch's compiler compiles a block with such layers once, but with a partial or an
# object that is called once for each block.


class _Colwise:
    """The forward of a layer that computes this rank's outputs. Shapes: (..., inputs) -> (..., outputs / size)."""

    def __init__(self, module: Any, inputs: _Inputs, transposed: bool) -> None:
        self._module, self._inputs, self._transposed = module, inputs, transposed

    def forward(self, input: Tensor) -> Tensor:
        copy, weight = self._inputs.copied(input), _weight(self._module, self._transposed)
        if self._inputs.tokens.are_divided:
            return LinearOfTokens.apply(copy, input, weight, self._module.bias, self._inputs.tokens)  # type: ignore[no-any-return, no-untyped-call]
        return functional.linear(copy, weight, self._module.bias)


class _Gathered:
    """As `_Colwise`, but every rank gets all outputs. It comes after the modules that have some tokens."""

    def __init__(self, module: Any, inputs: _Inputs, transposed: bool) -> None:
        self._module, self._inputs, self._transposed = module, inputs, transposed

    def forward(self, input: Tensor) -> Tensor:
        self._inputs.clear()
        exchanges, weight = self._inputs.exchanges, _weight(self._module, self._transposed)
        return exchanges.joined(functional.linear(exchanges.copied(input), weight, self._module.bias))


class _Rowwise:
    """The forward of a layer that has some of the inputs. Shapes: (..., inputs / size) -> (..., outputs)."""

    def __init__(self, module: Any, inputs: _Inputs, transposed: bool) -> None:
        self._module, self._inputs, self._transposed = module, inputs, transposed

    def forward(self, input: Tensor) -> Tensor:
        out = self._inputs.summed(functional.linear(input, _weight(self._module, self._transposed)))
        return out if self._module.bias is None else out + self._module.bias.to(out.dtype)


class _Embedding:
    """The forward of an embedding of which this rank has the rows from `begin`. Shapes: (...) -> (..., width)."""

    def __init__(self, module: Any, exchanges: Exchanges, begin: int) -> None:
        self._module, self._exchanges, self._begin = module, exchanges, begin

    def forward(self, input: Tensor) -> Tensor:
        weight, padding = self._module.weight, self._module.padding_idx
        own = input - self._begin
        elsewhere = (own < 0) | (own >= len(weight))
        has_padding = padding is not None and self._begin <= padding < self._begin + len(weight)
        own = own.masked_fill(elsewhere, 0)
        found = functional.embedding(own, weight, padding - self._begin if has_padding else None)
        return self._exchanges.summed(found.masked_fill(elsewhere[..., None], 0))


def _weight(module: Any, transposed: bool) -> Tensor:
    return module.weight.t() if transposed else module.weight  # type: ignore[no-any-return]
