"""FSDP2 as a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ddpexp.distributed.world import World
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Shard
from ddpexp.strategy.replica import Models, Replicas

from . import ShardedOptions


def build(
    options: ShardedOptions,
    world: World,
    factory: Callable[[], Any],
    *,
    trainer: Trainer,
    gradient_accumulation_steps: int,
    prepare: Callable[[Models], None],
) -> Sharded:
    """Build the model and shard it."""
    return Sharded(options.children, world, factory, prepare)


class Sharded(Replicas):
    """Every rank holds some rows of each parameter."""

    def __init__(
        self, children: bool, world: World, factory: Callable[[], Any], prepare: Callable[[Models], None]
    ) -> None:
        """Build the whole model, then shard it."""
        super().__init__(world, factory, prepare=prepare)
        self.share_initial_weights(world)
        self.gradient_weight = float(world.world_size)  # FSDP averages
        mesh = init_device_mesh(world.device.type, (world.world_size,))
        for module in self.modules.values():
            for child in module.children() if children else ():
                if any(True for _ in child.parameters()):
                    fully_shard(child, mesh=mesh)
            fully_shard(module, mesh=mesh)
        self._names = {
            f"{model}.{name}": parameter
            for model, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Reduce gradients in the backward pass of the last micro-batch."""
        for module in self._sharded():
            module.set_requires_gradient_sync(last)
        yield

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm over all ranks' rows."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Clip with that norm."""
        norm = self.gradient_norm(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Gather the parameters, so that forward passes do not communicate."""
        for module in self._sharded():
            module.set_reshard_after_forward(False)
            module.unshard()
        with super().evaluation() as model:
            yield model
        for module in self._sharded():
            module.reshard()

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return this rank's rows."""
        if not isinstance(tensor, DTensor):
            return Shard.whole(tensor)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Shard(tensor.to_local(), tuple(tensor.shape), offset[0])

    def from_local(self, name: str, local: Tensor) -> Tensor:
        """Return this rank's rows of a tensor that has the shape of its parameter."""
        like = self._names[name]
        assert isinstance(like, DTensor)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _sharded(self) -> Iterator[FSDPModule]:
        for root in self.modules.values():
            yield from (module for module in root.modules() if isinstance(module, FSDPModule))
