"""Models that compute in bf16 as a whole, for trainer.param_dtype, with or without fp32 weights for the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.compat.dispatch import tree_map_only
from ddpexp.compat.modules import buffers_of, parameters_of
from ddpexp.settings.trainer import Trainer


def lowered(built: Any, trainer: Trainer, sharded: bool = False) -> Any:
    """Return modules as they compute with trainer.param_dtype; sharded ones get their copies from the strategy."""
    if trainer.param_dtype == "fp32":
        return built
    return lower(built, copies=not sharded, stays_fp32=trainer.master_weights)


def lower(built: Any, copies: bool, stays_fp32: bool) -> Any:
    """Have modules compute in bf16, and return them: inputs are cast to it, outputs to fp32.

    Their parameters become bf16, unless `stays_fp32`: then a forward pass uses copies in bf16, which are made here with
    `copies`, and by the strategy without. Buffers become bf16.
    """
    models: Mapping[str, nn.Module] = {"model": built} if isinstance(built, nn.Module) else built
    for module in models.values():
        if not stays_fp32:
            module.to(torch.bfloat16)
        else:
            _lower_buffers(module)
            if copies:
                module.forward = _WithCopies(module, module.forward)
        module.register_forward_pre_hook(_lower_inputs, with_kwargs=True)
        module.register_forward_hook(_raise_outputs)
    return built


class _WithCopies:
    """The forward of a module with copies of its parameters in bf16, through which gradients reach the originals."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        places = [
            (parameters_of(module), name, parameter)
            for module in self._module.modules()
            for name, parameter in parameters_of(module).items()
            if parameter is not None and parameter.is_floating_point()
        ]
        copies = {id(parameter): parameter.to(torch.bfloat16) for _, _, parameter in places}  # a tied one once
        for holder, name, parameter in places:
            holder[name] = copies[id(parameter)]
        try:
            return self._forward(*inputs, **named)
        finally:
            for holder, name, parameter in places:
                holder[name] = parameter


def _lower_buffers(module: nn.Module) -> None:
    for part in module.modules():
        for name, buffer in buffers_of(part).items():
            if buffer is not None and buffer.is_floating_point():
                buffers_of(part)[name] = buffer.to(torch.bfloat16)


def _lower_inputs(_module: nn.Module, inputs: Any, named: Any) -> Any:
    return tree_map_only(Tensor, _to_bf16, (inputs, named))


def _raise_outputs(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    return tree_map_only(Tensor, _to_fp32, outputs)


def _to_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
