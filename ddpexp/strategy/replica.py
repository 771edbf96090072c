"""What all strategies have in common in which every rank holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ddpexp.compat import operators
from ddpexp.compat.autograd import version
from ddpexp.distributed.transfers import is_host
from ddpexp.distributed.world import Memory, World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.base import Shard
from ddpexp.strategy.compiled import CompiledForward, compile_blocks, compile_model
from ddpexp.strategy.mesh import DataRank
from ddpexp.strategy.norm import norm_dtype, norm_of_rows, norm_of_tensors, row_norms
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.sharded_optimizer import ShardedOptimizer
from ddpexp.system.text import first_few
from ddpexp.task import OptimizerStep, Sums

Models = dict[str, nn.Module]


def modules_of(built: Any) -> Models:
    """Return what a model function has returned by the names of the weights in a checkpoint; `model` if it is one."""
    return {"model": built} if isinstance(built, nn.Module) else dict(built)


class Replicas:
    """Base class for strategies in which every rank holds the whole model and gradients are reduced once a step.

    A subclass calls `share_initial_weights` and overrides `reduce_gradients`, at least.
    """

    norm_by_rows: ClassVar[bool] = False  # on GPUs too: the norm has the same bits at every number of workers

    def __init__(
        self,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        channels_last: bool = False,
        compilation: Compilation | None = None,
        sync_batchnorm: bool = False,
        prepare: Callable[[Models], None] = lambda models: None,
        shard_optimizer: bool = False,
    ) -> None:
        """Build the models on this rank's device.

        `prepare` gets them before they are compiled, for example to load weights into them; blocks are compiled at
        their first call, so that what `prepare` puts around the forward of one stays around it. `shard_optimizer`
        divides the state of the optimizers among the ranks.
        """
        built = factory()
        self.single = isinstance(built, nn.Module)
        self.modules = modules_of(built)
        for name, module in self.modules.items():
            module.to(world.device)
            if channels_last:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if sync_batchnorm:
                self.modules[name] = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        self._blocks: list[CompiledForward] = []
        if compilation is not None and compilation.blocks is not None:
            self._blocks = compile_blocks(self.modules, compilation.blocks, compilation.mode)
        prepare(self.modules)
        self.wrapped = dict(self.modules)  # as they are called in training
        if compilation is not None and compilation.blocks is None:
            self.wrapped = {name: compile_model(module, compilation.mode) for name, module in self.modules.items()}
        self.data = DataRank(world.rank, world.world_size)
        self.gradient_weight = 1.0
        self.memory: Memory | None = None
        self.forward_communicates = self.evaluates_together = self.returns_on_last_stage = False
        self.waits_in_backward = self.has_single_passes = False
        self.stage = 0
        self._sharding_world = world if shard_optimizer and world.world_size > 1 else None

    @cached_property
    def _parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for module in self.modules.values() for p in module.parameters())

    def share_initial_weights(self, world: World) -> None:
        """Give every rank the parameters and buffers of rank zero. Ranks: all; communicates.

        Raises:
            DdpexpError: the parameters or buffers have different names, shapes or dtypes.
        """
        if world.world_size > 1:
            check_same_models(self.modules, world)
            modules = self.modules.values()
            shared = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
            broadcast_rank_zero([tensor.detach() for tensor in shared], world)

    @cached_property
    def train_model(self) -> Any:
        """Return the wrapped module that a task trains, or the mapping of modules."""
        return self.wrapped["model"] if self.single else self.wrapped

    @property
    def eval_model(self) -> Any:
        """Return the module as built, or the mapping of modules; its forward pass does not communicate."""
        return self.modules["model"] if self.single else self.modules

    def train(self, mode: bool) -> None:
        """Set every module to training or evaluation mode."""
        for module in self.wrapped.values():
            module.train(mode)
        for block in self._blocks:
            block.enabled = mode

    def build_optimizers(self, build: Callable[[Any], Mapping[str, Optimizer]]) -> Mapping[str, Optimizer]:
        """Return the optimizers that `build(model)` makes; of sharded ones every rank has a share of the state."""
        optimizers = build(self.eval_model)
        if self._sharding_world is None:
            return optimizers
        world = replace(self._sharding_world, memory=self.memory)
        return {name: ShardedOptimizer(optimizer, world) for name, optimizer in optimizers.items()}

    def train_step(self, step: OptimizerStep, micro_batches: Sequence[Any]) -> list[Sums]:
        """Go through the micro-batches, then step the optimizers; return the sums of each micro-batch."""
        every = []
        last = len(micro_batches) - 1
        for number, batch in enumerate(micro_batches):
            with step.micro_batch(number == last) as micro_batch:
                sums = micro_batch.forward(batch)
                micro_batch.backward(sums[0], sums[1])
            every.append(sums)
        step.apply()
        return every

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch; the last one of a step reduces gradients."""
        return self._reducing_after(last)

    @contextmanager
    def _reducing_after(self, last: bool) -> Iterator[None]:
        yield
        if last:
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Sum the gradients of all ranks into those of the parameters. Ranks: all; communicates."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither reduce_gradients nor micro_batch")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every module."""
        yield from self._parameters

    def gradient_values(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return what this rank holds of the existing gradients, as dense real tensors that share memory with them."""
        return gradient_values(parameters)

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return the largest value of a flag on the ranks; here all have the same. Shapes: a scalar."""
        return flag

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, on the device. Ranks: the same on all, without communication."""
        values = self.gradient_values(parameters)
        if not values:
            return torch.tensor(0.0, device=parameters[0].device if parameters else None)
        dtype = norm_dtype(values)
        with torch.no_grad():
            if self.norm_by_rows or is_host(values[0].device):
                return norm_of_rows([row_norms(value, dtype) for value in values])
            return norm_of_tensors(values, dtype)

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Clip the gradient norm to `limit`; return the norm before clipping."""
        return self._clip(parameters, self.gradient_norm(parameters), limit)

    def norm_to_record(self, norm: Tensor) -> Tensor:
        """Return the norm that `clip` returned; here all ranks have the same."""
        return norm

    def _clip(self, parameters: Sequence[Tensor], norm: Tensor, limit: float) -> Tensor:
        with torch.no_grad():  # as `nn.utils.clip_grads_with_norm_`, which supports only dense gradients
            if values := self.gradient_values(parameters):
                operators.foreach_mul_(values, torch.clamp(limit / (norm + 1e-6), max=1.0).to(values[0].device))
        return norm

    def clear_gradient(self) -> None:
        """Clear every gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient in place."""
        operators.foreach_mul_(self.gradient_values(self._parameters), factor)

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Yield `eval_model` in evaluation mode, with rank zero's buffers; restores training mode on exit.

        Ranks: all; communicates if ranks have buffers of their own.
        """
        with self.synced_buffers():
            self.train(False)
            try:
                yield self.eval_model
            finally:
                self.train(True)

    def synced_buffers(self) -> AbstractContextManager[None]:
        """Give every rank the buffers of rank zero inside the block; here they have the same ones anyway."""
        return nullcontext()

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that may differ between ranks, by name: none."""
        return {}

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return the tensor, which every rank holds."""
        return Shard.whole(tensor)

    def shard_to_save(self, name: str, tensor: Tensor) -> Shard:
        """Return what `shard` returns, whose rows are whole."""
        return self.shard(name, tensor)

    def from_local(self, name: str, local: Tensor) -> Tensor:
        """Return the rows as they are."""
        return local


