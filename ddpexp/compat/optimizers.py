"""Properties that torch's optimizers do not tell of themselves."""

from __future__ import annotations

from torch.optim import Optimizer


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether functions are called before or after each step of an optimizer.

    Private: `Optimizer._optimizer_step_pre_hooks` and `_optimizer_step_post_hooks`; torch 2.10 to 2.13.
    Why: torch registers hooks and does not list them.
    When it goes: return True, so that no update is compiled.
    """
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
