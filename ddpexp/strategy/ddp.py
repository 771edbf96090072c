"""Data parallelism: whole replicas, averaged gradients, by torch's DistributedDataParallel or in one bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.strategy.bucket import Bucket, WithRankZerosBuffers
from ddpexp.strategy.comm.reduce import SharedMemoryReducer, reducer_for, take_over
from ddpexp.strategy.comm.shared_memory import SharedMemory
from ddpexp.strategy.options import Options
from ddpexp.strategy.replica import Gradients, Models, Replica, check_same_models, take_rank_zeros


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
        deterministic: bool = False,
    ) -> None:
        """Build the model on this rank's device and wrap it, before any optimizer is made.

        `prepare` sees the bare modules before they are wrapped (to load weights into them).
        Ranks: all; communicates rank zero's weights to the others.
        """
        self._replica = Replica.build(
            options, world, factory, channels_last=channels_last, compile=compile, prepare=prepare
        )
        self.single, self.modules = self._replica.single, self._replica.modules
        self._world = world
        self.gradient_weight = float(world.world_size)  # the reduction averages over ranks
        self._shares_buffers = options.broadcast_buffers  # before every forward anyway
        self.wrapped = dict(self._replica.compiled)
        self.memory: SharedMemory | None = None
        self._buckets: list[Bucket] = []
        trained = {name: parameters for name, module in self.modules.items() if (parameters := _trained(name, module))}
        any_may_lack = options.find_unused_parameters or options.static_graph
        self._gradients = [] if any_may_lack else [Gradients(parameters) for parameters in trained.values()]
        if world.world_size > 1:
            check_same_models(self.modules, world)
            reducer = reducer_for([p for parameters in trained.values() for p in parameters.values()], options, world)
            if isinstance(reducer, SharedMemoryReducer):
                self.memory = reducer.memory
                self._world = replace(world, memory=self.memory)
            fixed = world.world_size > 2 and (
                options.comm_hook != "none" or (world.device.type == "cuda" and deterministic)
            )
            for name, parameters in trained.items():
                module = self._replica.compiled[name]
                if isinstance(reducer, SharedMemoryReducer) and Bucket.fits(
                    parameters, options, reducer.memory.slot_bytes
                ):
                    self._buckets.append(Bucket(parameters, reducer, world))
                    take_rank_zeros(
                        [tensor.detach() for tensor in (*module.parameters(), *module.buffers())], self._world
                    )
                    if self._shares_buffers and next(module.buffers(), None) is not None:
                        self.wrapped[name] = WithRankZerosBuffers(module, self._buckets[-1], self._world)
                    continue
                self.wrapped[name] = wrapped = _wrap(module, options, world, fixed)
                if reducer is not None:
                    take_over(wrapped, reducer, world)
        self._micro_batches = {last: _MicroBatch(self, last) for last in (False, True)}

    @property
    def train_model(self) -> Any:
        """Return what a task's training step calls: the wrapped module, or the mapping of them."""
        return self._replica.of(self.wrapped)

    @property
    def eval_model(self) -> Any:
        """Return the bare module, or the mapping of them, whose forward does not communicate."""
        return self._replica.of(self.modules)

    def train(self, mode: bool) -> None:
        """Switch every module between training and evaluation."""
        for module in self.wrapped.values():
            module.train(mode)
        for bucket in self._buckets:
            bucket.training = mode

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of a micro-batch: gradients are reduced in the last one of a step alone."""
        return self._micro_batches[last]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every module."""
        yield from self._replica.parameters

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, on the device. Ranks.

        The same value on all, without communication.
        """
        return self._replica.gradient_norm(parameters)

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Scale the gradient down to `limit` and return its norm before that."""
        return self._replica.clip(parameters, limit)

    def clear_gradient(self) -> None:
        """Forget every gradient."""
        self._replica.clear_gradient()

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient in place."""
        self._replica.scale_gradient(factor)

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Give the bare model in evaluation mode, with rank zero's buffers on every rank.

        Training goes on as if nothing was.

        Ranks: all; communicates where there are buffers.
        """
        with self.synced_buffers():
            self.train(False)
            try:
                yield self.eval_model
            finally:
                self.train(True)

    @contextmanager
    def synced_buffers(self) -> Iterator[None]:
        """Give every rank rank zero's buffers for a while; where they are never shared each gets its own back.

        Ranks: all; communicates where there are buffers.
        """
        buffers = self._buffers()
        own = {name: buffer.clone() for name, buffer in buffers.items()} if self.local_buffers() else {}
        take_rank_zeros(buffers.values(), self._world)
        try:
            yield
        finally:
            for name, kept in own.items():
                buffers[name].copy_(kept)

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that are not shared, by name.

        With `strategy.broadcast_buffers=false`, or in a frozen model.
        """
        if self._world.world_size == 1:
            return {}
        return {
            f"{name}.{key}": buffer
            for name, module in self.modules.items()
            for key, buffer in module.named_buffers()
            if not (
                self._shares_buffers and isinstance(self.wrapped[name], DistributedDataParallel | WithRankZerosBuffers)
            )
        }

    def _buffers(self) -> dict[str, Tensor]:
        if self._world.world_size == 1:
            return {}
        return {
            f"{name}.{key}": buffer for name, module in self.modules.items() for key, buffer in module.named_buffers()
        }

    @torch.no_grad()
    def _reduce(self) -> None:
        """Sum the gradients that have come into the buckets. Ranks: all; communicates."""
        filled = [bucket for bucket in self._buckets if bucket.fill()]
        if filled:
            filled[0].reducer.finish()
            for bucket in filled:
                bucket.give()


class _MicroBatch(AbstractContextManager[None]):
    """A micro-batch, of a step's last ones or not; a class, for a generator takes four times as long."""

    def __init__(self, strategy: DDP, last: bool) -> None:
        self._strategy, self._last = strategy, last
        self._without = ExitStack()

    def __enter__(self) -> None:
        for bucket in self._strategy._buckets:
            bucket.last = self._last
        if not self._last:
            for module in self._strategy.wrapped.values():
                if isinstance(module, DistributedDataParallel):  # a frozen one is not
                    self._without.enter_context(module.no_sync())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for bucket in self._strategy._buckets:
            bucket.last = None
        self._without.close()
        if kind is None:
            for gradients in self._strategy._gradients:
                gradients.check(self._last)
            if self._last:
                self._strategy._reduce()


