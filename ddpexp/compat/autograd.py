"""Parts of torch's autograd that are not public."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

version: Callable[[Tensor], int] = attrgetter("_version")
"""Return the number of in-place changes of a tensor. In C, because a step calls it for each gradient.

Private: `Tensor._version`; torch 2.10 to 2.13.
Why: autograd's own count of changes is the only one. A comparison of values would read each gradient.
When it goes: count where ddpexp itself changes or reduces gradients.
"""

preserved_versions = _unsafe_preserve_version_counter
"""A context in which in-place changes of a tuple of tensors do not count: backward passes accept them.

Private: `torch.autograd.grad_mode._unsafe_preserve_version_counter`; torch 2.10 to 2.13.
Why: buffers are broadcast between forward passes whose graphs have saved them; DDP uses the same.
When it goes: write through `tensor.data`, whose changes do not count either.
"""


run_backward: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], object] = partial(
    Variable._execution_engine.run_backward,
    keep_graph=False,
    create_graph=False,
    inputs=(),
    allow_unreachable=True,
    accumulate_grad=True,
)
"""Do what `torch.autograd.backward(outputs, gradients)` ends with, after its checks.

Shapes: each gradient has the shape of its output, and its dtype and device.

Private: `Variable._execution_engine.run_backward`; torch 2.10 to 2.13.
Why: the checks take longer than the rest of the run loop, and import sympy, which takes each worker a quarter of a
second.
When it goes: call `torch.autograd.backward(outputs, gradients)`.
"""


def call_after_backward(function: Callable[[], None]) -> None:
    """Inside of a backward pass, have a function called when its gradients are computed, before DDP waits for sums.

    Private: `Variable._execution_engine.queue_callback`; torch 2.10 to 2.13.
    Why: DDP waits in a callback of its own, and callbacks are called in the order in which they were queued.
    When it goes: the time in which DDP waits counts as that of the backward pass.
    """
    Variable._execution_engine.queue_callback(function)
