"""Layers of which this rank holds a part. Source: Shoeybi et al., "Megatron-LM", 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.errors import RefusedError
from ddpexp.strategy.tensor.cut import Cut, Share
from ddpexp.strategy.tensor.group import TensorGroup, copied, joined, summed
from ddpexp.strategy.tensor.options import EMBEDDING, GATHERED, ROWWISE, DividedLayers
from ddpexp.strategy.tensor.plan import Layer, layers_of
from ddpexp.strategy.tensor.sequence import LinearOfTokens, Tokens, between, gathered, scattered


def divide(models: Mapping[str, nn.Module], layers: list[Layer], group: TensorGroup) -> dict[str, Share]:
    """Leave this rank its share of the layers, and have them communicate; return the shares of parameters.

    The names are those of a checkpoint, such as `model.0.weight`. Parameters may be on torch's meta device.

    Raises:
        RefusedError: a parameter belongs to several modules of which not all are divided in the same way.
    """
    cuts = _cuts(models, layers)
    wholes = {id(whole): whole for layer in layers for key in layer.cuts for whole in [getattr(layer.module, key)]}
    shares: dict[int, nn.Parameter] = {}
    tokens = Tokens(group)
    inputs = _Inputs(tokens)
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

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._last: tuple[Tensor, Tensor] | None = None

    def copied(self, x: Tensor, is_whole: bool = False) -> Tensor:
        """Return the input as `copied` does, with the tokens of all ranks where each has some.

        A head `is_whole`: it comes after the modules that have some.
        """
        divided = self.tokens.are_divided and not is_whole
        if not (divided or (torch.is_grad_enabled() and x.requires_grad)):
            return x
        if self._last is None or self._last[0] is not x:
            copy = gathered(x, self.tokens) if divided else copied(x, self.tokens.group)
            self._last = x, copy
        return self._last[1]

    def summed(self, x: Tensor) -> Tensor:
        """Return the output as `summed` does, of this rank's tokens where each has some."""
        self.clear()
        return scattered(x, self.tokens) if self.tokens.are_divided else summed(x, self.tokens.group)

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
        begin = layer.cuts["weight"].ranges(group.rank)[0].start
        module.forward = partial(_embed, module, group, begin)
    elif layer.style == ROWWISE:
        module.forward = partial(_rowwise, module, inputs, layer.transposed)
    else:
        module.forward = partial(_colwise, module, group, inputs, layer.transposed, layer.style == GATHERED)


def _weight(module: Any, transposed: bool) -> Tensor:
    return module.weight.t() if transposed else module.weight  # type: ignore[no-any-return]


def _colwise(
    module: Any, group: TensorGroup, inputs: _Inputs, transposed: bool, gathers: bool, input: Tensor
) -> Tensor:
    """Compute this rank's outputs. Shapes: (..., inputs) -> (..., outputs / size), or all outputs if it gathers."""
    copy, weight = inputs.copied(input, gathers), _weight(module, transposed)
    if inputs.tokens.are_divided and not gathers:
        return LinearOfTokens.apply(copy, input, weight, module.bias, inputs.tokens)  # type: ignore[no-any-return, no-untyped-call]
    out = functional.linear(copy, weight, module.bias)
    return joined(out, group) if gathers else out


def _rowwise(module: Any, inputs: _Inputs, transposed: bool, input: Tensor) -> Tensor:
    """Compute all outputs from this rank's inputs. Shapes: (..., inputs / size) -> (..., outputs)."""
    out = inputs.summed(functional.linear(input, _weight(module, transposed)))
    return out if module.bias is None else out + module.bias.to(out.dtype)


def _embed(module: Any, group: TensorGroup, begin: int, input: Tensor) -> Tensor:
    """Look up rows, of which this rank has those from `begin`. Shapes: (...) -> (..., width)."""
    own = input - begin
    elsewhere = (own < 0) | (own >= len(module.weight))
    padding = module.padding_idx
    has_padding = padding is not None and begin <= padding < begin + len(module.weight)
    found = functional.embedding(own.masked_fill(elsewhere, 0), module.weight, padding - begin if has_padding else None)
    found = found.masked_fill(elsewhere[..., None], 0)
    return summed(found, group)
