"""The number format of a step, and skipping updates with non-finite gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddpexp.compat import operators
from ddpexp.compat.autograd import run_backward
from ddpexp.errors import DdpexpError
from ddpexp.strategy.replica import gradient_values
from ddpexp.train.optimizer_average import inner_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CACHES_CASTS = torch.torch_version.TorchVersion(torch.__version__) >= "2.11"
"""torch 2.10 reuses weights cast under no_grad in forward passes with gradients: pytorch/pytorch#158232."""


class Gradients(Protocol):
    """What a strategy says of the reduced gradients: see `ddpexp.strategy.base.Strategy`."""

    def gradient_values(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return what this rank holds of the existing gradients."""
        ...

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return the largest value of a flag on the ranks."""
        ...


class _Whole:
    """Every rank holds the whole gradients."""

    def gradient_values(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return gradient_values(parameters)

    def on_any_rank(self, flag: Tensor) -> Tensor:
        return flag


WHOLE = _Whole()


class Precision:
    """Autocast around a micro-batch, gradient scaling for fp16, and skipping of non-finite updates.

    The decision is made with the reduced gradient, so all ranks skip the same updates; the host waits for the device to
    read it. torch's GradScaler is not used because it decides for each optimizer separately, and supports neither
    optimizers without a gradient nor complex gradients.
    """

    def __init__(
        self,
        name: Literal["fp32", "bf16", "fp16"],
        device: torch.device,
        skip_nonfinite: bool,
        gradient_weight: float = 1.0,
        gradients: Gradients = WHOLE,
    ) -> None:
        """Choose the format; `skip_nonfinite` skips non-finite updates also in fp32 and bf16, fp16 always does.

        `gradient_weight` is the strategy's. The scale of fp16 is divided by it, so that what a backward pass computes,
        and whether it overflows, is the same at any number of workers. `gradients` is what the strategy says of them.
        """
        self._device = device
        self._dtype = _DTYPES.get(name)
        self.lowers = self._dtype is not None  # autocast is needed
        self.skips = skip_nonfinite or name == "fp16"  # updates with a non-finite gradient are skipped
        self._scale: _Scale | None = _Scale(device) if name == "fp16" else None
        self._gradient_weight = gradient_weight
        self._gradients = gradients
        self._skip_on_device: set[Optimizer] = set()  # those that skip a step by themselves
        self._unscaled: set[int] = set()  # parameters whose gradients are already unscaled in this round
        self._nonfinite = torch.zeros((), device=device)  # 1 if a gradient of this `apply` is not finite
        self._nonfinite_in_round = torch.zeros((), device=device)

    def state(self) -> dict[str, Any]:
        """Return the state of gradient scaling for a checkpoint."""
        return {} if self._scale is None else self._scale.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; without gradient scaling it is empty."""
        if self._scale is not None and state:
            self._scale.restore(state)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass."""
        return (
            nullcontext()
            if self._dtype is None
            else torch.autocast(self._device.type, self._dtype, cache_enabled=_CACHES_CASTS)
        )

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """Add the gradient of `weight * loss`, outside of autocast. Shapes: both are scalars."""
        if self._dtype is not None:
            if torch.is_autocast_enabled(self._device.type):
                with torch.autocast(self._device.type, enabled=False):  # backward operations use their forward's format
                    self.backward(loss, weight)
                return
            if self._scale is not None:
                weight = weight * (self._scale.value / self._gradient_weight)
        if type(loss) is Tensor and loss.dtype == weight.dtype and loss.device == weight.device and not loss.shape:
            run_backward((loss,), (weight,))
        else:
            (loss * weight).backward()  # type: ignore[no-untyped-call]

    def gradients(self, loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradient of a loss with respect to each input, None where it does not depend on it.

        Those of lower precision are fp32: unscaled, the small ones would be lost in fp16. Shapes: the loss is a scalar.
        """
        if self._dtype is None:
            return list(torch.autograd.grad(loss, inputs, allow_unused=True))
        with torch.autocast(self._device.type, enabled=False):
            scale = torch.ones_like(loss) if self._scale is None else self._scale.value.to(loss.dtype)
            found = torch.autograd.grad(loss * scale, inputs, allow_unused=True)
            return [None if gradient is None else gradient.to(loss.dtype) / scale for gradient in found]

    def unscale(self, *optimizers: Optimizer) -> None:
        """Unscale the gradients of some optimizers, and check that all of them are finite.

        Raises:
            DdpexpError: the parameters themselves are fp16.
        """
        if not self.skips:
            return
        parameters = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        unscaled = parameters.keys() & self._unscaled
        self._nonfinite = torch.zeros_like(self._nonfinite)
        self._check([p for number, p in parameters.items() if number in unscaled], torch.ones_like(self._nonfinite))
        fresh = [p for number, p in parameters.items() if number not in unscaled]
        if self._scale is None:
            self._check(fresh, torch.ones_like(self._nonfinite))
        else:
            if any(p.grad is not None and p.grad.dtype == torch.float16 for p in fresh):
                raise DdpexpError(
                    "computes in fp16 with weights in fp32, and the model has weights in fp16, whose "
                    "gradients would be too small for it",
                    key="trainer.precision",
                    value="fp16",
                    suggestion="Build the model in fp32, or use trainer.precision=fp32.",
                )
            self._check(fresh, (self._gradient_weight / self._scale.value.double()).float())
        self._nonfinite = self._gradients.on_any_rank(self._nonfinite)
        self._unscaled |= parameters.keys()
        self._nonfinite_in_round = torch.maximum(self._nonfinite_in_round, self._nonfinite)

    def step(self, *optimizers: Optimizer) -> bool:
        """Update the parameters unless a non-finite gradient is to be skipped; return whether it was done.

        Fused optimizers look at the flag on the device, so that the host waits for it while they compute. In their
        first step they do not: torch's SGD would keep a momentum without values if that is skipped.
        """
        if not self.skips:
            for optimizer in optimizers:
                optimizer.step()
            return True
        if self._skip_on_device.issuperset(optimizers):
            for optimizer in optimizers:
                inner_of(optimizer).found_inf = self._nonfinite  # type: ignore[attr-defined]
                optimizer.step()
            return not bool(self._nonfinite)
        if bool(self._nonfinite):
            return False
        for optimizer in optimizers:
            optimizer.step()
        self._skip_on_device.update(filter(_is_fused, optimizers))
        return True

    def update(self) -> None:
        """Adapt the scale, after all optimizers that use the same gradients have stepped."""
        if self.skips:
            if self._scale is not None:
                self._scale.update(self._nonfinite_in_round)
            self._nonfinite_in_round = torch.zeros_like(self._nonfinite_in_round)
            self._unscaled.clear()

    def _check(self, parameters: Iterable[Tensor], factor: Tensor) -> None:
        """Multiply the gradients by a factor, and record whether one of them is not finite."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value in self._gradients.gradient_values(parameters):
            by_dtype.setdefault(value.dtype, []).append(value)
        with torch.no_grad():
            for values in by_dtype.values():
                operators.amp_foreach_non_finite_check_and_unscale_(values, self._nonfinite, factor)


def _is_fused(optimizer: Optimizer) -> bool:
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and type(inner_of(optimizer)) in (SGD, Adam, AdamW)


class _Scale:
    """The scale of fp16 gradients: halved when one overflows, doubled after many steps without an overflow."""

    def __init__(self, device: torch.device) -> None:
        """Start with the defaults of torch's GradScaler."""
        self.value = torch.tensor(2.0**16, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_factor = 2.0
        self._backoff_factor = 0.5
        self._growth_interval = 2000

    def update(self, nonfinite: Tensor) -> None:
        operators.amp_update_scale_(
            self.value, self._good_steps, nonfinite, self._growth_factor, self._backoff_factor, self._growth_interval
        )

    def state(self) -> dict[str, Any]:
        """Return the state with the keys of GradScaler."""
        return {
            "scale": self.value.item(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._good_steps),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value.fill_(state["scale"])
        self._good_steps.fill_(state["_growth_tracker"])
        self._growth_factor, self._backoff_factor = state["growth_factor"], state["backoff_factor"]
        self._growth_interval = state["growth_interval"]
