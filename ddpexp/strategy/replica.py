"""One whole model on one rank, and what every strategy of whole replicas does with it."""

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
    """The models as built, and as they are called: compiled, where that is asked for."""

    single: bool  # the factory gave one module, not a mapping of them
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

        `prepare` sees them before they are wrapped (to load weights into them).
        """
        built = factory()
        bare: Models = {"model": built} if isinstance(built, nn.Module) else dict(built)
        for name, module in bare.items():
            module.to(world.device)
            if channels_last:
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if options.sync_batchnorm:
                bare[name] = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        prepare(bare)
        called = dict(bare)
        if compile:
            # Not `module.compile()`: torch 2.13 then leaves a class alone whose forward is torch's own, such as
            # nn.Sequential.
            called = {name: cast(nn.Module, torch.compile(module)) for name, module in bare.items()}
        return cls(
            isinstance(built, nn.Module),
            bare,
            called,
            tuple(p for module in bare.values() for p in module.parameters()),
        )

    def of(self, models: Models) -> Any:
        """Return the one module, or the mapping of them, as the factory gave it."""
        return models["model"] if self.single else models

    def clear_gradient(self) -> None:
        """Forget every gradient."""
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
        with (
            torch.no_grad()
        ):  # what `nn.utils.get_total_norm` does on one device, without the questions where each of them is
            kinds = {value.dtype for value in values}
            if kinds == {torch.float32}:
                norms = torch._foreach_norm(values)
            else:  # three digits of a 16-bit sum are too few to clip by, and kinds cannot be mixed
                norms = torch._foreach_norm(values, 2, dtype=torch.float64 if torch.float64 in kinds else torch.float32)
            return torch.linalg.vector_norm(torch.stack(norms))  # type: ignore[no-any-return]

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Scale the gradient down to `limit` and return its norm before that."""
        norm = self.gradient_norm(parameters)
        with torch.no_grad():  # what `nn.utils.clip_grads_with_norm_` does, which knows dense gradients alone
            if values := gradient_values(parameters):
                torch._foreach_mul_(values, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


def gradient_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return dense tensors of real numbers that hold the gradients there are: what changes them changes the gradients.

    Of sparse gradients, which are coalesced for it, these are the values; of complex ones real and imaginary parts.
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
    elif gradient.is_conj():  # a view that says so, of other numbers
        parameter.grad = gradient = gradient.resolve_conj()
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def take_rank_zeros(tensors: Iterable[Tensor], world: World) -> None:
    """Give every rank rank zero's values, in place. Ranks: all; communicates once for each type of number."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for group in groups.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        world.broadcast(flat.view(torch.uint8))  # gloo moves any number as bytes, but knows few types
        for tensor, values in zip(group, torch.split(flat, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(values.view_as(tensor))


def check_same_models(models: Models, world: World) -> None:
    """See that this rank has built what rank zero has, before anything is shared. Ranks: all; communicates.

    Raises:
        DdpexpError: the parameters or buffers have other names, shapes or kinds of number.
    """
    own = [
        (name, key, list(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, module in models.items()
        for key, tensor in (*module.named_parameters(), *module.named_buffers())
        if not is_lazy(tensor)  # of which nobody knows anything yet
    ]
    mark = torch.tensor(list(sha256(repr(own).encode()).digest()), dtype=torch.uint8, device=world.device)
    if not torch.equal(world.broadcast(mark.clone()), mark):
        raise DdpexpError(
            f"rank {world.rank} has built another model than rank zero: its parameters or buffers have other names, "
            "shapes or kinds of number. Let model._target_ build the same one on every rank."
        )


_SEEN = "_ddpexp_version_seen"  # a gradient's, when the last look was taken


class Gradients:
    """Which trained parameters of a model a micro-batch gives a gradient.

    All of them or none, on any number of workers.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch these parameters; the names are for errors."""
        self._parameters = dict(parameters)
        self._accumulated = False  # since the last look that began anew

    def check(self, last: bool) -> None:
        """Look at what the micro-batch that ends here has left. Gradients are cleared behind a step's last one.

        Raises:
            DdpexpError: some parameters have got a gradient, and others have not.
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
    """Return the error of parameters that got no gradient where others did."""
    return DdpexpError(
        f"{listed(names)} got no gradient in a micro-batch, for its loss does not depend on it. If that is meant, use "
        "strategy.find_unused_parameters=true."
    )


def listed(names: Sequence[str]) -> str:
    """Return the names as a text, the first five of many."""
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
