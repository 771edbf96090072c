"""Modules of a model that a key chooses by the name of their class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn

from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few


def check_classes(models: Mapping[str, nn.Module], names: Iterable[str], override: str) -> None:
    """Check that the models have modules of every class; `override` is the key as it is typed, for one class.

    Raises:
        RefusedError: there is none; with the classes that there are.
    """
    modules = {id(module): module for model in models.values() for module in model.modules()}
    counts = Counter(type(module).__name__ for module in modules.values())
    for name in names:
        if name not in counts:
            several = [f"{other} ({count})" for other, count in counts.most_common()]
            raise RefusedError(
                f"The model has no module of that class. It has {first_few(several)}", key=override.format(name)
            )
