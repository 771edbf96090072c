"""In which number format a step computes, and which updates are left out because their gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast around the forward pass, a gradient scaler around the backward pass and the update where one is needed."""

    def __init__(self, name: Literal["fp32", "bf16", "fp16"], device: torch.device, skip_nonfinite: bool) -> None:
        """Choose the format; `skip_nonfinite` leaves out updates in fp32 and bf16 too, fp16's scaler always does."""
        self._device = device.type
        self._dtype = _DTYPES.get(name)
        # The scaler looks at the reduced gradient, so all ranks skip the same step; it waits for the device to learn whether,
        # unless the optimizer is fused. At a constant scale of 1 it is that test alone.
        self._constant = name != "fp16"
        self._scaler: torch.amp.GradScaler | None = None
        if name == "fp16" or skip_nonfinite:
            self._scaler = torch.amp.GradScaler(self._device, init_scale=1.0 if self._constant else 2.0**16)

    @property
    def skips(self) -> bool:
        """Tell whether updates by a gradient that is not finite are left out."""
        return self._scaler is not None

    def state(self) -> dict[str, Any]:
        """Return what a later start must know: the scale of the gradient and how it has been adapted."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` has returned; a run that scales no gradient has none."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(dict(state))

    def autocast(self) -> AbstractContextManager[object]:
        """Enclose a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, self._dtype)

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """Add the gradient of `weight * loss`. Shapes: both are scalars."""
        if self._scaler is not None:
            self._scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
        elif type(loss) is Tensor and loss.dtype == weight.dtype and loss.device == weight.device and not loss.shape:
            # What `torch.autograd.backward(loss, weight)` ends with. The questions that it begins with take longer than all of
            # the run loop, and import sympy, a quarter of a second a worker.
            _engine_run_backward((loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        else:
            (loss * weight).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients of an optimizer to their true size, once before its step."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters, unless a gradient was not finite and the scaler leaves that out."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)

    def update(self) -> None:
        """Adapt the scale after all optimizers have stepped."""
        if self._scaler is not None:
            self._scaler.update(1.0 if self._constant else None)
