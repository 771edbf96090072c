"""Which ranks hold which rows of a model, and its construction where no rank can hold it whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ddpexp.compat.dtensor import first_row
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.strategy.base import Shard
from ddpexp.strategy.comm.reduce import ALIGNED, common_memory
from ddpexp.strategy.comm.shared_memory import SharedMemory
from ddpexp.strategy.exact.round import sum_dtype
from ddpexp.strategy.fsdp.blocks import BLOCKS, blocks_of
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.init.construction import Construction, tensors_of
from ddpexp.strategy.module_classes import check_classes
from ddpexp.strategy.replica import Models
from ddpexp.strategy.tensor.cut import Share
from ddpexp.strategy.tensor.group import TensorGroup
from ddpexp.strategy.tensor.layers import divide, summed_parameters
from ddpexp.strategy.tensor.plan import layers_of

if TYPE_CHECKING:
    from ddpexp.strategy.fsdp.collectives import TreeReduceScatter

_SHARE = "_ddpexp_share"  # attribute of a parameter
_LEAST_BYTES = 4096  # of shared memory, in which the partial sums of small buffers have room, too


class Sharding:
    """Shards the models of a recipe over the ranks."""

    def __init__(
        self,
        options: FSDPOptions,
        world: World,
        gradient_accumulation_steps: int | None = None,
        gathers_bf16: bool = False,
        tensor: TensorGroup | None = None,
        compiled: str | None = None,
    ) -> None:
        """Shard nothing yet; see `FSDP`. `world` has the ranks that share the data, `tensor` those of a layer.

        Modules of the class `compiled` are gathered whole, unless strategy.blocks says otherwise.
        """
        self._options = options
        self._world = world
        self._tensor = tensor
        self._compiled = compiled
        self.shares: dict[str, Share] = {}  # of the parameters that the ranks of a tensor group divide, by their names
        self.of_tokens: list[str] = []  # parameters whose gradient a rank of a tensor group has of some tokens
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._precision = MixedPrecisionPolicy()
        if gathers_bf16:
            self._precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.blocks: list[FSDPModule] = []  # that are gathered while they compute
        self.memory: SharedMemory | None = None  # through which the ranks communicate
        self.trees: list[TreeReduceScatter] = []  # those of the blocks, with trainer.reduction=exact
        self.replica = 0  # of hybrid sharding, which this rank belongs to

    def shard(self, models: Models) -> None:
        """Leave this rank its rows of all models but those of strategy.whole. Ranks: all; communicates.

        Raises:
            RefusedError: a parameter cannot be cut, strategy.whole names what cannot be held whole, or
            strategy.blocks a class that no model has.
        """
        world, options = self._world, self._options
        if self._tensor is not None:
            divided = self._models_to_shard(models)
            layers = layers_of(divided, options.tp_plan, self._tensor.size, options.sequence_parallel)
            self.shares = divide(divided, layers, self._tensor, self._compiled is not None)
            summed = {id(parameter) for parameter in summed_parameters(layers)}
            self.of_tokens = [name for name, tensor in tensors_of(divided) if id(tensor) in summed]
        if world.world_size == 1:
            check_classes(self._models_to_shard(models), options.blocks or (), BLOCKS)
            return
        dtype = sum_dtype(models)
        models = self._models_to_shard(models)
        _check_can_be_cut(models)
        replicas = options.dp_replicate_size
        sizes = (world.world_size,) if replicas == 1 else (replicas, world.world_size // replicas)
        names = ("shard",) if replicas == 1 else ("replicate", "shard")
        if self._tensor is None:
            mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
        else:
            mesh = self._tensor.mesh_of(names)
        self.replica = world.rank // sizes[-1]
        blocks = blocks_of(models, options.blocks, options.min_block_mb * 2**20, self._compiled)
        ordered = world.device.type == "cpu" or self._gradient_accumulation_steps is not None
        if ordered and replicas > 1:
            mesh = mesh["shard"]  # the replicas, too, are summed by our reduce-scatter
        for block in blocks:
            self.blocks.append(
                fully_shard(
                    block, mesh=mesh, reshard_after_forward=options.reshard_after_forward,
                    mp_policy=self._precision,
                    offload_policy=CPUOffloadPolicy() if options.offload else OffloadPolicy(),
                )
            )  # fmt: skip
        if ordered:
            self._use_own_collectives(models, sizes[-1], dtype)

    def _use_own_collectives(self, models: Models, num_shards: int, dtype: torch.dtype) -> None:
        """Have the blocks sum in an order of ours, exact sums in `dtype`. Ranks: all; communicates."""
        from ddpexp.strategy.fsdp import collectives

        world, steps = self._world, self._gradient_accumulation_steps
        if world.device.type == "cpu" and self._tensor is None:
            parameters = [parameter for module in models.values() for parameter in module.parameters()]
            num_bytes = sum(p.numel() * p.element_size() + ALIGNED * world.world_size for p in parameters)
            self.memory = common_memory(max(num_bytes, _LEAST_BYTES), self._options.reduce_through, world)
        transport: collectives.Transport = collectives.BackendTransport(world, num_shards)
        if self.memory is not None:
            transport = collectives.MemoryTransport(self.memory, world, num_shards)
        for block in self.blocks:
            if steps is None:
                reduce: Any = collectives.MeanReduceScatter(transport, world, num_shards)
            else:
                reduce = collectives.TreeReduceScatter(transport, world, num_shards, steps, dtype)
                self.trees.append(reduce)
            collectives.use_collectives(block, reduce, self.memory, world, num_shards)

    def construct(self, factory: Callable[[], Any]) -> Any:
        """Return what the factory builds, sharded; no rank ever holds more of it than its share and a few tensors.

        Its parameters have the values that strategy.init says, or are NaN if a checkpoint is loaded into them anyway.

        Ranks: all; communicates.

        Raises:
            RefusedError: the construction depends on values of tensors; or as in `shard`.
        """
        assert self._options.init != "whole"
        construction = Construction(factory, self._options.init, self._options.draws_values)
        self.shard(dict(construction.models))
        construction.allocate(self._world.device)

        def take(name: str, tensor: Tensor, values: Tensor) -> None:
            if name in self.shares:
                values = self.shares[name].take(values)
            if isinstance(tensor, DTensor):
                local, first = tensor.to_local(), first_row(tensor)
                local.copy_(values[first : first + len(local)])
            else:
                tensor.copy_(values)

        construction.fill(take)
        return construction.built

    def prepare(self, prepare: Callable[[Models], None], models: Models) -> None:
        """Call `prepare`, and let `held` know before of which parameters the ranks of a tensor group hold shares."""
        for name, tensor in tensors_of(models):
            if name in self.shares:
                setattr(tensor, _SHARE, self.shares[name])
        prepare(models)

    def _models_to_shard(self, models: Models) -> Models:
        for name in self._options.whole:
            if name not in models:
                raise RefusedError(
                    f"names no model of the recipe, which has {', '.join(models)}",
                    key="strategy.whole",
                    value=f"[{name}]",
                )
            if any(parameter.requires_grad for parameter in models[name].parameters()):
                raise RefusedError(
                    "is trained, and only frozen models are held whole",
                    key="strategy.whole",
                    value=f"[{name}]",
                    suggestion="Call requires_grad_(False) on it where it is built, or leave it out.",
                )
        return {name: module for name, module in models.items() if name not in self._options.whole}


def held(tensor: Tensor, share: Share | None = None, replica: int = 0) -> Shard:
    """Return what this rank holds of a tensor, which may be sharded; `share` is that of its tensor group.

    None: that of a parameter, as `Sharding.prepare` has marked it.
    """
    share = share or getattr(tensor, _SHARE, None)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    first = first_row(tensor) if isinstance(tensor, DTensor) else None
    if share is None:
        return Shard(local, tuple(tensor.shape), first, replica if first is not None else 0)
    return share.shard(local, first or 0, replica)


def _check_can_be_cut(models: Models) -> None:
    """Check that every parameter has rows.

    Raises:
        RefusedError: one has no dimensions, or its memory is not in order.
    """
    for model, module in models.items():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise RefusedError(
                    f"{model}.{name} is a single number, and strategy=fsdp gives each worker some rows of a parameter",
                    suggestion="Build it with one dimension, as in torch.nn.Parameter(torch.ones(1)), or use "
                    "strategy=ddp.",
                )
            if not parameter.is_contiguous():
                raise RefusedError(
                    f"{model}.{name} is not contiguous, and strategy=fsdp gives each worker some rows of a parameter",
                    suggestion="Build it with .contiguous(), or use strategy=ddp.",
                )
