"""Which workers of a pipe hold which parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard, marked_shard, set_whole_shape
from ddpexp.strategy.init.construction import Construction
from ddpexp.strategy.norm import num_row_norms
from ddpexp.strategy.pipeline.groups import Groups
from ddpexp.strategy.pipeline.options import PipelineOptions
from ddpexp.strategy.pipeline.stages import Division, divide
from ddpexp.strategy.replica import check_same_models
from ddpexp.strategy.tensor.cut import Share
from ddpexp.strategy.tensor.layers import divide as divide_layers
from ddpexp.strategy.tensor.plan import layers_of

Models = Mapping[str, nn.Module]


class Holding:
    """The parameters of a model by their names, with the places in the pipe of the workers that hold them.

    A worker leaves the rows of the others' parameters to them, and keeps parameters without rows.
    """

    def __init__(self, models: Models, options: PipelineOptions, groups: Groups) -> None:
        """Divide a model into stages, and leave this rank its share of divided layers; tensors may be on `meta`.

        Raises:
            RefusedError: it cannot be divided like this.
        """
        self.division: Division = divide(models, options.pipe, options.names)
        self._wholes = {name: tuple(p.shape) for name, p in _all_named(models)}
        self.shares: Mapping[str, Share] = {}  # what this rank has of divided layers
        if (group := groups.tensor) is not None:
            self.shares = divide_layers(models, layers_of(models, options.tp_plan, group.size), group)
        (model,), place = models, groups.place
        self.named = dict(_all_named(models))  # a tied one by each of its names
        by_id: dict[int, list[int]] = {}
        for name, p in self.named.items():  # of a tied one each name may belong to another stage
            more = self.division.places_of(name.removeprefix(f"{model}."))
            by_id[id(p)] = list(dict.fromkeys([*by_id.get(id(p), ()), *more]))
        self.places = {name: by_id[id(p)] for name, p in self.named.items()}  # of the workers that hold it
        self.own = frozenset(id(p) for name, p in self.named.items() if place in self.places[name])
        self.names = {id(p): name for name, p in reversed(self.named.items())}  # the first one of each
        self.shapes = {name: tuple(p.shape) for name, p in self.named.items()}  # where it is held
        self.num_norms = {  # of parameters whose norm another worker counts
            id(p): num_row_norms(self.shapes[name]) for name, p in self.named.items() if self.places[name][0] != place
        }
        self._models = models

    @cached_property
    def unheld(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return each parameter once that this rank does not hold."""
        others = {id(p): (name, p) for name, p in reversed(self.named.items()) if id(p) not in self.own}
        return list(others.values())[::-1]

    @cached_property
    def buffers(self) -> Sequence[tuple[Tensor, int]]:
        """Return the buffers, which all workers have, with the place of the first worker that uses each."""
        (model,) = self._models.values()
        return [(buffer, next(iter(self.division.places_of(name)), 0)) for name, buffer in model.named_buffers()]

    def leave_others(self) -> None:
        """Leave the rows of parameters to the workers that hold them, and note the whole shapes."""
        for name in self.shares:
            set_whole_shape(self.named[name], self._wholes[name])
        for name, parameter in self.unheld:
            set_whole_shape(parameter, self._wholes[name])
            parameter.grad = None
            parameter.data = parameter.new_empty((0, *self.shapes[name][1:]))

    @contextmanager
    def known(self) -> Iterator[None]:
        """Let `ddpexp.strategy.base.shard_of` know inside the block what this rank has of each parameter."""
        parts: list[tuple[nn.Parameter, Callable[[Tensor], Shard]]] = []
        for name, parameter in {id(p): (name, p) for name, p in self.named.items()}.values():
            replica = int(id(parameter) not in self.own)
            if name in self.shares:
                parts.append((parameter, partial(self.shares[name].shard, first=0, replica=replica)))
            elif replica:
                parts.append((parameter, partial(Shard, shape=self._wholes[name], first_row=0, replica=1)))
        with ExitStack() as stack:
            for parameter, shard in parts:
                stack.enter_context(marked_shard(parameter, shard))
            yield


def construct(
    factory: Callable[[], Any], options: PipelineOptions, world: World, groups: Groups
) -> tuple[Any, Holding]:
    """Return what the factory builds, of which this rank has its stages and never more than a few tensors beside them.

    Ranks: all; communicates.

    Raises:
        RefusedError: the construction depends on values of tensors, or the model cannot be divided.
        DdpexpError: the ranks have built different models.
    """
    assert options.init != "whole"
    construction = Construction(factory, options.init, options.draws_values)
    check_same_models(dict(construction.models), world)
    holding = Holding(construction.models, options, groups)
    holding.leave_others()
    construction.allocate(world.device)
    holding.leave_others()  # the memory came with new attributes

    def take(name: str, tensor: Tensor, values: Tensor) -> None:
        if name not in holding.named:
            tensor.copy_(values)  # a buffer
        elif id(tensor) in holding.own:
            tensor.copy_(holding.shares[name].take(values) if name in holding.shares else values)

    construction.fill(take)
    return construction.built, holding


def _all_named(models: Models) -> Iterator[tuple[str, nn.Parameter]]:
    for model, module in models.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield f"{model}.{name}", parameter
