"""Pipeline parallelism: each rank holds the layers of its stage, and micro-batches pass from stage to stage.

The modules of the other stages stay in the model, with parameters that have no rows here.

Source: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism", 2019.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard, set_whole_shape
from ddpexp.strategy.comm.reduce import as_bytes
from ddpexp.strategy.norm import norm_dtype, norm_of_rows, num_row_norms, row_norms
from ddpexp.strategy.pipeline.groups import Groups
from ddpexp.strategy.pipeline.options import PipelineOptions
from ddpexp.strategy.pipeline.passes import Passes
from ddpexp.strategy.pipeline.schedule import order
from ddpexp.strategy.pipeline.stages import divide
from ddpexp.strategy.replica import Models, Replicas, unused
from ddpexp.task import OptimizerStep, Sums

_CONTIGUOUS = torch.contiguous_format
_LARGE_BYTES = 1 << 20  # of a gradient that is worth a message of its own


class Pipeline(Replicas):
    """The stage of this rank."""

    def __init__(
        self,
        options: PipelineOptions,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        gradient_accumulation_steps: int,
        *,
        channels_last: bool = False,
        prepare: Callable[[Models], None] = lambda models: None,
    ) -> None:
        """Build the model and keep the parameters of this rank's stage. Ranks: all; broadcasts rank zero's weights.

        Raises:
            RefusedError: the model cannot be divided into these stages.
        """
        super().__init__(world, factory, channels_last=channels_last, prepare=prepare)
        division = divide(self.modules, options.pp_size, options.names)
        self.share_initial_weights(world)
        self.data = options.data_rank(world.rank, world.world_size)
        self.forward_communicates = True  # outside of `evaluation` there are no parameters for it
        self._options, self._world = options, world
        self._groups = Groups.join(world, options.pp_size, channels_last)
        stage, (model, module) = self._groups.stage, next(iter(self.modules.items()))
        self._order = order(options.schedule, stage, options.pp_size, gradient_accumulation_steps)
        named = {f"{model}.{name}": p for name, p in module.named_parameters(remove_duplicate=False)}
        stages = {id(p): division.stages_of(name) for name, p in module.named_parameters()}
        self._stages: dict[str, list[int]] = {name: stages[id(p)] for name, p in named.items()}
        self._named: dict[str, nn.Parameter] = named
        self._own = {id(p) for p in named.values() if stage in stages[id(p)]}
        self._shapes = {name: tuple(p.shape) for name, p in named.items()}
        self._num_norms = {  # of parameters whose norm another stage counts
            id(p): num_row_norms(self._shapes[name]) for name, p in named.items() if self._stages[name][0] != stage
        }
        self._buffers = [(buffer, next(iter(division.stages_of(name)), 0)) for name, buffer in module.named_buffers()]
        self._tied = self._tied_groups()
        self._passes = Passes(module, division, self._groups)
        _log(world, options, division.layers, [division.of_stage(number) for number in range(options.pp_size)])
        self._leave_others()

    def _tied_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the parameters that several stages hold, with the groups of these. Ranks: all; communicates."""
        groups: dict[tuple[int, ...], Any] = {}
        tied = {}
        for name, parameter in self._named.items():
            key = tuple(self._stages[name])
            if len(key) > 1 and id(parameter) not in tied:
                if key not in groups:
                    groups[key] = self._groups.of_stages(self._world, key)
                tied[id(parameter)] = parameter, groups[key]
        return [pair for number, pair in tied.items() if number in self._own]

    def _others(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once that this rank does not hold."""
        seen = set(self._own)
        for name, parameter in self._named.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def _leave_others(self) -> None:
        """Leave the rows of parameters to the stages that hold them."""
        for name, parameter in self._others():
            set_whole_shape(parameter)
            parameter.grad = None
            parameter.data = parameter.new_empty((0, *self._shapes[name][1:]))

    @property
    def train_model(self) -> Any:
        """Return what a task calls in training: it computes the layers of this stage."""
        return self._passes.model

    def train_step(self, step: OptimizerStep, micro_batches: Sequence[Any]) -> list[Sums]:
        """Pass the micro-batches through the stages, then step the optimizers. Ranks: all; communicates."""
        self._share_buffers()
        sums = self._passes.run(step, self._order, micro_batches)
        self._sum_gradients()
        step.apply()
        return sums

    def reduce_gradients(self) -> None:
        """Do nothing: `train_step` sums the gradients when all backward passes are done."""

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Sum the gradients over the ranks that hold the same parameters. Ranks: all; communicates.

        Raises:
            DdpexpError: a parameter has no gradient.
        """
        trained = {name: p for name, p in self._named.items() if p.requires_grad}
        missing = [name for name, p in trained.items() if p.grad is None and id(p) in self._own]
        if missing:
            raise unused(missing, "strategy=ddp strategy.find_unused_parameters=true")
        own = {id(p): p.grad for p in trained.values() if p.grad is not None}
        if self._groups.replicas.world_size > 1:
            _sum(list(own.values()), self._groups.replicas)
        for parameter, group in self._tied:
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad, group=group)
        for _, parameter in self._others():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give the ranks of a stage the buffers of the first of them. Ranks: all; communicates if there are any."""
        world = self._groups.replicas
        if world.world_size > 1:
            for buffer, _ in self._buffers:
                _broadcast(buffer, world, 0)

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return the largest value of a flag on the ranks. Ranks: all; communicates."""
        return self._world.sum(flag.clone()).clamp(max=1)

    @torch.no_grad()
    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, with the bits of a whole model. Ranks: all; communicates."""
        dtype, device = norm_dtype(parameters), self._world.device
        norms = []
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                length = self._num_norms.get(id(parameter), 0)
                norms.append(torch.zeros(length, dtype=dtype) if length else row_norms(gradient, dtype).view(-1))
        if not norms:
            return torch.zeros((), device=device)
        return norm_of_rows([self._groups.pipe.sum(torch.cat([values.to(device) for values in norms]))])

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Yield the whole model in evaluation mode, with the parameters of all stages. Ranks: all; communicates."""
        with torch.no_grad():
            self._gather()
        try:
            with super().evaluation() as model:
                yield model
        finally:
            self._leave_others()

    def _gather(self) -> None:
        """Give this rank the parameters of the other stages. Ranks: all; communicates."""
        for name, parameter in self._others():
            shape = self._shapes[name]
            form = torch.channels_last if self._groups.links.channels_last and len(shape) == 4 else _CONTIGUOUS
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device, memory_format=form)
        done = set()
        for name, parameter in self._named.items():
            if id(parameter) not in done:
                done.add(id(parameter))
                _broadcast(parameter.data, self._groups.pipe, self._stages[name][0])

    @contextmanager
    def synced_buffers(self) -> Iterator[None]:
        """Give every rank the buffers of the first rank of their stage. Ranks: all; communicates if there are any.

        They stay: this is what the next step begins with on the ranks that use them.
        """
        with torch.no_grad():
            for buffer, stage in self._buffers:
                _broadcast(buffer, self._world, stage * self._groups.replicas.world_size)
        yield

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return the rows of a parameter that this rank holds: all, or none."""
        parameter = self._named.get(name)
        if parameter is None or tensor.shape != parameter.shape or not tensor.dim():
            return Shard.whole(tensor)
        stages, stage = self._stages[name], self._groups.stage
        place = stages.index(stage) if stage in stages else len(stages)
        return Shard(tensor, self._shapes[name], 0, place * self._groups.replicas.world_size + self.data.rank)

    def from_local(self, name: str, local: Tensor) -> Tensor:
        """Return the rows, on the device of the parameter."""
        parameter = self._named.get(name)
        return local if parameter is None else local.to(parameter.device)


def _broadcast(tensor: Tensor, world: World, source: int) -> None:
    """Give every rank the values of `source`, in place. Ranks: all of the world; communicates."""
    if tensor.numel():
        values = tensor.contiguous()
        world.broadcast(as_bytes(values), source)
        if values is not tensor:
            tensor.copy_(values)


def _sum(gradients: Sequence[Tensor], world: World) -> None:
    """Sum gradients over the ranks, in place: small ones together. Ranks: all of the world; communicates."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel() * gradient.element_size() >= _LARGE_BYTES and gradient.is_contiguous():
            world.sum(gradient.view(-1))
        else:
            groups.setdefault(gradient.dtype, []).append(gradient)
    for group in groups.values():
        flat = world.sum(torch.cat([gradient.reshape(-1) for gradient in group]))
        for gradient, values in zip(group, torch.split(flat, [one.numel() for one in group]), strict=True):
            gradient.copy_(values.view_as(gradient))


def _log(world: World, options: PipelineOptions, layers: Sequence[Sequence[str]], of_stages: Sequence[range]) -> None:
    """Log which stages there are."""
    if world.is_rank_zero:
        size = world.world_size // options.pp_size
        shown = "; ".join(f"{number}: {layers[of[0]][0]} to {layers[of[-1]][0]}" for number, of in enumerate(of_stages))
        logging.getLogger("ddpexp").info(
            f"pipeline of {options.pp_size} stages x {size} data rank{'s' * (size > 1)}, schedule {options.schedule} "
            f"({shown})"
        )
