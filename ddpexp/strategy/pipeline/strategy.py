"""Pipeline parallelism: each rank holds the layers of its stage, and micro-batches pass from stage to stage.

The modules of the other stages stay in the model, with parameters that have no rows here.

Source: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism", 2019.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard, set_whole_shape
from ddpexp.strategy.comm.reduce import as_bytes
from ddpexp.strategy.mesh import Mesh
from ddpexp.strategy.norm import norm_dtype, norm_of_rows, num_row_norms, row_norms
from ddpexp.strategy.pipeline.evaluation import through_stages
from ddpexp.strategy.pipeline.groups import Groups, group_of
from ddpexp.strategy.pipeline.options import PipelineOptions
from ddpexp.strategy.pipeline.passes import Passes
from ddpexp.strategy.pipeline.schedule import order
from ddpexp.strategy.pipeline.stages import Division, divide
from ddpexp.strategy.replica import Models, Replicas, unused
from ddpexp.strategy.sharded_optimizer import Parts, ShardedOptimizer
from ddpexp.strategy.tensor.cut import Share
from ddpexp.strategy.tensor.layers import divide as divide_layers
from ddpexp.strategy.tensor.plan import layers_of
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
        division = divide(self.modules, options.pipe, options.names)
        self.share_initial_weights(world)
        mesh = options.mesh(world.world_size)
        self.data = options.data_rank(world.rank, world.world_size)
        self.forward_communicates = True  # outside of `evaluation` there are no parameters for it
        self.evaluates_together = mesh.tp_size > 1 or not options.gather_in_evaluation
        self._gathers = options.gather_in_evaluation
        self._world, self._mesh, self._division = world, mesh, division
        self._groups = Groups.join(world, mesh, options.stages_per_worker > 1, channels_last)
        self._order = order(options.schedule, self._groups.place, options.pipe, gradient_accumulation_steps)
        self._hold(division, self._divide_layers(options))
        self._tied = self._tied_groups()
        self._passes = Passes(next(iter(self.modules.values())), division, self._groups)
        _log(world, options, mesh, division)
        self._leave_others()

    def _divide_layers(self, options: PipelineOptions) -> Mapping[str, Share]:
        """Leave this rank its share of divided layers; return the shares by the names of parameters."""
        group = self._groups.tensor
        if group is None:
            return {}
        wholes = {name: tuple(p.shape) for name, p in self._all_named()}
        shares = divide_layers(self.modules, layers_of(self.modules, options.tp_plan, group.size), group)
        for name, parameter in self._all_named():
            if name in shares:
                set_whole_shape(parameter, wholes[name])
        return shares

    def _all_named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model, module in self.modules.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield f"{model}.{name}", parameter

    def _hold(self, division: Division, shares: Mapping[str, Share]) -> None:
        """Note which worker of the pipe holds what, and as which part of the whole."""
        place, model = self._groups.place, next(iter(self.modules))
        self._named = dict(self._all_named())
        self._shares = shares
        by_id = {id(p): division.places_of(name.removeprefix(f"{model}.")) for name, p in self._named.items()}
        for name, p in self._named.items():  # of a tied one each name may belong to another stage
            more = division.places_of(name.removeprefix(f"{model}."))
            by_id[id(p)] = list(dict.fromkeys([*by_id[id(p)], *more]))
        self._places = {name: by_id[id(p)] for name, p in self._named.items()}
        self._own = {id(p) for name, p in self._named.items() if place in self._places[name]}
        self._names = {id(p): name for name, p in reversed(self._named.items())}
        self._shapes = {name: tuple(p.shape) for name, p in self._named.items()}
        self._num_norms = {  # of parameters whose norm another worker counts
            id(p): num_row_norms(self._shapes[name])
            for name, p in self._named.items()
            if self._places[name][0] != place
        }
        named = next(iter(self.modules.values())).named_buffers()
        self._buffers = [(buffer, next(iter(division.places_of(name)), 0)) for name, buffer in named]

    def _tied_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the parameters that several workers hold, with the groups of these. Ranks: all; communicates."""
        groups: dict[tuple[int, ...], Any] = {}
        tied = {}
        for name, parameter in self._named.items():
            key = tuple(self._places[name])
            if len(key) > 1 and id(parameter) not in tied:
                if key not in groups:
                    pipes = self._mesh.groups("pp_size")
                    groups[key] = group_of(self._world, [[ranks[place] for place in key] for ranks in pipes])
                tied[id(parameter)] = parameter, groups[key]
        return [pair for number, pair in tied.items() if number in self._own]

    @cached_property
    def _unheld(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return each parameter once that this rank does not hold."""
        others = {id(p): (name, p) for name, p in reversed(self._named.items()) if id(p) not in self._own}
        return list(others.values())[::-1]

    def _leave_others(self) -> None:
        """Leave the rows of parameters to the workers that hold them."""
        for name, parameter in self._unheld:
            if name not in self._shares:
                set_whole_shape(parameter, self._shapes[name])
            parameter.grad = None
            parameter.data = parameter.new_empty((0, *self._shapes[name][1:]))

    def build_optimizers(self, build: Callable[[Any], Mapping[str, Optimizer]]) -> Mapping[str, Optimizer]:
        """Return the optimizers, whose state the copies of a stage may divide."""
        optimizers, shards = build(self.eval_model), self._groups.shards
        for optimizer in optimizers.values():
            optimizer.register_step_pre_hook(self._leave_out_others)
        if shards.world_size == 1:
            return optimizers
        parts = Parts(self._part, self._whole_rows)
        return {name: ShardedOptimizer(optimizer, shards, parts) for name, optimizer in optimizers.items()}

    def _leave_out_others(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Have a step pass over the parameters of other workers, once there is a state to save of them."""
        for _, parameter in self._unheld:
            state = optimizer.state.get(parameter)
            if state and all(isinstance(value, Tensor) for value in state.values()):
                parameter.grad = None

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
        for _, parameter in self._unheld:
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
        if self._groups.tensor is not None:
            return self._norm_of_parts(parameters, dtype)
        norms = []
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                length = self._num_norms.get(id(parameter), 0)
                norms.append(torch.zeros(length, dtype=dtype) if length else row_norms(gradient, dtype).view(-1))
        if not norms:
            return torch.zeros((), device=device)
        return norm_of_rows([self._groups.pipe.sum(torch.cat([values.to(device) for values in norms]))])

    def _norm_of_parts(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the norm where ranks have parts of rows: each part counts once. Ranks: all; communicates."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for parameter in parameters:
            if parameter.grad is not None and self._counts(parameter):
                total += row_norms(parameter.grad, dtype).double().square().sum().to(total.device)
        return self._world.sum(total).sqrt().to(dtype)

    def _counts(self, parameter: Tensor) -> bool:
        """Return whether this rank's part of a parameter is the one that is counted, of all ranks that hold it."""
        divided = self._names.get(id(parameter)) in self._shares
        first = self.data.rank == 0 and id(parameter) not in self._num_norms
        return first and (divided or self._groups.tensor is None or self._groups.tensor.rank == 0)

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Yield the whole model in evaluation mode, with the parameters of all stages. Ranks: all; communicates.

        Without `strategy.gather_in_evaluation` its forward pass goes through the stages instead.
        """
        if not self._gathers:
            through = through_stages(next(iter(self.modules.values())), self._division, self._groups)
            with super().evaluation() as model, through:
                yield model
            return
        with torch.no_grad():
            self._gather()
        try:
            with super().evaluation() as model:
                yield model
        finally:
            self._leave_others()

    def _gather(self) -> None:
        """Give this rank the parameters of the other stages. Ranks: all; communicates."""
        for name, parameter in self._unheld:
            shape = self._shapes[name]
            form = torch.channels_last if self._groups.links.channels_last and len(shape) == 4 else _CONTIGUOUS
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device, memory_format=form)
        done = set()
        for name, parameter in self._named.items():
            if id(parameter) not in done:
                done.add(id(parameter))
                _broadcast(parameter.data, self._groups.pipe, self._places[name][0])

    @contextmanager
    def synced_buffers(self) -> Iterator[None]:
        """Give every rank the buffers of the first rank of their stage. Ranks: all; communicates if there are any.

        They stay: this is what the next step begins with on the ranks that use them.
        """
        with torch.no_grad():
            for buffer, place in self._buffers:
                _broadcast(buffer, self._world, place * self._world.world_size // self._mesh.pp_size)
        yield

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return what this rank holds of a parameter: the rows of its stages' layers, of the others none."""
        parameter = self._named.get(name)
        if parameter is not None and not tensor.dim():  # of an optimizer's state; that of the others stands still
            return Shard(tensor, (), 0, self._replica(name), (range(1),))
        if parameter is None or tensor.shape != parameter.shape:
            return Shard.whole(tensor)
        return self._held(name, tensor, 0, self.data.rank, self._mesh.data_size)

    def shard_to_save(self, name: str, tensor: Tensor) -> Shard:
        """Return whole rows: of a tensor whose columns are divided, the ranks of a group get some rows each.

        Ranks: all, in the same order; communicates.
        """
        return self._to_save(name, self.shard(name, tensor))

    def _part(self, parameter: Tensor, rows: Tensor, first: int) -> Shard:
        """Return rows of a parameter, or of its state, of which other copies of the stage have the other ones."""
        name = self._names[id(parameter)]
        return self._held(name, rows, first, self.data.rank // self._mesh.dp_shard_size, self._mesh.dp_replicate_size)

    def _whole_rows(self, parameter: Tensor, shard: Shard) -> Shard:
        return self._to_save(self._names[id(parameter)], shard)

    def _replica(self, name: str) -> int:
        """Return the number of this rank among those that hold a parameter; it is above theirs if it does not."""
        places, place, tensor = self._places[name], self._groups.place, self._groups.tensor
        number = (places.index(place) if place in places else len(places)) * self._mesh.data_size + self.data.rank
        return number if tensor is None else number * tensor.size + tensor.rank

    def _held(self, name: str, rows: Tensor, first: int, copy: int, num_copies: int) -> Shard:
        """Return rows of what this rank has of a parameter; `copy` numbers the ranks of a stage that have the same."""
        places, place, share = self._places[name], self._groups.place, self._shares.get(name)
        replica = (places.index(place) if place in places else len(places)) * num_copies + copy
        if share is None:
            tensor = self._groups.tensor
            replica = replica if tensor is None else replica * tensor.size + tensor.rank
            return Shard(rows, self._shapes[name], first, replica)
        if place not in places:
            return Shard(rows.new_empty((0, *share.cut.shape[1:])), share.cut.shape, 0, replica)
        return share.shard(rows, first, replica)

    def _to_save(self, name: str, shard: Shard) -> Shard:
        if shard.columns is None:
            return shard
        assert self._groups.tensor is not None
        return self._groups.tensor.whole_rows(shard, self._shares[name].cut.ranges)

    def from_local(self, name: str, local: Tensor) -> Tensor:
        """Return the rows, on the device of the parameter."""
        parameter = self._named.get(name)
        if parameter is None:
            return local
        return local.to(parameter.device).reshape(len(local), *self._shapes[name][1:])


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


def _log(world: World, options: PipelineOptions, mesh: Mesh, division: Division) -> None:
    """Log which stages there are."""
    if world.is_rank_zero:
        layers, size = division.layers, mesh.data_size
        of_stages = [division.of_stage(stage) for stage in range(options.pipe.num_stages)]
        shown = "; ".join(f"{number}: {layers[of[0]][0]} to {layers[of[-1]][0]}" for number, of in enumerate(of_stages))
        logging.getLogger("ddpexp").info(
            f"pipeline of {options.pipe.num_stages} stages x {size} data rank{'s' * (size > 1)}, schedule "
            f"{options.schedule} ({shown})"
        )
