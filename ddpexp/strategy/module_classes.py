"""Modules of a model that a key chooses by the name of their class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few


def check_classes(models: Mapping[str, nn.Module], names: Iterable[str], override: str) -> None:
    """Check that the models have modules of every class; `override` is the key as it is typed, for one class.

    Raises:
        RefusedError: there is none; with the classes that there are.
    """
    modules = {id(module): module for model in models.values() for module in model.modules()}
    counts = Counter(class_name(module) for module in modules.values())
    for name in names:
        if name not in counts:
            several = [f"{other} ({count})" for other, count in counts.most_common()]
            raise RefusedError(
                f"The model has no module of that class. It has {first_few(several)}", key=override.format(name)
            )


def outermost(module: nn.Module, names: Collection[str]) -> Iterator[nn.Module]:
    """Yield the modules of these classes that are in no other of them."""
    if class_name(module) in names:
        yield module
        return
    for child in module.children():
        yield from outermost(child, names)


def class_name(module: nn.Module) -> str:
    """Return the name of the class as it is written: of a sharded module torch derives one, as FSDPBlock of Block."""
    kind = type(module)
    first, *others = kind.__bases__
    return others[0].__name__ if first.__name__ == "FSDPModule" else kind.__name__  # without an import of seconds