def gradient_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the existing gradients as dense real tensors that share memory with them.

    For sparse gradients, which are coalesced, these are the values; for complex ones, the real and imaginary parts.
    """
    return [
        gradient if gradient.layout is torch.strided and not gradient.is_complex() else _values_of(parameter)
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    ]


def clip_values(parameters: Iterable[Tensor], limit: float) -> None:
    """Limit the absolute value of each element of the gradients, of complex ones that of each part."""
    with torch.no_grad():  # as `nn.utils.clip_grad_value_`, which supports only dense real gradients
        if values := gradient_values(parameters):
            operators.foreach_clamp_min_(values, -limit)
            operators.foreach_clamp_max_(values, limit)


def _values_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse and not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    elif gradient.is_conj():  # a lazy conjugate: a view of other numbers
        parameter.grad = gradient = gradient.resolve_conj()
    values = gradient.values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


_LARGE_BYTES = 1 << 18  # of a tensor that is worth a message of its own


def broadcast_rank_zero(tensors: Iterable[Tensor], world: World) -> None:
    """Give every rank the values of rank zero, in place.

    Large tensors are sent as they are, small ones together: a copy of all would take a model's memory once more.
    Ranks: all; communicates once for each large tensor and each dtype.
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() >= _LARGE_BYTES and tensor.is_contiguous():
            world.broadcast(tensor.view(-1).view(torch.uint8))
        else:
            groups.setdefault(tensor.dtype, []).append(tensor)
    for group in groups.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        world.broadcast(flat.view(torch.uint8))  # as bytes, because gloo supports only a few dtypes
        for tensor, values in zip(group, torch.split(flat, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(values.view_as(tensor))


def check_same_models(models: Models, world: World) -> None:
    """Check that this rank has built the same model as rank zero. Ranks: all; communicates.

    Raises:
        DdpexpError: the parameters or buffers have different names, shapes or dtypes.
    """
    description = [
        (name, key, list(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, module in models.items()
        for key, tensor in (*module.named_parameters(), *module.named_buffers())
        if not is_lazy(tensor)  # its shape is not known yet
    ]
    digest = torch.tensor(list(sha256(repr(description).encode()).digest()), dtype=torch.uint8, device=world.device)
    if not torch.equal(world.broadcast(digest.clone()), digest):
        raise DdpexpError(
            f"rank {world.rank} has built a different model than rank zero: its parameters or buffers have "
            "other names, shapes or dtypes",
            suggestion="Let model._target_ build the same one on every rank.",
        )


_SEEN = "_ddpexp_version_seen"  # attribute of a gradient: its version at the last check


class Gradients:
    """Checks that each micro-batch gives all trained parameters of a model a gradient, or none of them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Check these parameters; the names are for errors."""
        self._parameters, self._tensors = dict(parameters), tuple(parameters.values())
        self._accumulated = False  # gradients of earlier micro-batches of this step are still there

    def check(self, last: bool) -> None:
        """Check the gradients after a micro-batch; they are cleared after the `last` one of a step.

        Raises:
            DdpexpError: some parameters got a gradient, and others did not.
        """
        if last and not self._accumulated:
            for parameter in self._tensors:  # without a generator, because it takes three times as long
                if parameter.grad is None:
                    break
            else:
                return
        missing, reached = [], False
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None or (self._accumulated and getattr(gradient, _SEEN, None) == version(gradient)):
                if parameter.requires_grad:
                    missing.append(name)
            else:
                reached = True
        if reached and missing:
            raise unused(missing)
        self._accumulated = not last
        for parameter in () if last else self._parameters.values():
            if (gradient := parameter.grad) is not None:
                setattr(gradient, _SEEN, version(gradient))


def unused(names: Sequence[str], remedy: str = "strategy.find_unused_parameters=true") -> DdpexpError:
    """Return the error for parameters that got no gradient while others did; `remedy` allows that."""
    return DdpexpError(
        f"{first_few(names)} got no gradient in a micro-batch, because its loss does not depend on it",
        suggestion=f"If that is intended, use {remedy}.",
    )
