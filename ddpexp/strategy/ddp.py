"""Data parallelism with torch's DistributedDataParallel: whole replicas, averaged gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpexp.errors import RefusedError
from ddpexp.strategy import Options
from ddpexp.strategy.reduce import reduce_in_rank_order
from ddpexp.world import World

Models = dict[str, nn.Module]


class DDP:
    """One replica on this rank: owns wrapping, the borders of micro-batches, the reduction and the gradient norm."""

    def __init__(
        self,
        options: Options,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        channels_last: bool = False,
        compile: bool = False,
        prepare: Callable[[Models], None] = lambda models: None,
    ) -> None:
        """Build the model on this rank's device and wrap it, before any optimizer is made.

        `prepare` sees the bare modules before they are wrapped (to load weights into them).
        Ranks: all; communicates rank zero's weights to the others.
        """
        built = factory()
        self.single = isinstance(built, nn.Module)
        self.bare: Models = {"model": built} if isinstance(built, nn.Module) else dict(built)
        self._world = world
        self.gradient_weight = float(world.world_size)  # the reduction averages over ranks
        self._shares_buffers = options.broadcast_buffers  # before every forward anyway
        for name, module in self.bare.items():
            module.to(world.device)
            if channels_last:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if options.sync_batchnorm:
                self.bare[name] = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        prepare(self.bare)
        self._parameters = list(self.parameters())
        self._called = dict(self.bare)
        if compile:
            # Not `module.compile()`: torch 2.13 then leaves a class alone whose forward is torch's own, such as nn.Sequential.
            self._called = {name: cast(nn.Module, torch.compile(module)) for name, module in self.bare.items()}
        self.wrapped = dict(self._called)
        self.shares_memory = False
        if world.world_size > 1:
            self.wrapped = {name: _wrap(module, options, world) for name, module in self._called.items()}
            self.shares_memory = reduce_in_rank_order(list(self.wrapped.values()), options, world)

    @property
    def training(self) -> Any:
        """Return what a task's training step calls: the wrapped module, or the mapping of them."""
        return self.wrapped["model"] if self.single else self.wrapped

    @property
    def evaluating(self) -> Any:
        """Return the bare module, or the mapping of them, whose forward does not communicate."""
        return self.bare["model"] if self.single else self.bare

    def train(self, mode: bool) -> None:
        """Switch every module between training and evaluation."""
        for module in self.wrapped.values():
            module.train(mode)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of a micro-batch: gradients are reduced in the last one of a step alone."""
        if last or self._world.world_size == 1:
            return nullcontext()
        return self._without_reduction()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every module."""
        for module in self.bare.values():
            yield from module.parameters()

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, on the device. Ranks: the same value on all, without communication."""
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Scale the gradient down to `limit` and return its norm before that."""
        norm = self.gradient_norm(parameters)
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def clear_gradient(self) -> None:
        """Forget every gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient in place."""
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Give the bare model in evaluation mode, with rank zero's buffers on every rank; training goes on as if nothing was.

        Ranks: all; communicates where there are buffers.
        """
        with self.common_buffers():
            self.train(False)
            try:
                yield self.evaluating
            finally:
                self.train(True)

    @contextmanager
    def common_buffers(self) -> Iterator[None]:
        """Give every rank rank zero's buffers for a while; where they are never shared each gets its own back.

        Ranks: all; communicates where there are buffers.
        """
        buffers = self._buffers()
        own = {name: buffer.clone() for name, buffer in buffers.items()} if self.own_buffers() else {}
        for group in _of_one_dtype(buffers.values()):
            flat = self._world.broadcast(torch.cat([buffer.reshape(-1) for buffer in group]))
            for buffer, values in zip(group, torch.split(flat, [buffer.numel() for buffer in group]), strict=True):
                buffer.copy_(values.view_as(buffer))
        try:
            yield
        finally:
            for name, kept in own.items():
                buffers[name].copy_(kept)

    def own_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that DDP does not share, by name: with `strategy.broadcast_buffers=false`, or in a frozen model."""
        if self._world.world_size == 1:
            return {}
        return {
            f"{name}.{key}": buffer
            for name, module in self.bare.items()
            for key, buffer in module.named_buffers()
            if not (self._shares_buffers and isinstance(self.wrapped[name], DistributedDataParallel))
        }

    def _buffers(self) -> dict[str, Tensor]:
        if self._world.world_size == 1:
            return {}
        return {f"{name}.{key}": buffer for name, module in self.bare.items() for key, buffer in module.named_buffers()}

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.wrapped.values():
                if isinstance(module, DistributedDataParallel):  # a frozen one is not
                    stack.enter_context(module.no_sync())
            yield


def _of_one_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups.values()


def _wrap(module: nn.Module, options: Options, world: World) -> nn.Module:
    if not any(p.requires_grad for p in module.parameters()):
        return module  # nothing to reduce, and DDP refuses such a module
    wrapped = DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        **_buffers(options.broadcast_buffers),
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
    )
    _register_hook(wrapped, options)
    return wrapped


def _buffers(broadcast: bool) -> dict[str, Any]:
    """Name the switch as this torch does: 2.13 renamed it and warns of the old name."""
    if broadcast:
        return {}  # the default
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _register_hook(module: DistributedDataParallel, options: Options) -> None:
    if options.comm_hook == "none":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if options.comm_hook == "powersgd":
        try:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=options.powersgd_rank, start_powerSGD_iter=2)
        except ValueError as error:
            raise RefusedError(f"strategy.comm_hook=powersgd: {error}.") from None
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[options.comm_hook]
        module.register_comm_hook(None, hook)
