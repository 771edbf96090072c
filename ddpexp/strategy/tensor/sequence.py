"""Sequence parallelism: between divided layers, each rank of a tensor group has some of the tokens of a batch.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ddpexp.distributed.rng import MODEL, seed_of, seeder
from ddpexp.errors import DdpexpError
from ddpexp.strategy.comm.reduce import as_bytes
from ddpexp.strategy.tensor.group import HALVES, Operation, TensorGroup, with_gradient
from ddpexp.strategy.tensor.options import SEQUENCE_BEGIN, SEQUENCE_END

_TOKENS = -2  # the dimension: (batch, tokens, width)
_SEEDS = 1 << 62


class Tokens:
    """The tokens of a batch, of which each rank has as many between the divided layers; in evaluations all of them."""

    def __init__(self, group: TensorGroup, compiles: bool) -> None:
        """Divide them among a group, of layers that are compiled or not."""
        self.group, self.compiles = group, compiles
        self.are_divided = False  # in the forward pass in progress, and the backward pass that follows it
        self.all_of = Operation("all_of", group, self._all_of, self._like_all)
        self.own_of_sum = Operation("own_of_sum", group, self._own_of_sum, self._like_own)

    def _like_all(self, own: Tensor) -> Tensor:
        return own.new_empty(*own.shape[:-2], own.shape[-2] * self.group.size, own.shape[-1])

    def _like_own(self, everything: Tensor) -> Tensor:
        *before, tokens, width = everything.shape
        return everything.new_empty(*before, tokens // self.group.size, width)

    def _all_of(self, own: Tensor) -> Tensor:
        """Return the tokens of all ranks, in their order. Ranks: those of the group; communicates."""
        if self.group.world is None:
            return torch.cat([own] * self.group.size, _TOKENS)
        everything = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.group.size)]
        self.group.world.all_gather([as_bytes(part) for part in everything], as_bytes(own.contiguous()))
        return torch.cat(everything, _TOKENS)

    def own_of(self, everything: Tensor) -> Tensor:
        """Return this rank's tokens in new memory."""
        return everything.chunk(self.group.size, _TOKENS)[self.group.rank].contiguous()

    def _own_of_sum(self, everything: Tensor) -> Tensor:
        """Return the sum over the ranks of this rank's tokens. Ranks: those of the group; communicates.

        They are summed in the order of the ranks.
        """
        if self.group.world is None:
            return self.own_of(everything)
        sent = torch.stack(everything.chunk(self.group.size, _TOKENS))
        received = torch.empty_like(sent)
        self.group.world.all_to_all(as_bytes(received), as_bytes(sent))
        total = received[0].float() if everything.dtype in HALVES else received[0]
        for part in received[1:]:
            total = total + part
        return total.to(everything.dtype)


def gathered(x: Tensor, tokens: Tokens) -> Tensor:
    """Return all tokens, for a layer of which each rank computes a part: the gradients of the parts are summed.

    Ranks: those of the group; communicates.
    """
    return with_gradient(x, tokens.all_of, tokens.own_of_sum)


def scattered(x: Tensor, tokens: Tokens) -> Tensor:
    """Return this rank's tokens of the sum of what the ranks have computed. Ranks: those of the group; communicates."""
    return with_gradient(x, tokens.own_of_sum, tokens.all_of)


class LinearOfTokens(torch.autograd.Function):
    """A linear layer that keeps this rank's tokens of its input for backward, and gathers them again."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens) -> Tensor:
        """Compute all tokens, of which `own` are this rank's."""
        ctx.save_for_backward(own, weight)
        ctx.tokens = tokens
        return functional.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor | None, None]:
        """Return the gradients. Ranks: those of the group; communicates."""
        own, weight = ctx.saved_tensors
        of_input = (gradient @ weight.to(gradient.dtype)).to(own.dtype)
        rows = gradient.flatten(0, -2)
        of_weight = of_bias = None
        if ctx.needs_input_grad[2]:
            inputs = ctx.tokens.all_of(own.to(gradient.dtype))
            of_weight = (rows.t() @ inputs.flatten(0, -2)).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(0, dtype=weight.dtype)
        return of_input, None, of_weight, of_bias, None


def between(module: nn.Module, style: str, tokens: Tokens) -> None:
    """Have a module compute this rank's tokens: the first of them takes them, and the last one gives back all."""
    module.forward = _OfTokens(module, style, tokens).forward


class _OfTokens:
    """The forward of a module between the divided layers."""

    def __init__(self, module: nn.Module, style: str, tokens: Tokens) -> None:
        self._module, self._style, self._tokens = module, style, tokens
        self._plain: Callable[[Tensor], Tensor] = module.forward
        # Decorating a function imports torch's compiler, which no other run does.
        self._draw = torch.compiler.disable(self._drawn) if tokens.compiles else self._drawn  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        tokens = self._tokens
        if self._style == SEQUENCE_BEGIN:
            tokens.are_divided = self._module.training
            if tokens.are_divided:
                _check_divides(input, tokens.group.size)
                input = with_gradient(input, tokens.own_of, tokens.all_of)
        if not tokens.are_divided:
            return self._plain(input)
        draws = any(isinstance(one, nn.Dropout) and one.p > 0 for one in self._module.modules())
        out = self._draw(input) if draws else self._plain(input)
        return with_gradient(out, tokens.all_of, tokens.own_of) if self._style == SEQUENCE_END else out

    def _drawn(self, input: Tensor) -> Tensor:
        """Return what the module computes with random numbers of this rank, which cuts a compiled graph."""
        with _own_random_numbers(self._tokens.group.rank, input.device):
            return self._plain(input)


def _check_divides(x: Tensor, size: int) -> None:
    """Check that each rank gets as many tokens.

    Raises:
        DdpexpError: their number does not divide.
    """
    if x.dim() < 3 or x.shape[_TOKENS] % size:
        raise DdpexpError(
            f"divides the tokens of a batch among strategy.tp_size={size} workers, and a batch has the shape "
            f"{list(x.shape)} where that begins: (samples, tokens, width) with a multiple of {size} tokens is "
            "needed",
            key="strategy.sequence_parallel",
            value=True,
            suggestion="Change the length of the batches, or use strategy.sequence_parallel=false.",
        )


@contextmanager
def _own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Have this rank draw others than the ranks of its group inside the block; afterwards they draw alike again."""
    if device.type == "meta":
        yield
        return
    seed = int(torch.randint(_SEEDS, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seeder(device)(seed_of(seed, MODEL, 0, rank))
        yield
