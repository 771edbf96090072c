from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddpexp.compat.dispatch import (
    TorchDispatchMode,
    arguments_of,
    memory_of,
    name_of,
    no_dispatch,
    seeming,
    tree_map_only,
)


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[str] = []
        self.written: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(name_of(function))
        aliases = [argument for argument in arguments_of(function) if argument.alias_info is not None]
        self.written += [argument.name for argument in aliases if argument.alias_info.is_write]
        return function(*args, **kwargs or {})


def test_a_mode_sees_operators_and_what_they_write() -> None:
    tensor = torch.ones(2)
    with Names() as names:
        tensor.add_(1)
        with no_dispatch():
            tensor.mul_(2)
    assert (names.called, names.written) == (["add_"], ["self"])


def test_a_tensor_seems_to_be_where_it_is_not() -> None:
    class Wrapper(Tensor):
        @staticmethod
        def __new__(cls: type[Wrapper], meta: Tensor) -> Wrapper:
            return seeming(cls, meta, torch.device("cpu"))

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise NotImplementedError

    wrapper = Wrapper(torch.empty(1 << 20, 1 << 20, dtype=torch.bfloat16, device="meta"))
    assert (wrapper.shape, wrapper.dtype, wrapper.device.type) == ((1 << 20, 1 << 20), torch.bfloat16, "cpu")


def test_views_have_the_memory_of_their_base() -> None:
    base, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert memory_of(base[1:].untyped_storage()) == memory_of(base.untyped_storage())
    assert memory_of(other.untyped_storage()) != memory_of(base.untyped_storage())


def test_tensors_in_structures_are_mapped() -> None:
    assert tree_map_only(Tensor, float, {"a": [torch.ones(()), "b"]}) == {"a": [1.0, "b"]}
