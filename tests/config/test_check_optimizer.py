"""The table of the arguments that torch's optimizers have."""

from __future__ import annotations

import inspect

import pytest
import torch

from ddpexp.config.check_optimizer import _ARGUMENTS


@pytest.mark.parametrize("name", sorted(_ARGUMENTS))
def test_the_arguments_that_torch_has_are_accepted(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no torch.optim.{name}")
    _, _, *arguments = inspect.signature(getattr(torch.optim, name).__init__).parameters
    assert set(arguments) <= set(_ARGUMENTS[name])
