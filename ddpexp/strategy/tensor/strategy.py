"""Tensor parallelism: neighbouring ranks divide the layers of a plan, and FSDP shards over the other dimension.

Source: Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism", 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddpexp.distributed.transfers import is_host
from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.fsdp.sharding import held
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.norm import norm_dtype, row_norms
from ddpexp.strategy.tensor.group import TensorGroup


class TensorParallel(FSDP):
    """A share of the layers that the plan names, of which this rank holds some rows, and some rows of all others."""

    def __init__(
        self,
        options: FSDPOptions,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        **arguments: Any,
    ) -> None:
        """Build the model and keep this rank's share; the arguments are those of `FSDP`. Ranks: all; communicates."""
        self._group = TensorGroup.join(world, options.tp_size, options.dp_replicate_size)
        super().__init__(options, world, factory, **arguments, tensor=self._group)
        self._of_tokens = self._sharding.of_tokens
        parameters = {name: p for name, p in self._names.items() if name in self._sharding.shares}
        self._shares = {id(parameter): self._sharding.shares[name] for name, parameter in parameters.items()}

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Reduce gradients as `FSDP` does; of what has computed some tokens, they are summed over the group."""
        with super().micro_batch(last):
            yield
        if last and self._of_tokens:
            self._sum_over_tokens()

    @torch.no_grad()
    def _sum_over_tokens(self) -> None:
        parameters = [self._names[name] for name in self._of_tokens]
        gradients = [gradient for gradient in self.gradient_values(parameters) if gradient.numel()]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            own = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in own])
            self._group.sum(flat)
            for gradient, values in zip(own, torch.split(flat, [one.numel() for one in own]), strict=True):
                gradient.copy_(values.view_as(gradient))

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return the largest value of a flag on the ranks. Ranks: all; communicates."""
        return self._world.sum(flag.clone()).clamp(max=1)

    @torch.no_grad()
    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient. Ranks: all; communicates."""
        dtype = norm_dtype(parameters)
        if not is_host(self._world.device):
            return self._norm_of_parts(parameters, dtype)
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for parameter in parameters:
            if parameter.grad is not None and self._counts(parameter):
                gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                total += row_norms(gradient, dtype).double().square().sum().to(total.device)
        return self._world.sum(total).sqrt().to(dtype)

    def _counts(self, parameter: Tensor) -> bool:
        """Return whether this rank's part of a parameter is the one that is counted, of all ranks that hold it."""
        if id(parameter) not in self._shares and self._group.rank:
            return False
        return self._replica == 0 if isinstance(parameter, DTensor) else self.data.rank == 0

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return this rank's part of a tensor."""
        share = self._sharding.shares.get(name)
        if share is None or tuple(tensor.shape) != share.shape:
            copies = self._replica * self._group.size + self._group.rank
            return held(tensor, replica=copies)
        return held(tensor, share, self._replica)

    def shard_to_save(self, name: str, tensor: Tensor) -> Shard:
        """Return whole rows: of a tensor whose columns are divided, the ranks of a group get some rows each.

        Ranks: all, in the same order; communicates.
        """
        shard = self.shard(name, tensor)
        if shard.columns is None:
            return shard
        return self._group.whole_rows(shard, self._sharding.shares[name].cut.ranges)
