"""Trial steps of an optimizer with small parameters: whether ranks may each update a part, and with which bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.errors import RefusedError
from ddpexp.strategy.sharded_optimizer import PROBE_STEPS, are_alike, can_be_cut, probes

_NUM_STEPS = 10  # an optimizer that finds its own rate looks at how far the first ones lead
_MOST_PARAMETERS, _LONGEST = 4, 4  # and the elements of a dimension
_REMEDY = "Use strategy=ddp with strategy.shard_optimizer=false, or another optimizer."


class _Trial(NamedTuple):
    """Small parameters after some steps, the settings of the groups then, and the names of the state's nested parts."""

    parameters: list[Tensor]
    settings: str
    nested: list[str]


def check_divisible(optimizer: Optimizer, named: str, key: str) -> None:
    """Check that each rank may update a part of the parameters and keep the state of that part alone.

    `named` is the optimizer, and `key` what asks for that, as typed. Those of torch are known, and not tried.

    Ranks: all, if the parameters are DTensors; communicates.

    Raises:
        RefusedError: the optimizer sums over its parameters, or draws random numbers for one after another; its
        state is more than tensors and numbers; or it does not work with DTensors.
    """
    if type(optimizer).__module__.startswith(("torch.optim.", "ddpexp.")):
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad][:_MOST_PARAMETERS]
    device = trained[0].device if trained and trained[0].device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(_small(p), generator=generator).to(device, p.dtype) for p in trained]
    gradients = [start * (number + 1) for number, start in enumerate(starts)]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            together = _stepped(optimizer, trained, starts, gradients)
            alone = [
                _stepped(
                    optimizer, trained, starts, [*[None] * number, gradient, *[None] * (len(trained) - number - 1)]
                )
                for number, gradient in enumerate(gradients)
            ]
        except Exception:
            return  # it cannot be tried: it may need parameters of a certain size
        if not all(_is_same(trial, together, number) for number, trial in enumerate(alone)):
            raise RefusedError(
                f"{named} updates a parameter differently when other parameters have no gradient: it sums over all "
                f"of them, or draws random numbers for one after another. With {key} each worker updates a part of "
                "the parameters, so the weights would differ from an update of all parameters",
                suggestion=_REMEDY,
            )
        if together.nested:
            raise RefusedError(
                f"{named} keeps lists, mappings or objects in its state ({', '.join(together.nested)}), but {key} can "
                "divide only tensors and numbers among the workers",
                suggestion=_REMEDY,
            )
        if all(hasattr(parameter, "device_mesh") for parameter in trained):
            _check_rows(optimizer, trained, starts, gradients, together, f"{named} %s with {key}")


def _check_rows(
    optimizer: Optimizer,
    trained: Sequence[Any],
    starts: Sequence[Tensor],
    gradients: Sequence[Tensor],
    whole: _Trial,
    text: str,
) -> None:
    """Check that steps with DTensors, of which each rank has some rows, give what those with `whole` tensors give.

    Ranks: all; communicates.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    def divided(values: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(values, trained, strict=True)
        return [distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None) for value, p in pairs]

    remedy = "Use strategy=ddp, or another optimizer."
    try:
        ends = _stepped(optimizer, trained, divided(starts), divided(gradients)).parameters
    except Exception as error:
        fails = text % "fails in torch"
        said = str(error).strip().partition("\n")[0]
        reason = f"{fails}, where it gets DTensors ({type(error).__name__}: {said})"
        raise RefusedError(reason, suggestion=remedy) from None
    tolerance = 1e-3 if whole.parameters[0].dtype in (torch.float32, torch.float64) else 0.1
    for end, expected in zip(ends, whole.parameters, strict=True):
        assert isinstance(end, DTensor)
        if not torch.allclose(end.full_tensor(), expected, rtol=tolerance, atol=tolerance, equal_nan=True):
            other = text % "trains to other weights"
            reason = f"{other}, which gives each worker some rows of the parameters, than with all"
            raise RefusedError(reason, suggestion=remedy)


def other_rounding(optimizer: Optimizer) -> str:
    """Return that an optimizer gives rows of a parameter other bits than the whole, as a sentence; empty if not.

    It is tried with small tensors and parts of them if its parameters are DTensors, of which each rank has some rows.
    """
    trained: list[Any] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not any(hasattr(parameter, "device_mesh") for parameter in trained):
        return ""
    ours = type(optimizer).__module__.startswith(("torch.optim.", "ddpexp."))
    local = trained[0].to_local()
    if can_be_cut(optimizer) if ours else _rounds_alike(optimizer, local.device, local.dtype):
        return ""
    return (
        f"{type(optimizer).__name__} rounds some rows of a parameter in another way than all of them, or looks at a "
        "parameter as a whole: the last bits of the weights will differ from those of strategy=ddp"
    )


def _rounds_alike(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> bool:
    """Take steps with small tensors and with parts of them, and compare; False if that fails."""
    wholes, parts = probes(device, dtype)
    tensors = [*wholes, *(part for pair in parts for part in pair)]
    copy = _copy_with(optimizer, {})
    copy.param_groups = copy.param_groups[:1]
    copy.param_groups[0]["params"] = parameters = [nn.Parameter(start.clone()) for start, _ in tensors]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            _take_steps(copy, parameters, [gradient for _, gradient in tensors], PROBE_STEPS)
        except Exception:  # it may need parameters of a certain size
            return False
    return are_alike(copy, parameters)


def _small(parameter: Any) -> tuple[int, ...]:
    lengths = [min(length, _LONGEST) for length in parameter.shape]
    if lengths and hasattr(parameter, "device_mesh"):
        lengths[0] = _LONGEST * parameter.device_mesh.size()  # the same number of rows on each rank
    return tuple(lengths)


def _is_same(alone: _Trial, together: _Trial, number: int) -> bool:
    pair = alone.parameters[number], together.parameters[number]
    return alone.settings == together.settings and torch.allclose(*pair, rtol=0, atol=0, equal_nan=True)


def _stepped(
    optimizer: Optimizer, trained: Sequence[Tensor], starts: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> _Trial:
    """Take steps with a copy of the optimizer that has small parameters in place of its own."""
    small = [nn.Parameter(start.clone()) for start in starts]
    copy = _copy_with(optimizer, {id(parameter): own for parameter, own in zip(trained, small, strict=True)})
    _take_steps(copy, small, gradients, _NUM_STEPS)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in copy.param_groups]
    states = [item for state in copy.state.values() for item in state.items()]
    nested = {str(key) for key, value in states if not isinstance(value, Tensor | int | float | bool | str | None)}
    return _Trial([parameter.detach() for parameter in small], repr(settings), sorted(nested))


def _copy_with(optimizer: Optimizer, replaced: Mapping[int, Tensor]) -> Any:
    """Return a copy of the optimizer with other parameters, by the ids of its own; those without one are left out."""
    left_out = nn.Parameter(torch.empty(0), requires_grad=False)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(p): replaced.get(id(p), left_out) for p in parameters}
    copy: Any = object.__new__(type(optimizer))  # deepcopy leaves out what the class adds to an Optimizer
    copy.__dict__ = deepcopy(optimizer.__dict__, memo)
    for group in copy.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not left_out]
    return copy


def _take_steps(
    optimizer: Any, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], num_steps: int
) -> None:
    """Step with the same gradients each time."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    torch.manual_seed(0)
    for _ in range(num_steps):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
