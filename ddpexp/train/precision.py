"""In which number format a step computes, and which updates are left out because their gradient is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer

from ddpexp.errors import DdpexpError
from ddpexp.strategy.replica import gradient_values

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CACHES_CASTS = torch.torch_version.TorchVersion(torch.__version__) >= "2.11"
"""torch 2.10 keeps a weight that was cast under no_grad for forward passes that learn, too: pytorch/pytorch#158232."""


class Precision:
    """Autocast around a micro-batch, a scaled gradient where the format needs one, and updates that are left out.

    Whether one is, is asked of the reduced gradient, so all ranks leave out the same ones; the host waits for the
    device to learn it. Not torch's GradScaler: that decides for each optimizer by itself, and knows neither optimizers
    without a gradient nor complex gradients.
    """

    def __init__(
        self,
        name: Literal["fp32", "bf16", "fp16"],
        device: torch.device,
        skip_nonfinite: bool,
        gradient_weight: float = 1.0,
    ) -> None:
        """Choose the format; `skip_nonfinite` leaves out updates in fp32 and bf16 too, fp16 always does.

        `gradient_weight` is the strategy's: it is taken out of the scale of fp16 again, so that what a backward pass
        computes, and whether it overflows, is the same at any number of workers.
        """
        self._device = device
        self._dtype = _DTYPES.get(name)
        self.lowers = self._dtype is not None  # autocast does something
        self.skips = skip_nonfinite or name == "fp16"  # updates by a gradient that is not finite are left out
        self._scale: _Scale | None = _Scale(device) if name == "fp16" else None
        self._gradient_weight = gradient_weight
        self._unscaled: set[int] = set()  # parameters whose gradients have their true size in this round
        self._found = torch.zeros((), device=device)  # whether a gradient of this apply is not finite
        self._found_in_round = torch.zeros((), device=device)

    def state(self) -> dict[str, Any]:
        """Return what a later start must know: the scale of the gradient and how it has been adapted."""
        return {} if self._scale is None else self._scale.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` has returned; a run that scales no gradient has none."""
        if self._scale is not None and state:
            self._scale.restore(state)

    def autocast(self) -> AbstractContextManager[object]:
        """Enclose a forward pass."""
        return (
            nullcontext()
            if self._dtype is None
            else torch.autocast(self._device.type, self._dtype, cache_enabled=_CACHES_CASTS)
        )

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """Add the gradient of `weight * loss`, outside of autocast. Shapes: both are scalars."""
        if self._dtype is not None and torch.is_autocast_enabled(self._device.type):
            with torch.autocast(
                self._device.type, enabled=False
            ):  # each operation goes back in the format that it went forward
                self.backward(loss, weight)
            return
        if self._scale is not None:
            weight = weight * (self._scale.value / self._gradient_weight)
        if type(loss) is Tensor and loss.dtype == weight.dtype and loss.device == weight.device and not loss.shape:
            # What `torch.autograd.backward(loss, weight)` ends with. The questions that it begins with take longer than
            # all of the run loop, and import sympy, a quarter of a second a worker.
            _engine_run_backward((loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        else:
            (loss * weight).backward()  # type: ignore[no-untyped-call]

    def unscale(self, *optimizers: Optimizer) -> None:
        """Bring the gradients of some optimizers to their true size, and look whether all of them are finite.

        Raises:
            DdpexpError: the parameters are fp16 themselves.
        """
        if not self.skips:
            return
        parameters = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        known = parameters.keys() & self._unscaled
        self._found = torch.zeros_like(self._found)
        self._look([p for number, p in parameters.items() if number in known], torch.ones_like(self._found))
        fresh = [p for number, p in parameters.items() if number not in known]
        if self._scale is None:
            self._look(fresh, torch.ones_like(self._found))
        else:
            if any(p.grad is not None and p.grad.dtype == torch.float16 for p in fresh):
                raise DdpexpError(
                    "trainer.precision=fp16 computes in fp16 with weights in fp32, and the model has weights in "
                    "fp16, whose gradients would be too small for it. Build the model in fp32, or use "
                    "trainer.precision=fp32."
                )
            self._look(fresh, (self._gradient_weight / self._scale.value.double()).float())
        self._unscaled |= parameters.keys()
        self._found_in_round = torch.maximum(self._found_in_round, self._found)

    def step(self, *optimizers: Optimizer) -> bool:
        """Update the parameters, unless a gradient was not finite and that is left out; tell whether it was done."""
        if self.skips and bool(self._found):
            return False
        for optimizer in optimizers:
            optimizer.step()
        return True

    def update(self) -> None:
        """Adapt the scale after all optimizers that use the same gradients have stepped."""
        if self.skips:
            if self._scale is not None:
                self._scale.update(self._found_in_round)
            self._found_in_round = torch.zeros_like(self._found_in_round)
            self._unscaled.clear()

    def _look(self, parameters: Iterable[Tensor], factor: Tensor) -> None:
        """Multiply the gradients, and note whether one of them is not finite."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for value in gradient_values(parameters):
            kinds.setdefault(value.dtype, []).append(value)
        with torch.no_grad():
            for values in kinds.values():
                torch._amp_foreach_non_finite_check_and_unscale_(values, self._found, factor)


class _Scale:
    """What fp16 gradients are multiplied by: halved when one overflows, doubled after many steps in which none did."""

    def __init__(self, device: torch.device) -> None:
        """Begin as torch's GradScaler does."""
        self.value = torch.tensor(2.0**16, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_factor, self._backoff_factor, self._growth_interval = 2.0, 0.5, 2000

    def update(self, found: Tensor) -> None:
        torch._amp_update_scale_(
            self.value, self._good_steps, found, self._growth_factor, self._backoff_factor, self._growth_interval
        )

    def state(self) -> dict[str, Any]:
        """Return the state under the names that GradScaler gives it."""
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
