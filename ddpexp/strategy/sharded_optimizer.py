"""Optimizers whose state is divided among the ranks: each rank updates its own rows of the parameters.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020 (stage 1).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.base import Shard, Stored
from ddpexp.strategy.comm.gather import RowGather
from ddpexp.strategy.norm import has_contiguous_rows
from ddpexp.strategy.optimizer_state import load_optimizer

# Optimizers that treat every element of a parameter by itself: their parameters can be cut between rows.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop")
_LARGEST_PROBE = 67  # elements: every remainder of the widest vectors
PROBE_STEPS = 3


@dataclass(frozen=True)
class Rows:
    """The rows of a parameter that one rank updates."""

    first: int
    count: int


@dataclass(frozen=True)
class Parts:
    """Where the rows of parameters lie in the whole ones, of which a rank may have a part."""

    shard: Callable[[Tensor, Tensor, int], Shard]  # of a parameter: rows of it or of its state, and their first one
    whole_rows: Callable[[Tensor, Shard], Shard]  # of a parameter, to save. Ranks: all; may communicate


def _shard_of(whole: Tensor, rows: Tensor, first: int) -> Shard:
    return Shard(rows, (*whole.shape[:1], *rows.shape[1:]), first)


WHOLE = Parts(_shard_of, lambda whole, shard: shard)


def divide(shapes: Sequence[Sequence[int]], num_ranks: int, by_rows: bool) -> list[list[Rows]]:
    """Divide parameters evenly: each rank gets a contiguous range of all their elements, in the order of `shapes`.

    The borders lie between rows or, without `by_rows`, between parameters. Returns for each parameter the rows of each
    rank; a parameter without dimensions has one row.
    """
    sizes = [_numel(shape) for shape in shapes]
    total, position = sum(sizes), 0
    divided = []
    for shape, size in zip(shapes, sizes, strict=True):
        num_rows = shape[0] if shape else 1
        row_size = size // num_rows if num_rows else 0
        borders = [0]
        for rank in range(1, num_ranks):
            wanted = rank * total // num_ranks - position  # where the share of this rank begins, in this parameter
            whole = 0 if 2 * wanted <= size else num_rows
            row = round(wanted / row_size) if by_rows and row_size else whole
            borders.append(min(max(row, 0), num_rows))
        borders.append(num_rows)
        divided.append([Rows(begin, end - begin) for begin, end in pairwise(borders)])
        position += size
    return divided


def can_be_cut(optimizer: Optimizer) -> bool:
    """Return whether an optimizer gives a part of a parameter the bits that it gives the whole.

    It must treat every element by itself, and round all of them alike. The last elements of a tensor may be rounded in
    another way than those before, which vectorized code computes: Adam with `fused=True` does so on CPUs.
    """
    is_elementwise = type(optimizer).__module__.startswith("torch.optim.") and type(optimizer).__name__ in ELEMENTWISE
    return is_elementwise and _rounds_alike(optimizer)


def _rounds_alike(optimizer: Optimizer) -> bool:
    """Take steps with small tensors and with parts of them, and compare."""
    kind: Any = type(optimizer)
    group = optimizer.param_groups[0]
    settings = {key: value for key, value in group.items() if key in inspect.signature(kind).parameters}
    del settings["params"]
    wholes, parts = probes(group["params"][0].device)
    tensors = [*wholes, *(part for pair in parts for part in pair)]
    parameters = [nn.Parameter(start.clone()) for start, _ in tensors]
    trial = kind([{**settings, "params": parameters}])
    for _ in range(PROBE_STEPS):
        for parameter, (_, gradient) in zip(parameters, tensors, strict=True):
            parameter.grad = gradient.clone()
        trial.step()
    return are_alike(trial, parameters)


def probes(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return small tensors of every length, and two parts of each. Shapes: (2, elements), a start and a gradient."""
    generator = torch.Generator().manual_seed(0)
    sizes = range(1, _LARGEST_PROBE + 1)
    wholes = [0.01 * torch.randn(2, size, generator=generator).to(device, dtype) for size in sizes]
    return wholes, [(whole[:, : whole.shape[1] // 3], whole[:, whole.shape[1] // 3 :]) for whole in wholes]


def are_alike(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Return whether small parameters and their state have the bits of their parts, which follow as in `probes`.

    A small step changes few bits of a parameter, but all of its state.
    """
    num_wholes = len(parameters) // 3
    for number, whole in enumerate(parameters[:num_wholes]):
        parts = parameters[num_wholes + 2 * number : num_wholes + 2 * number + 2]
        pairs = [(whole.detach(), [part.detach() for part in parts])]
        for key, value in optimizer.state[whole].items():
            if isinstance(value, Tensor) and value.shape == whole.shape:
                pairs.append((value, [optimizer.state[part].get(key, value[:0]) for part in parts]))
        if not all(torch.equal(value, torch.cat(cut)) for value, cut in pairs):
            return False
    return True


class ShardedOptimizer(Optimizer):
    """An optimizer that keeps the state of this rank's rows alone.

    Its parameter groups hold the whole parameters, which every rank has, with their whole gradients. `step` updates the
    rows of this rank, then every rank gets the rows of the others. Parameters whose rows are no contiguous memory, and
    those without dimensions, are updated by every rank; frozen ones have no gradient, so by none.
    """

    def __init__(self, optimizer: Optimizer, world: World, parts: Parts = WHOLE) -> None:
        """Take over a newly built optimizer, whose parameters are replaced by the rows of this rank."""
        # Not Optimizer.__init__: everything but the groups is the inner optimizer's.
        self._inner = optimizer
        self._world = world
        self._parts = parts
        self.defaults = optimizer.defaults
        self.param_groups = [dict(group) for group in optimizer.param_groups]
        self._whole = [parameter for group in self.param_groups for parameter in group["params"]]
        cut = [parameter for parameter in self._whole if parameter.requires_grad and has_contiguous_rows(parameter)]
        self.by_rows = can_be_cut(optimizer)
        divided = divide([parameter.shape for parameter in cut], world.world_size, self.by_rows)
        self._rows = {parameter: rows[world.rank] for parameter, rows in zip(cut, divided, strict=True)}
        self._local = [self._local_parameter(parameter) for parameter in self._whole]
        self._use_local_parameters()
        self._gather = RowGather(
            [
                [_flat(parameter, rows[rank]) for parameter, rows in zip(cut, divided, strict=True)]
                for rank in range(world.world_size)
            ],
            world,
        )

    @property
    def inner(self) -> Optimizer:
        """Return the optimizer of this rank's rows."""
        return self._inner

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """Return the state of this rank's rows, by the whole parameters."""
        states = self._inner.state
        return {whole: states[local] for whole, local in zip(self._whole, self._local, strict=True) if local in states}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters with their reduced gradients. Ranks: all; communicates.

        Raises:
            DdpexpError: a gradient is sparse.
        """
        if closure is not None:
            raise DdpexpError(
                "updates with the gradients of one pass: without a closure", key="strategy.shard_optimizer", value=True
            )
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
        for whole, local in zip(self._whole, self._local, strict=True):
            if local is not whole:
                local.grad = self._local_gradient(whole)
        self._inner.step()
        for whole, local in zip(self._whole, self._local, strict=True):
            if local is not whole:
                local.grad = None
        self.follow_inner()

    def follow_inner(self) -> None:
        """Take the settings that the inner optimizer has changed, and give every rank the rows of the others.

        Ranks: all; communicates.
        """
        self._copy_settings()
        self._gather.gather()

    def _copy_settings(self) -> None:
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the whole parameters."""
        for parameter in self._whole:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `Optimizer.state_dict` does, with a `Shard` for each tensor that is divided.

        Ranks: all; communicates if parameters are not cut between rows.
        """
        saved = self._inner.state_dict()
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": local["params"]}
            for group, local in zip(self.param_groups, saved["param_groups"], strict=True)
        ]
        states = dict(saved["state"])
        for index, whole in enumerate(self._whole):
            if whole in self._rows and index in states and self.by_rows:
                states[index] = {key: self._to_save(value, whole) for key, value in states[index].items()}
        if not self.by_rows:
            states |= self._whole_states(states)
        return {**saved, "state": dict(sorted(states.items(), key=lambda item: str(item[0]))), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of whole parameters, of which this rank keeps its rows; of `Stored` tensors it reads these."""
        states = {}
        for index, values in state_dict["state"].items():
            whole = self._whole[index]
            rows = self._rows.get(whole)
            if self.by_rows or rows is None:
                rows = rows or Rows(0, len(whole) if whole.dim() else 1)
                states[index] = {key: self._rows_of(value, whole, rows) for key, value in values.items()}
            elif rows.count:
                states[index] = {
                    key: value.read() if isinstance(value, Stored) else value for key, value in values.items()
                }
        load_optimizer(self._inner, {**state_dict, "state": states})
        self._copy_settings()

    def _to_save(self, value: Any, whole: Tensor) -> Any:
        """Return a part of a parameter's state as what this rank has of the whole. Ranks: all; may communicate."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return self._parts.whole_rows(whole, self._parts.shard(whole, value, self._rows[whole].first))

    def _rows_of(self, value: Any, whole: Tensor, rows: Rows) -> Any:
        """Return this rank's rows of a part of a parameter's state; what has another shape stays whole."""
        if not whole.dim():
            return value.read() if isinstance(value, Stored) else value
        if isinstance(value, Stored):
            held = self._parts.shard(whole, whole.new_empty((rows.count, *whole.shape[1:]), device="meta"), rows.first)
            if value.shape != held.shape:
                return value.read()
            return held.read(value.read).reshape(rows.count, *whole.shape[1:])
        if not isinstance(value, Tensor) or value.shape != whole.shape:
            return value
        return value[rows.first : rows.first + rows.count].clone()

    def _local_parameter(self, whole: Tensor) -> Tensor:
        rows = self._rows.get(whole)
        if rows is None:
            return whole
        return nn.Parameter(whole.detach()[rows.first : rows.first + rows.count], whole.requires_grad)

    def _local_gradient(self, whole: Tensor) -> Tensor | None:
        rows = self._rows[whole]
        if whole.grad is None or (not rows.count and not self.by_rows):
            return None
        if whole.grad.layout is not torch.strided:
            raise DdpexpError(
                "a gradient is sparse, and strategy.shard_optimizer=true divides the rows of dense ones "
                "among the workers",
                suggestion="Build the layer with sparse=False, or use strategy.shard_optimizer=false.",
            )
        return whole.grad[rows.first : rows.first + rows.count]

    def _use_local_parameters(self) -> None:
        """Put the rows of this rank into the optimizer, and cut the state that some optimizers begin with."""
        before: Mapping[Tensor, Any] = self._inner.state
        after: defaultdict[Tensor, Any] = defaultdict(dict)
        for whole, local in zip(self._whole, self._local, strict=True):
            if whole not in before:
                continue
            rows = self._rows.get(whole)
            if rows is None:
                after[local] = before[whole]
            elif self.by_rows:
                after[local] = {key: self._rows_of(value, whole, rows) for key, value in before[whole].items()}
            elif rows.count:
                after[local] = before[whole]
        self._inner.state = after
        local_parameters = iter(self._local)
        for group in self._inner.param_groups:
            group["params"] = [next(local_parameters) for _ in group["params"]]

    def _whole_states(self, states: Mapping[int, Any]) -> dict[int, Any]:
        """Return the state of every parameter that belongs to one rank as shards: all rows there, none elsewhere.

        Ranks: all; communicates, because the other ranks do not know what the state consists of.
        """
        own = {
            index: {key: _description(value) for key, value in states[index].items()}
            for index, whole in enumerate(self._whole)
            if whole in self._rows and self._rows[whole].count and index in states
        }
        described: dict[int, Mapping[str, Any]] = {}
        for descriptions in self._world.gather_values({str(index): values for index, values in own.items()}):
            described |= {int(index): values for index, values in descriptions.items()}
        return {
            index: {
                key: _whole_shard(states[index][key] if index in own else None, description, self._world.device)
                for key, description in values.items()
            }
            for index, values in described.items()
        }


def _numel(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _flat(parameter: Tensor, rows: Rows) -> Tensor:
    """Return rows as a view of their memory. Shapes: (num_elements,)."""
    row_size = parameter.numel() // parameter.shape[0]
    start = parameter.storage_offset() + rows.first * row_size
    return parameter.detach().as_strided((rows.count * row_size,), (1,), start)


def _description(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return {"value": value}
    kind = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    return kind if value.dim() else {**kind, "value": value.item()}


def _whole_shard(value: Any, description: Mapping[str, Any], device: torch.device) -> Any:
    """Return a part of the state of a parameter that belongs to one rank; `value` is None on the others."""
    if "shape" not in description:
        return description["value"]
    dtype = getattr(torch, description["dtype"])
    if not description["shape"]:
        return torch.tensor(description["value"], dtype=dtype, device=device)
    shape = tuple(description["shape"])
    return Shard(torch.empty((0, *shape[1:]), dtype=dtype, device=device) if value is None else value, shape, 0)
