"""The forward pass of the whole model in an evaluation: through the stages, of which no worker holds all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.errors import DdpexpError
from ddpexp.strategy.comm.reduce import as_bytes
from ddpexp.strategy.pipeline.groups import Groups
from ddpexp.strategy.pipeline.links import empty_header, header_of, kind_in, kind_of_output
from ddpexp.strategy.pipeline.passes import tensor_of
from ddpexp.strategy.pipeline.stages import Division


@contextmanager
def through_stages(module: nn.Module, division: Division, groups: Groups) -> Iterator[None]:
    """Have calls of the model pass through the workers of the pipe inside the block. Ranks: all.

    Every worker of the pipe makes the same calls, and gets the output. The model stays the object that it is, so that
    its own methods, such as one that generates text, do the same.
    """
    hooks = []
    for number, layer in enumerate(division.layers):
        stage = next(stage for stage in range(division.pipe.num_stages) if number in division.of_stage(stage))
        for name, part in module.named_modules():
            if name in layer and groups.place not in division.places_of(name):
                hooks.append(part.register_forward_pre_hook(_refusal(name, stage)))
    module.forward = _Forward(division, groups)
    try:
        yield
    finally:
        del module.forward  # the one of the class is behind it
        for hook in hooks:
            hook.remove()


class _Forward:
    """Stands for the method `forward` of the model."""

    def __init__(self, division: Division, groups: Groups) -> None:
        self._division = division
        self._groups = groups
        self._links = groups.links

    def __call__(self, x: Any, /, *arguments: Any, **named: Any) -> Tensor:
        """Compute the stages of this worker when their inputs arrive; return the output of the last stage.

        Ranks: all of the pipe; communicates.
        """
        pipe, output = self._division.pipe, None
        for stage in pipe.stages_of(self._groups.place):
            if stage > 0:
                x = self._links.receive_any()
            output = tensor_of(stage, self._division.forward(self._division.of_stage(stage), x, *arguments, **named))
            if stage < pipe.num_stages - 1:
                self._links.send_any(stage, output)
                output = None
        self._links.finish()
        return self._to_all(output)

    def _to_all(self, output: Tensor | None) -> Tensor:
        """Give the workers of the pipe the output of the last stage. Ranks: all of the pipe; communicates."""
        world = self._groups.pipe
        device = self._links.device
        last = self._division.pipe.size - 1
        if output is None:
            kind = kind_in(world.broadcast(empty_header(device), last))
            output = output_of_last = torch.empty(kind.shape, dtype=kind.dtype, device=device)
        else:
            kind = kind_of_output(self._division.pipe.num_stages - 1, output)
            world.broadcast(header_of(kind, device), last)
            output_of_last = output.contiguous()
        if output_of_last.numel():
            world.broadcast(as_bytes(output_of_last), last)
        return output


def _refusal(name: str, stage: int) -> Any:
    """Return a hook for a module of which this worker has no parameters."""

    def refuse(*_: Any) -> None:
        raise DdpexpError(
            f"the evaluation calls {name} of the model by itself, which is in stage {stage} of the pipeline "
            "and on no other worker: with strategy.gather_in_evaluation=false a task may call the model as a "
            "whole",
            suggestion="Use strategy.gather_in_evaluation=true.",
        )

    return refuse
