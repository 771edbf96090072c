"""A full model on one rank, and the operations shared by all strategies with full replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.options import Options

Models = dict[str, nn.Module]


@dataclass(frozen=True)
class Replica:
    """The models as built, and as they are called: compiled if trainer.compile is set."""

    single: bool  # the factory returned one module, not a mapping of modules
    modules: Models
    compiled: Models
    parameters: tuple[nn.Parameter, ...]

    @classmethod
    def build(
        cls,
        options: Options,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        channels_last: bool,
        compile: bool,
        prepare: Callable[[Models], None],
    ) -> Replica:
        """Build the models on this rank's device.

        `prepare` gets them before they are compiled, for example to load weights into them.
        """
        built = factory()
        modules: Models = {"model": built} if isinstance(built, nn.Module) else dict(built)
        for name, module in modules.items():
            module.to(world.device)
            if channels_last:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if options.sync_batchnorm:
                modules[name] = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        prepare(modules)
        compiled = dict(modules)
        if compile:
            # Not `module.compile()`: torch 2.13 then does not compile classes whose forward is torch's own, such as
            # nn.Sequential.
            compiled = {name: cast(nn.Module, torch.compile(module)) for name, module in modules.items()}
        return cls(
            isinstance(built, nn.Module),
            modules,
            compiled,
            tuple(p for module in modules.values() for p in module.parameters()),
        )

    def of(self, models: Models) -> Any:
        """Return the one module, or the mapping of modules, as the factory returned it."""
        return models["model"] if self.single else models

    def clear_gradient(self) -> None:
        """Clear every gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient in place."""
        torch._foreach_mul_(gradient_values(self.parameters), factor)

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the gradient, on the device."""
        values = gradient_values(parameters)
        if not values:
            return torch.tensor(0.0, device=parameters[0].device if parameters else None)
        with torch.no_grad():  # as `nn.utils.get_total_norm`, without grouping by device
            dtypes = {value.dtype for value in values}
            if dtypes == {torch.float32}:
                norms = torch._foreach_norm(values)
            else:  # the three digits of a 16-bit sum are too few to clip by, and dtypes cannot be mixed
                norms = torch._foreach_norm(
                    values, 2, dtype=torch.float64 if torch.float64 in dtypes else torch.float32
                )
            return torch.linalg.vector_norm(torch.stack(norms))  # type: ignore[no-any-return]

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Clip the gradient norm to `limit`; return the norm before clipping."""
        norm = self.gradient_norm(parameters)
        with torch.no_grad():  # as `nn.utils.clip_grads_with_norm_`, which supports only dense gradients
            if values := gradient_values(parameters):
                torch._foreach_mul_(values, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


def gradient_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the existing gradients as dense real tensors that share memory with them.

    For sparse gradients, which are coalesced, these are the values; for complex ones, the real and imaginary parts.
    """
    return [
        gradient if gradient.layout is torch.strided and not gradient.is_complex() else _values_of(parameter)
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    ]


def _values_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse and not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    elif gradient.is_conj():  # a lazy conjugate: a view of other numbers
        parameter.grad = gradient = gradient.resolve_conj()
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def broadcast_rank_zero(tensors: Iterable[Tensor], world: World) -> None:
    """Give every rank the values of rank zero, in place. Ranks: all; communicates once for each dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
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
            f"rank {world.rank} has built a different model than rank zero: its parameters or buffers have other "
            "names, shapes or dtypes. Let model._target_ build the same one on every rank."
        )


_SEEN = "_ddpexp_version_seen"  # attribute of a gradient: its version at the last check


class Gradients:
    """Checks that each micro-batch gives all trained parameters of a model a gradient, or none of them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Check these parameters; the names are for errors."""
        self._parameters = dict(parameters)
        self._accumulated = False  # gradients of earlier micro-batches of this step are still there

    def check(self, last: bool) -> None:
        """Check the gradients after a micro-batch; they are cleared after the `last` one of a step.

        Raises:
            DdpexpError: some parameters got a gradient, and others did not.
        """
        if (
            last
            and not self._accumulated
            and all(parameter.grad is not None for parameter in self._parameters.values())
        ):
            return
        missing, reached = [], False
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None or (self._accumulated and getattr(gradient, _SEEN, None) == gradient._version):
                if parameter.requires_grad:
                    missing.append(name)
            else:
                reached = True
        if reached and missing:
            raise unused(missing)
        self._accumulated = not last
        for parameter in () if last else self._parameters.values():
            if (gradient := parameter.grad) is not None:
                setattr(gradient, _SEEN, gradient._version)


def unused(names: Sequence[str]) -> DdpexpError:
    """Return the error for parameters that got no gradient while others did."""
    return DdpexpError(
        f"{listed(names)} got no gradient in a micro-batch, because its loss does not depend on it. If that is "
        "intended, use strategy.find_unused_parameters=true."
    )


def listed(names: Sequence[str]) -> str:
    """Return the names as text, at most five of them."""
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