def _trained(model: str, module: nn.Module) -> dict[str, nn.Parameter]:
    return {f"{model}.{name}": p for name, p in module.named_parameters() if p.requires_grad}


def _wrap(module: nn.Module, options: Options, world: World, fixed: bool) -> DistributedDataParallel:
    """Wrap a module; `fixed` keeps its buckets as they are from the first step on.

    After its first step DDP lays the buckets out anew, and where the backend chooses the order of a sum by their
    layout, the first step after a resume would differ from that of the undisturbed run. It does not where it looks for
    unused parameters.
    """
    looks_in_vain = fixed and not (options.find_unused_parameters or options.static_graph)
    wrapped = DistributedDataParallel(
        _WithUnused(module) if looks_in_vain else module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        **_buffers(options.broadcast_buffers),
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters or (fixed and not options.static_graph),
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
    )
    _register_hook(wrapped, options)
    return wrapped


class _WithUnused(nn.Module):
    """A model beside a parameter that no forward pass reaches.

    DDP warns when it looks for such parameters and finds none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        trained = next(parameter for parameter in module.parameters() if parameter.requires_grad)
        self.unused = nn.Parameter(trained.new_zeros(1))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **named)


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
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=options.powersgd_rank, start_powerSGD_iter=2
            )
        except ValueError as error:
            raise RefusedError(f"strategy.comm_hook=powersgd: {error}.") from None
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[options.comm_hook]
        module.register_comm_hook(None, hook)
