"""torch's DistributedDataParallel, which can also reduce gradients when all backward passes of a micro-batch are done.

DDP reduces gradients during a backward pass for which a forward pass of the wrapper has prepared it: one of each. A
task's own `train_step` may run several, in any order, and a task may call the wrapped module itself or one of its
methods. DDP would leave those gradients as they are, different on every rank, without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpexp.compat.autograd import run_backward, version
from ddpexp.compat.ddp import rebuild_buckets
from ddpexp.errors import DdpexpError

_REDUCED = "_ddpexp_version_reduced"  # attribute of a gradient: its version when it was reduced


class LateDDP(DistributedDataParallel):
    """DDP that reduces at the end of a micro-batch what it has not reduced during a backward pass."""

    _last = False  # inside of the last micro-batch of a round
    _prepared = False  # a forward pass of this micro-batch has prepared the reduction during backward

    def begin(self, last: bool, overlaps: bool) -> None:
        """Begin a micro-batch: the last one of a round or not, and whether backward may reduce gradients.

        Raises:
            DdpexpError: `strategy.static_graph` is set, for which the last backward pass of a round must reduce them.
        """
        if last and not overlaps and self.static_graph:
            raise DdpexpError(
                "is incompatible with a task's train_step, which may run several backward passes in a micro-batch",
                key="strategy.static_graph",
                value=True,
                suggestion="Leave it false.",
            )
        self._last, self._prepared = last, False

    def finish(self) -> None:
        """End the last micro-batch of a round: reduce new gradients unless backward has done it.

        Ranks: all; communicates.

        Raises:
            DdpexpError: `strategy.static_graph` is set, which needs the same hooks in every pass.
        """
        self._last = False
        if not self._prepared and any(getattr(g, _REDUCED, None) != version(g) for g in self._gradients()):
            self._reduce()
            for gradient in self._gradients():
                setattr(gradient, _REDUCED, version(gradient))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module; does not communicate."""
        result = super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and self._last:
            self._prepared = self._prepared or self.require_backward_grad_sync
        return result

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapper lacks from the module, whose gradients are reduced however it is called."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def _reduce(self) -> None:
        """Let DDP reduce the gradients as they are, by a backward pass that adds zero to each."""
        if self.static_graph:
            raise DdpexpError(
                "is incompatible with a task that calls a method of the model, or the module inside of its "
                "wrapper: DDP reduces gradients only if the model itself is called",
                key="strategy.static_graph",
                value=True,
                suggestion="Leave it false.",
            )
        parameters = [p for p in self.module.parameters() if p.grad is not None and p.requires_grad]
        with torch.enable_grad():
            # Of a sparse gradient there is no view; DDP itself finds parameters by the graph of a view only.
            outputs = [p if _is_sparse(p) else p.view_as(p) for p in parameters]
        self.reducer.prepare_for_forward()
        rebuild_buckets(self)
        self.reducer.prepare_for_backward(outputs if self.find_unused_parameters else [])
        zeros = tuple(_zero(p) for p in parameters)
        run_backward(tuple(outputs), zeros)


def _is_sparse(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.layout is not torch.strided


def _zero(parameter: nn.Parameter) -> Tensor:
    """Return a gradient of zeros that takes no memory."""
    if _is_sparse(parameter):
        return torch.zeros_like(parameter.grad)  # type: ignore[arg-type]
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
