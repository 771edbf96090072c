"""What it takes to run a function with tensors that have no memory, and to record what it does with them.

Private: `torch.utils._python_dispatch`, `torch.utils._mode_utils`, `torch.utils._pytree`, `OpOverload._schema`,
`Tensor._make_wrapper_subclass` and `UntypedStorage._cdata`; torch 2.10 to 2.13.
Why: torch documents `__torch_dispatch__` and offers no public name of what it needs.
When it goes: torch's fake tensors and `torch.utils.flop_counter` need the same: look there for the new names. Without
any, refuse strategy.init=replay.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch as no_dispatch  # a context without dispatch to Python
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_map_only as tree_map_only

Wrapper = TypeVar("Wrapper", bound=Tensor)


def seeming(kind: type[Wrapper], meta: Tensor, device: torch.device) -> Wrapper:
    """Return a tensor of a class that seems to be on a device and has the shape and dtype of `meta`, but no memory."""
    wrapper: Wrapper = Tensor._make_wrapper_subclass(
        kind, meta.size(), meta.stride(), meta.storage_offset(), dtype=meta.dtype, layout=meta.layout, device=device
    )
    return wrapper


def name_of(operator: Any) -> str:
    """Return the name of an operator without its namespace and overload, such as `add_`."""
    name: str = operator._schema.name
    return name.partition("::")[2]


def arguments_of(operator: Any) -> list[Any]:
    """Return what an operator declares of its arguments: `torch.Argument`, with a name and what it aliases."""
    return list(operator._schema.arguments)


def memory_of(storage: torch.UntypedStorage) -> int:
    """Return a number that no other memory has while this one is alive; `data_ptr` is 0 on `meta`."""
    number: int = storage._cdata
    return number
