"""Sharded data parallelism: every rank holds some rows of each parameter, of its gradient and of its optimizer state.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddpexp.compat.dtensor import first_row
from ddpexp.distributed.transfers import is_host
from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.fsdp.sharding import Sharding
from ddpexp.strategy.init.construction import RESET
from ddpexp.strategy.norm import norm_dtype, norm_of_rows, norm_of_tensors, row_norms
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.replica import Models, Replicas, broadcast_rank_zero, check_same_models, gradient_values, unused
from ddpexp.strategy.tensor.group import TensorGroup


class FSDP(Replicas):
    """A share of the model on this rank. With one worker it is a whole replica."""

    def __init__(
        self,
        options: FSDPOptions,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        compilation: Compilation | None = None,
        prepare: Callable[[Models], None] = lambda models: None,
        gradient_accumulation_steps: int | None = None,
        gathers_bf16: bool = False,
        tensor: TensorGroup | None = None,
    ) -> None:
        """Build the model and keep this rank's share.

        `gradient_accumulation_steps` is for sums in the tree of `trainer.reduction=exact`; with `gathers_bf16` blocks
        compute with copies of the parameters in bf16. The ranks of a `tensor` group divide layers first.

        Ranks: all; broadcasts rank zero's weights, unless every rank draws them for itself.

        Raises:
            RefusedError: the model has a parameter that cannot be cut, or its construction cannot be replayed.
        """
        data_world = world if tensor is None else tensor.data_world(world)
        compiled = None if compilation is None else compilation.blocks
        sharding = Sharding(options, data_world, gradient_accumulation_steps, gathers_bf16, tensor, compiled)
        in_parts = options.init == "reset_parameters" or (options.init == "replay" and world.world_size > 1)
        construct = partial(sharding.construct, factory) if in_parts else factory
        super().__init__(world, construct, compilation=compilation, prepare=partial(sharding.prepare, prepare))
        if in_parts:
            check_same_models(self.modules, world)
            if options.init == "reset_parameters" and options.draws_values and world.is_rank_zero:
                logging.getLogger("ddpexp").warning(RESET)
        else:
            self.share_initial_weights(world)
            sharding.shard(self.modules)
        self.memory = sharding.memory
        self.data = options.data_rank(world.rank, world.world_size)
        self.gradient_weight = float(data_world.world_size)  # the reduction averages over ranks
        self._world, self._options = world, options
        self.forward_communicates = world.world_size > 1
        together = tensor is not None or not options.gather_in_evaluation
        self.evaluates_together = self.forward_communicates and together
        self._sharding = sharding
        self._sharded = sharding.blocks
        self._replica = sharding.replica
        self._names = {
            f"{model}.{name}": parameter
            for model, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        self._trained = {
            model: {f"{model}.{key}": p for key, p in module.named_parameters() if p.requires_grad}
            for model, module in self.modules.items()
        }
        self._shares_buffers = options.broadcast_buffers and gradient_accumulation_steps is None
        self._buffers_due = True

    def _broadcast_buffers(self) -> None:
        """Give every rank the buffers of rank zero. Ranks: all; communicates if there are any."""
        if self._world.world_size > 1:
            buffers = [buffer for module in self.modules.values() for buffer in module.buffers()]
            with torch.no_grad():
                broadcast_rank_zero(buffers, replace(self._world, memory=self.memory))

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Share rank zero's buffers before the first micro-batch, and reduce gradients in backward of the last or each.

        Ranks: all; communicates.
        """
        if self._shares_buffers and self._buffers_due:
            self._broadcast_buffers()
        self._buffers_due = last
        for module in self._sharded:
            module.set_requires_gradient_sync(last or self._options.reduce_each_micro_batch, recurse=False)
        yield
        if last:
            for model in self.modules:
                self._check_gradients(model)

    def _check_gradients(self, model: str) -> bool:
        """Return whether the parameters of a model have gradients: all or none of them.

        Raises:
            DdpexpError: some have, and others do not.
        """
        parameters = self._trained[model]
        missing = [name for name, parameter in parameters.items() if parameter.grad is None]
        if missing and len(missing) < len(parameters):
            raise unused(missing, "strategy=ddp strategy.find_unused_parameters=true")
        return bool(parameters) and not missing

    def gradient_values(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return this rank's rows of the existing gradients."""
        return [value.to_local() if isinstance(value, DTensor) else value for value in gradient_values(parameters)]

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return the largest value of a flag on the ranks. Ranks: all; communicates."""
        return replace(self._world, memory=self.memory).sum(flag.clone()).clamp(max=1) if self._sharded else flag

    @torch.no_grad()
    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, on CPUs with the bits of whole gradients.

        Ranks: all; communicates.
        """
        if not self._sharded:
            return super().gradient_norm(parameters)
        dtype, device = norm_dtype(parameters), self._world.device
        if not self.norm_by_rows and not is_host(device):
            return self._norm_of_parts(parameters, dtype)
        norms = [self._all_row_norms(parameter.grad, dtype) for parameter in parameters if parameter.grad is not None]
        if not norms:
            return torch.zeros((), device=device)
        everything = torch.cat([values.view(-1).to(device) for values in norms])  # a row is zero on all ranks but one
        return norm_of_rows([replace(self._world, memory=self.memory).sum(everything)])

    def _norm_of_parts(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the norm of the parts that ranks have, of which each counts once. Ranks: all; communicates."""
        own = self.gradient_values([parameter for parameter in parameters if self._counts(parameter)])
        square = norm_of_tensors(own, dtype).double().square().to(self._world.device)
        return self._world.sum(square).sqrt().to(dtype)

    def _counts(self, parameter: Tensor) -> bool:
        """Return whether this rank's part of a parameter is the one that is counted, of all ranks that hold it."""
        return self._replica == 0 if isinstance(parameter, DTensor) else self._world.is_rank_zero

    def _all_row_norms(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norms of this rank's rows of a gradient, with zeros for the rows of the others."""
        if not isinstance(gradient, DTensor):
            own = row_norms(gradient, dtype)
            return own if self._world.is_rank_zero else torch.zeros_like(own)
        own, shard = row_norms(gradient.to_local(), dtype), self.shard("", gradient)
        norms = own.new_zeros(len(own), gradient.shape[0])
        first = shard.first_row or 0
        if shard.replica == 0:
            norms[:, first : first + own.shape[1]] = own
        return norms

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Yield the model as `Replicas` does, with all parameters gathered unless ranks evaluate together."""
        if self.evaluates_together:
            with super().evaluation() as model:
                yield model
            return
        for module in self._sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            with super().evaluation() as model:
                yield model
        finally:
            for module in self._sharded:
                module.set_reshard_after_forward(self._options.reshard_after_forward, recurse=False)
                module.reshard()

    @contextmanager
    def synced_buffers(self) -> Iterator[None]:
        """Give every rank the buffers of rank zero inside the block; local ones are restored afterwards. Ranks: all."""
        if self._world.world_size > 1:
            local = {name: buffer.clone() for name, buffer in self.local_buffers().items()}
            self._broadcast_buffers()
            try:
                yield
            finally:
                for name, buffer in self.local_buffers().items():
                    buffer.copy_(local[name])
        else:
            yield

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that may differ between ranks, by name: all with strategy.broadcast_buffers=false."""
        if self._world.world_size == 1 or self._options.broadcast_buffers:
            return {}
        return {f"{name}.{key}": b for name, module in self.modules.items() for key, b in module.named_buffers()}

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return this rank's rows of a tensor that is sharded."""
        if not isinstance(tensor, DTensor):
            return Shard.whole(tensor)
        return Shard(tensor.to_local(), tuple(tensor.shape), first_row(tensor), self._replica)

    def from_local(self, name: str, local: Tensor) -> Tensor:
        """Return this rank's rows of a tensor that has the shape of its parameter."""
        like = self._names.get(name)
        if not isinstance(like, DTensor):
            return local
        local = local.to(like.to_local().device)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
