"""What `torch.nn.Module` and its subclasses do not offer in public."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

parameters_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_parameters")
"""Return the dictionary of a module's parameters, without those of its submodules.

Private: `Module._parameters`; torch 2.10 to 2.13.
Why: `setattr` and `register_parameter` accept an `nn.Parameter` alone, and models in bf16 compute with tensors.
When it goes: `torch.func.functional_call` for those, `named_parameters(recurse=False)` and `setattr` for the others.
"""

buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Return the dictionary of a module's buffers, without those of its submodules.

Private: `Module._buffers`; torch 2.10 to 2.13.
Why: `named_buffers` leaves out buffers that are None, which a forward pass may set.
When it goes: keep the names that `register_buffer` was called with, and use `getattr` and `setattr`.
"""

BatchNorm = _BatchNorm
"""The base class of all layers that normalise by statistics of a batch; of users' own, too.

Private: `torch.nn.modules.batchnorm._BatchNorm`; torch 2.10 to 2.13.
Why: the public classes are its subclasses, and a user's layer need not be one of them.
When it goes: a tuple of the public classes BatchNorm1d to BatchNorm3d and SyncBatchNorm.
"""

NormBase = _NormBase
"""The base class of all layers with running statistics.

Private: `torch.nn.modules.batchnorm._NormBase`; torch 2.10 to 2.13.
Why: as of `BatchNorm`.
When it goes: the tuple of `BatchNorm` with InstanceNorm1d to InstanceNorm3d.
"""


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that draws first values of a module's own parameters, if it has one.

    Private: `MultiheadAttention._reset_parameters` and the like; torch 2.10 to 2.13.
    Why: torch names it `reset_parameters` in most of its modules, but not in its attention.
    When it goes: `reset_parameters` alone.
    """
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def copies_when_loading(module: nn.Module) -> bool:
    """Return whether `load_state_dict` of a module, apart from its submodules, copies tensors and does nothing else.

    Private: `Module._load_state_dict_pre_hooks` and `Module._load_from_state_dict`; torch 2.10 to 2.13.
    Why: torch does not list the hooks of a module, and `_load_from_state_dict` is where modules convert old formats.
    When it goes: load with `load_state_dict` always, which takes the memory of a whole model.
    """
    kind = type(module)
    return (
        not module._load_state_dict_pre_hooks
        and kind.load_state_dict is nn.Module.load_state_dict
        and kind._load_from_state_dict in (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
    )
