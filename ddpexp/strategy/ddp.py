"""Data parallelism: full replicas and averaged gradients, with torch's DistributedDataParallel or in one bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpexp.compat.autograd import preserved_versions
from ddpexp.compat.ddp import FixedBuckets
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.bucket import Bucket
from ddpexp.strategy.comm.reduce import SharedMemoryReducer, reducer_for, replace_reducer
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.late_reduction import LateDDP
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.replica import Gradients, Models, Replicas, broadcast_rank_zero, check_same_models

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
_FORWARD_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"
)  # torch 2.13


def build(
    options: DDPOptions,
    world: World,
    factory: Callable[[], Any],
    *,
    trainer: Trainer,
    gradient_accumulation_steps: int,
    prepare: Callable[[Any], None],
) -> Replicas:
    """Build DDP, or with `trainer.reduction=exact` the strategy that sums in a fixed order."""
    common: dict[str, Any] = {
        "channels_last": trainer.channels_last, "compilation": Compilation.of(trainer), "prepare": prepare,
    }  # fmt: skip
    if trainer.reduction == "exact":
        return Exact(options, world, factory, gradient_accumulation_steps=gradient_accumulation_steps, **common)
    return DDP(options, world, factory, **common)


class DDP(Replicas):
    """One replica on this rank, whose gradients are averaged over all ranks."""

    def __init__(
        self,
        options: DDPOptions,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        channels_last: bool = False,
        compilation: Compilation | None = None,
        prepare: Callable[[Models], None] = lambda models: None,
    ) -> None:
        """Build the model on this rank's device and wrap it, before any optimizer is built.

        `prepare` gets the modules before they are wrapped, for example to load weights into them.
        Ranks: all; broadcasts rank zero's weights.
        """
        super().__init__(
            world, factory, channels_last=channels_last, compilation=compilation, sync_batchnorm=options.sync_batchnorm,
            prepare=prepare, shard_optimizer=options.shard_optimizer,
        )  # fmt: skip
        self._world = world
        self.gradient_weight = float(world.world_size)  # the reduction averages over ranks
        self._buckets: list[Bucket] = []
        trained = {name: parameters for name, module in self.modules.items() if (parameters := _trained(name, module))}
        may_be_unused = options.find_unused_parameters or options.static_graph
        self._gradients = [] if may_be_unused else [Gradients(parameters) for parameters in trained.values()]
        reducer = None
        if world.world_size > 1:
            check_same_models(self.modules, world)
            reducer = reducer_for([p for parameters in trained.values() for p in parameters.values()], options, world)
            if isinstance(reducer, SharedMemoryReducer):
                self.memory = reducer.memory
                self._world = replace(world, memory=self.memory)
            fixed = fixes_buckets(options, world.world_size, world.device.type)
            for name, parameters in trained.items():
                module = self.wrapped[name]
                if isinstance(reducer, SharedMemoryReducer) and Bucket.fits(
                    parameters, options, reducer.memory.slot_bytes
                ):
                    self._buckets.append(Bucket(parameters, reducer, world))
                    broadcast_rank_zero(
                        [tensor.detach() for tensor in (*module.parameters(), *module.buffers())], self._world
                    )
                    continue
                self.wrapped[name] = wrapped = _wrap(module, options, world, fixed)
                if reducer is not None:
                    replace_reducer(wrapped, reducer, world)
        self._shares_buffers_of = [
            self.modules[name] for name in trained if options.broadcast_buffers and world.world_size > 1
        ]
        self._buffers_due = True
        self._late = [module for module in self.wrapped.values() if isinstance(module, LateDDP)]  # none if frozen
        self.waits_in_backward = world.world_size > 1 and reducer is None  # torch's DDP
        self._gradient_syncs = {last: _GradientSync(self, last) for last in (False, True)}

    def train(self, mode: bool) -> None:
        """Set every module to training or evaluation mode."""
        super().train(mode)
        for bucket in self._buckets:
            bucket.training = mode

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch; the last one of a step reduces gradients."""
        return self._gradient_syncs[last]

    @contextmanager
    def synced_buffers(self) -> Iterator[None]:
        """Give every rank the buffers of rank zero inside the block; local ones are restored afterwards.

        Ranks: all; communicates if there are buffers.
        """
        buffers = self._buffers()
        local = {name: buffer.clone() for name, buffer in buffers.items()} if self.local_buffers() else {}
        broadcast_rank_zero(buffers.values(), self._world)
        try:
            yield
        finally:
            for name, saved in local.items():
                buffers[name].copy_(saved)

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that are not broadcast, by name.

        These are all with `strategy.broadcast_buffers=false`, and those of frozen models.
        """
        if self._world.world_size == 1:
            return {}
        return {
            f"{name}.{key}": buffer
            for name, module in self.modules.items()
            for key, buffer in module.named_buffers()
            if not any(module is shared for shared in self._shares_buffers_of)
        }

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank zero before the first micro-batch of a round.

        Ranks: all; communicates if there are any. However often a rank calls the model, they are sent once.
        """
        if self._buffers_due and self._shares_buffers_of:
            buffers = tuple(buffer for module in self._shares_buffers_of for buffer in module.buffers())
            with torch.no_grad(), preserved_versions(buffers):
                broadcast_rank_zero(buffers, self._world)
        self._buffers_due = False

    def _buffers(self) -> dict[str, Tensor]:
        if self._world.world_size == 1:
            return {}
        return {
            f"{name}.{key}": buffer for name, module in self.modules.items() for key, buffer in module.named_buffers()
        }

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce the gradients in the buckets. Ranks: all; communicates."""
        filled = [bucket for bucket in self._buckets if bucket.fill()]
        if filled:
            filled[0].reducer.finish()
            for bucket in filled:
                bucket.assign()


class _GradientSync(AbstractContextManager[None]):
    """The context of a micro-batch, at whose end gradients are reduced if it is the last one of a round.

    A class, because a generator takes four times as long.
    """

    def __init__(self, strategy: DDP, last: bool) -> None:
        self._strategy, self._last = strategy, last
        self._buckets, self._late, self._gradients = strategy._buckets, strategy._late, strategy._gradients
        self._is_alone = not (self._buckets or self._late)
        self._no_sync = ExitStack()

    def __enter__(self) -> None:
        if self._is_alone:
            return
        self._strategy.share_buffers()
        for bucket in self._buckets:
            bucket.last = self._last
        for module in self._late:
            overlaps = self._last and self._strategy.has_single_passes  # gradients can be reduced in backward
            module.begin(self._last, overlaps)
            if not overlaps:
                self._no_sync.enter_context(module.no_sync())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        last = self._last
        if not self._is_alone:
            self._strategy._buffers_due = last
            self._no_sync.close()
            for bucket in self._buckets:
                bucket.last = None
        if kind is None:
            for gradients in self._gradients:
                gradients.check(last)
            if last and not self._is_alone:
                self._reduce()

    def _reduce(self) -> None:
        for module in self._late:
            with self._strategy._world.times.collective:
                module.finish()
        if self._buckets:
            self._strategy._reduce()


def _trained(model: str, module: nn.Module) -> dict[str, nn.Parameter]:
    return {f"{model}.{name}": p for name, p in module.named_parameters() if p.requires_grad}


def _wrap(module: nn.Module, options: DDPOptions, world: World, fixed: bool) -> LateDDP:
    """Wrap a module; `fixed` cuts the buckets once, before the first step."""
    kind = _FixedLateDDP if fixed else LateDDP
    wrapped = kind(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        **dict[str, Any]({_FORWARD_BUFFERS: False}),  # see `DDP.share_buffers`
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
    )
    _register_hook(wrapped, options)
    return wrapped


class _FixedLateDDP(FixedBuckets, LateDDP):
    """Both, for backends that choose the order of a sum by the layout of the buckets."""


def fixes_buckets(options: DDPOptions, world_size: int, device: str) -> bool:
    """Return whether DDP must have the same buckets in every step: the backend orders a sum by their layout.

    On CPUs gradients are summed in the order of the ranks, whatever the layout, unless a hook compresses them; a sum of
    two is the same in either order. DDP itself keeps its first buckets where it searches for unused parameters.
    """
    orders = options.comm_hook != "none" or device != "cpu"
    return world_size > 2 and orders and not options.find_unused_parameters


def _register_hook(module: DistributedDataParallel, options: DDPOptions) -> None:
    if options.comm_hook == "none":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # `DDPOptions.late_modules`

    if options.comm_hook == "powersgd":
        try:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=options.powersgd_rank, start_powerSGD_iter=2
            )
        except ValueError as error:
            raise RefusedError(f"cannot be set up: {error}", key="strategy.comm_hook", value="powersgd") from None
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[options.comm_hook]
        module.register_comm_hook(None, hook)
