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
from torch.optim import Optimizer

from ddpexp.compat import operators
from ddpexp.distributed.world import World
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Shard
from ddpexp.strategy.comm.reduce import as_bytes
from ddpexp.strategy.init.construction import RESET
from ddpexp.strategy.mesh import Mesh
from ddpexp.strategy.norm import norm_dtype, norm_of_rows, row_norms
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.pipeline.evaluation import through_stages
from ddpexp.strategy.pipeline.groups import Groups, part_of
from ddpexp.strategy.pipeline.holding import Holding, construct
from ddpexp.strategy.pipeline.options import PipelineOptions
from ddpexp.strategy.pipeline.passes import Passes
from ddpexp.strategy.pipeline.schedule import order
from ddpexp.strategy.pipeline.stages import Division
from ddpexp.strategy.replica import Models, Replicas, unused
from ddpexp.strategy.sharded_optimizer import Parts, ShardedOptimizer
from ddpexp.system.text import counted
from ddpexp.task import OptimizerStep, Sums

_CONTIGUOUS = torch.contiguous_format
_LARGE_BYTES = 1 << 20  # of a gradient that is worth a message of its own


def build(
    options: PipelineOptions,
    world: World,
    factory: Callable[[], Any],
    *,
    trainer: Trainer,
    gradient_accumulation_steps: int,
    prepare: Callable[[Any], None],
) -> Pipeline:
    """Build the model and keep the layers of this rank's stage."""
    return Pipeline(
        options, world, factory, gradient_accumulation_steps, channels_last=trainer.channels_last,
        compilation=Compilation.of(trainer), prepare=prepare,
    )  # fmt: skip


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
        compilation: Compilation | None = None,
        prepare: Callable[[Models], None] = lambda models: None,
    ) -> None:
        """Build the model and keep the parameters of this rank's stage.

        Ranks: all; broadcasts rank zero's weights, unless every rank draws them for itself.

        Raises:
            RefusedError: the model cannot be divided into these stages, or its construction cannot be replayed.
        """
        mesh = options.mesh(world.world_size)
        self._groups = Groups.join(world, mesh, options.stages_per_worker > 1, channels_last)
        self._options = options
        self._world = world
        self._mesh = mesh
        common: dict[str, Any] = {"channels_last": channels_last, "compilation": compilation, "prepare": prepare}
        if options.init == "whole":
            super().__init__(world, factory, **common)
            self.share_initial_weights(world)
            holding = Holding(self.modules, options, self._groups)
            holding.leave_others()
        else:
            built, holding = construct(factory, options, world, self._groups)
            with holding.known():
                super().__init__(world, lambda: built, **common)
            if options.init == "reset_parameters" and options.draws_values and world.is_rank_zero:
                logging.getLogger("ddpexp").warning(RESET)
        self._holding = holding
        self.data = options.data_rank(world.rank, world.world_size)
        self.forward_communicates = True  # outside of `evaluation` there are no parameters for it
        self.returns_on_last_stage = True
        self.stage = self._groups.place
        self.evaluates_together = mesh.tp_size > 1 or not options.gather_in_evaluation
        self._order = order(options.schedule, self._groups.place, options.pipe, gradient_accumulation_steps)
        self._tied = self._tied_groups()
        self._passes = Passes(next(iter(self.modules.values())), holding.division, self._groups)
        _log(world, options, mesh, holding.division)

    def _tied_groups(self) -> list[tuple[nn.Parameter, World]]:
        """Return the parameters that several workers hold, with these workers. Ranks: all; communicates."""
        groups: dict[tuple[int, ...], World] = {}
        tied = {}
        for name, parameter in self._holding.named.items():
            key = tuple(self._holding.places[name])
            if len(key) > 1 and id(parameter) not in tied:
                if key not in groups:
                    pipes = self._mesh.groups("pp_size")
                    groups[key] = part_of(self._world, [[ranks[place] for place in key] for ranks in pipes])
                tied[id(parameter)] = parameter, groups[key]
        return [pair for number, pair in tied.items() if number in self._holding.own]

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
        for _, parameter in self._holding.unheld:
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
        trained = {name: p for name, p in self._holding.named.items() if p.requires_grad}
        missing = [name for name, p in trained.items() if p.grad is None and id(p) in self._holding.own]
        if missing:
            raise unused(missing, "strategy=ddp strategy.find_unused_parameters=true")
        own = {id(p): p.grad for p in trained.values() if p.grad is not None}
        if self._groups.replicas.world_size > 1:
            _sum(list(own.values()), self._groups.replicas)
        for parameter, workers in self._tied:
            if parameter.grad is not None:
                workers.sum(parameter.grad)
        for _, parameter in self._holding.unheld:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give the ranks of a stage the buffers of the first of them. Ranks: all; communicates if there are any."""
        world = self._groups.replicas
        if world.world_size > 1:
            for buffer, _ in self._holding.buffers:
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
        lengths: list[int] = []  # of the norms of each gradient
        own: dict[int, Tensor] = {}  # those of this rank, by the number of the gradient
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                if length := self._holding.num_norms.get(id(parameter), 0):
                    lengths.append(length)
                    continue
                own[len(lengths)] = row_norms(gradient, dtype).view(-1)
                lengths.append(len(own[len(lengths)]))
        if not lengths:
            return torch.zeros((), device=device)
        all_norms = torch.zeros(sum(lengths), dtype=dtype, device=device)
        if own:
            places = torch.split(all_norms, lengths)
            operators.foreach_copy_([places[number] for number in own], list(own.values()))
        return norm_of_rows([self._groups.pipe.sum(all_norms)])

    def _norm_of_parts(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the norm where ranks have parts of rows: each part counts once. Ranks: all; communicates."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for parameter in parameters:
            if parameter.grad is not None and self._counts(parameter):
                total += row_norms(parameter.grad, dtype).double().square().sum().to(total.device)
        return self._world.sum(total).sqrt().to(dtype)

    def _counts(self, parameter: Tensor) -> bool:
        """Return whether this rank's part of a parameter is the one that is counted, of all ranks that hold it."""
        divided = self._holding.names.get(id(parameter)) in self._holding.shares
        first = self.data.rank == 0 and id(parameter) not in self._holding.num_norms
        return first and (divided or self._groups.tensor is None or self._groups.tensor.rank == 0)

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Yield the whole model in evaluation mode, with the parameters of all stages. Ranks: all; communicates.

        Without `strategy.gather_in_evaluation` its forward pass goes through the stages instead.
        """
        if not self._options.gather_in_evaluation:
            through = through_stages(next(iter(self.modules.values())), self._holding.division, self._groups)
            with super().evaluation() as model, through:
                yield model
            return
        with torch.no_grad():
            self._gather()
        try:
            with super().evaluation() as model:
                yield model
        finally:
            self._holding.leave_others()

    def _gather(self) -> None:
        """Give this rank the parameters of the other stages. Ranks: all; communicates."""
        for name, parameter in self._holding.unheld:
            shape = self._holding.shapes[name]
            form = torch.channels_last if self._groups.links.channels_last and len(shape) == 4 else _CONTIGUOUS
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device, memory_format=form)
        done = set()
        for name, parameter in self._holding.named.items():
            if id(parameter) not in done:
                done.add(id(parameter))
                _broadcast(parameter.data, self._groups.pipe, self._holding.places[name][0])

    @contextmanager
    def synced_buffers(self) -> Iterator[None]:
        """Give every rank the buffers of the first rank of their stage. Ranks: all; communicates if there are any.

        They stay: this is what the next step begins with on the ranks that use them.
        """
        with torch.no_grad():
            for buffer, place in self._holding.buffers:
                _broadcast(buffer, self._world, place * self._world.world_size // self._mesh.pp_size)
        yield

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return what this rank holds of a parameter: the rows of its stages' layers, of the others none."""
        parameter = self._holding.named.get(name)
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
        name = self._holding.names[id(parameter)]
        return self._held(name, rows, first, self.data.rank // self._mesh.dp_shard_size, self._mesh.dp_replicate_size)

    def _whole_rows(self, parameter: Tensor, shard: Shard) -> Shard:
        return self._to_save(self._holding.names[id(parameter)], shard)

    def _replica(self, name: str) -> int:
        """Return the number of this rank among those that hold a parameter; it is above theirs if it does not."""
        places = self._holding.places[name]
        place = self._groups.place
        tensor = self._groups.tensor
        number = (places.index(place) if place in places else len(places)) * self._mesh.data_size + self.data.rank
        return number if tensor is None else number * tensor.size + tensor.rank

    def _held(self, name: str, rows: Tensor, first: int, copy: int, num_copies: int) -> Shard:
        """Return rows of what this rank has of a parameter; `copy` numbers the ranks of a stage that have the same."""
        places = self._holding.places[name]
        place = self._groups.place
        share = self._holding.shares.get(name)
        replica = (places.index(place) if place in places else len(places)) * num_copies + copy
        if share is None:
            tensor = self._groups.tensor
            replica = replica if tensor is None else replica * tensor.size + tensor.rank
            return Shard(rows, self._holding.shapes[name], first, replica)
        if place not in places:
            return Shard(rows.new_empty((0, *share.cut.shape[1:])), share.cut.shape, 0, replica)
        return share.shard(rows, first, replica)

    def _to_save(self, name: str, shard: Shard) -> Shard:
        if shard.columns is None:
            return shard
        assert self._groups.tensor is not None
        return self._groups.tensor.whole_rows(shard, self._holding.shares[name].cut.ranges)

    def from_local(self, name: str, local: Tensor) -> Tensor:
        """Return the rows, on the device of the parameter."""
        parameter = self._holding.named.get(name)
        if parameter is None:
            return local
        return local.to(parameter.device).reshape(len(local), *self._holding.shapes[name][1:])


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
            f"pipeline of {options.pipe.num_stages} stages x {counted(size, 'data rank')}, schedule "
            f"{options.schedule} ({shown})"
        )
