"""Build the objects of a run from its configuration: data sets, strategy, schedule, loop, loggers."""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch

from ddpexp.config.instantiate import instantiate, locate, targets
from ddpexp.config.schema import Experiment
from ddpexp.config.strategies import builder_of
from ddpexp.data.batch_plan import BatchPlan
from ddpexp.data.batches import EvalBatches
from ddpexp.data.datasets import Splits
from ddpexp.data.streams import Batches, Stream
from ddpexp.distributed.rng import DATA, HostRandom, seed_everything, seed_of
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Logger
from ddpexp.loggers.collection import LoggerCollection
from ddpexp.loggers.jsonl import JsonLines
from ddpexp.loggers.progress import ProgressLogger
from ddpexp.loggers.remote.follower import Followers
from ddpexp.run.directory import RunDir
from ddpexp.run.sync import is_remote, remote_keys
from ddpexp.settings.experiment import NamedChecked
from ddpexp.settings.metrics import TEST_SET
from ddpexp.settings.node import Node
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Strategy
from ddpexp.strategy.mesh import DataRank
from ddpexp.strategy.param_dtype import lowered
from ddpexp.strategy.replica import Models
from ddpexp.task import Schedule
from ddpexp.train.activation_checkpointing import checkpoint_activations
from ddpexp.train.average import WeightAverage
from ddpexp.train.build_optimizers import build_optimizers
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.checkpointer import Checkpointer
from ddpexp.train.choose_samples import arrange
from ddpexp.train.due import next_evaluation
from ddpexp.train.evaluate import batches_for, no_test
from ddpexp.train.freezing import freeze
from ddpexp.train.keep_best import check_set
from ddpexp.train.load_data import load_sets
from ddpexp.train.loop import Loop
from ddpexp.train.lora import add_adapters
from ddpexp.train.optimizer_average import average_of
from ddpexp.train.plateau import Plateau, PlateauProgress
from ddpexp.train.precision import Precision
from ddpexp.train.recipe_checks import (
    check_callback,
    check_logger,
    check_model,
    check_signature,
    check_takes_directory,
    check_task,
    check_train_step,
)
from ddpexp.train.run import TrainingRun
from ddpexp.train.states import RandomNumbers
from ddpexp.train.torch_rates import TorchRates
from ddpexp.train.torch_schedule import TorchSchedule
from ddpexp.train.transform_samples import sample_nodes
from ddpexp.train.utilization import utilization_of


@dataclass(frozen=True)
class RunContext:
    """What a rank knows before anything of its run is built."""

    run: RunDir
    config: str  # its text, as it was checked; empty for a short run, whose FLOPs are not counted
    experiment: Experiment
    layout: Layout
    prepared: Mapping[str, Any] | None  # what `prepare` of the data section returned
    init_from: str | None  # the weights that run.init_from names, as the command found them
    world: World
    control: Control
    log: logging.Logger
    is_fused: bool = False  # the value of optimizer.fused=auto
    is_fitted: bool = False  # trainer.micro_batch_size was found: it is the largest that fits


_DATA_SEED = seed_of(0, DATA, 0, 0)


def import_all(experiment: Experiment, world: World) -> None:
    """Import what the configuration names before anything is built from it: see `ddpexp.compat.lazy_dynamo`.

    Raises:
        RefusedError: a name is not allowed, or does not exist.
    """
    data = Node(experiment.data.target, {} if experiment.data.prepare else experiment.data.options)
    nodes = {
        "data": data,
        **sample_nodes(experiment.data),
        "model": experiment.model,
        "task": experiment.task,
        "optimizer": experiment.optimizer,
    }
    if isinstance(experiment.scheduler, Node):
        nodes["scheduler"] = experiment.scheduler
    if isinstance(experiment.scheduler, TorchSchedule):
        named = experiment.scheduler.schedule
        nodes["scheduler.schedule"] = Node(named["_target_"], {k: v for k, v in named.items() if k != "_target_"})
    nodes |= {f"callbacks.{name}": node for name, node in experiment.callbacks.items()}
    if world.is_rank_zero:
        nodes |= {f"logger.{name}": node for name, node in experiment.logger.items()}
    for where, node in nodes.items():
        for key, target in targets({"_target_": node.target, **node.kwargs}, where):
            locate(target, experiment.trust, key.removesuffix("._target_"))
    builder_of(experiment.strategy)
    for name in experiment.strategy.late_modules:
        importlib.import_module(name)


def open_data(experiment: Experiment, prepared: Mapping[str, Any] | None, world: World) -> Splits:
    """Build the data sets, split and placed for training; see `load_data`. Ranks: all; communicates."""
    return arrange(load_data(experiment, prepared, world), experiment, world)


def load_data(experiment: Experiment, prepared: Mapping[str, Any] | None, world: World) -> Splits:
    """Build the data sets; `prepared` is what `ddpexp.run.prepare` returned. Ranks: all; communicates.

    Random numbers that the data function draws are the same on every rank, at every start and for every trainer.seed:
    ranks of several machines must see the same samples, and a resumed run those of the steps so far.

    Raises:
        RefusedError: they are not what the loop needs, or differ from rank to rank.
    """
    data = experiment.data
    seed_everything(_DATA_SEED)
    splits = load_sets(experiment, prepared)
    _check_same_sizes(splits, data.target, world)
    return splits


def _check_same_sizes(splits: Splits, target: str, world: World) -> None:
    """Compare the sizes of the data sets with those of rank zero. Ranks: all; communicates.

    Raises:
        RefusedError: they differ; the ranks would take different numbers of steps and wait for one another forever.
    """
    sizes = [
        -1 if isinstance(splits.train, Stream) else len(splits.train),
        sum(len(part) for part in splits.evals.values()),
    ]
    first = world.broadcast(torch.tensor(sizes, device=world.device)).tolist()
    if sizes != first:
        raise RefusedError(
            f"gave rank {world.rank} {sizes[0]:,} samples to train and {sizes[1]:,} to evaluate, but rank zero "
            f"{first[0]:,} and {first[1]:,}",
            key="data._target_",
            value=target,
            suggestion="Return the same data on every rank: ddpexp divides it among them.",
        )


def build_model(experiment: Experiment, trains: bool = True, sharded: bool = False) -> Any:
    """Build the model, or the mapping of models, with the weights that a new run starts with.

    They depend on trainer.seed alone, whichever generator draws them and whatever was drawn before.
    """
    seed_everything(experiment.trainer.seed)
    torch.manual_seed(experiment.trainer.seed)  # generators of GPUs, too
    model = check_model(
        instantiate(experiment.model, experiment.trust, "model"), experiment.model.target, trains=trains
    )
    add_adapters(model, experiment.trainer)
    freeze(model, experiment.trainer)
    return lowered(model, experiment.trainer, sharded)


def build_strategy(
    experiment: Experiment, world: World, plan: BatchPlan, prepare: Callable[[Models], None], loaded: bool = False
) -> Strategy:
    """Build the model inside its strategy; `prepare` may change the initial weights. Ranks: all; communicates.

    All values will be `loaded`, by `prepare` or afterwards: a strategy need not draw them.
    """
    trainer = experiment.trainer
    strategy = experiment.strategy.to_be_loaded() if loaded else experiment.strategy

    def prepare_all(models: Models) -> None:
        prepare(models)
        if trainer.activation_checkpointing:
            checkpoint_activations(models, trainer.activation_checkpointing)

    sharded = strategy.makes_copies(world.world_size)
    return builder_of(strategy)(
        strategy, world, partial(build_model, experiment, sharded=sharded),
        trainer=trainer, gradient_accumulation_steps=plan.gradient_accumulation_steps, prepare=prepare_all,
    )  # fmt: skip


def count_steps(trainer: Trainer, steps_per_epoch: int) -> int:
    """Return how many optimizer steps a run takes: trainer.max_steps or trainer.epochs, whichever ends first."""
    limits = [
        trainer.max_steps,
        trainer.epochs * steps_per_epoch if trainer.epochs is not None else None,
    ]
    return min(limit for limit in limits if limit is not None)


def build_schedule(experiment: Experiment, num_steps: int) -> Schedule:
    """Return the schedule of a run; a user's own is checked at its first and last step.

    Raises:
        RefusedError: it has no method `factor`, or that returns no number.
    """
    node = experiment.scheduler
    if isinstance(node, Plateau):
        return PlateauProgress(node)
    if isinstance(node, TorchSchedule):
        return TorchRates(node, experiment.trust)
    if not isinstance(node, Node):
        return node
    schedule = instantiate(node, experiment.trust, "scheduler")
    if not isinstance(schedule, Schedule):
        raise RefusedError(
            f"returned a {type(schedule).__name__} without the method factor(step, num_steps), which returns the "
            "multiplier of optimizer.lr at a step",
            key="scheduler._target_",
            value=node.target,
            suggestion="See ddpexp.task.Schedule.",
        )
    check_signature(schedule.factor, "factor", ("step", "num_steps"))
    for step in (0, num_steps - 1):
        value: Any = schedule.factor(step, num_steps)
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise RefusedError(
                f"`factor({step}, {num_steps})` returned {value!r}, where a number belongs: the multiplier of "
                "optimizer.lr at that step",
                key="scheduler._target_",
                value=node.target,
            )
    return schedule


def max_eval_samples(trainer: Trainer) -> int | None:
    """Return how many samples of each set are evaluated at most; None: all."""
    return trainer.limit_eval_batches * trainer.global_batch_size if trainer.limit_eval_batches is not None else None


def build_evals(
    experiment: Experiment, splits: Splits, rank: DataRank, device: torch.device, batch_size: int
) -> dict[str, EvalBatches]:
    """Return the batches of each evaluation set that this rank evaluates."""
    data, trainer = experiment.data, experiment.trainer
    limit = max_eval_samples(trainer)
    evals = {}
    for name, dataset in splits.evals.items():
        evals[name] = EvalBatches(
            dataset,
            batch_size,
            rank.rank,
            rank.size,
            device,
            num_workers=data.num_workers,
            timeout_seconds=trainer.timeout.data_seconds,
            name=name,
            on_device=splits.on_device,
            limit=limit,
        )
    return evals


def build_logger(context: RunContext, num_steps: int, steps_per_epoch: int) -> Logger:
    """Return the logger of this rank: rank zero records, the others do nothing.

    Raises:
        RefusedError: the configuration names what is no logger.
    """
    if not context.world.is_rank_zero:
        return Logger()
    run = context.run

    def when_evaluated(step: int) -> int | None:
        return next_evaluation(step, num_steps, steps_per_epoch, context.experiment.trainer)

    progress = ProgressLogger(context.control, context.log, num_steps, when_evaluated)
    loggers: list[Logger] = [JsonLines(run.metrics), progress]
    remote = [name for name in context.experiment.logger if is_remote(context.experiment, name)]
    if remote:
        limits = {name: remote_keys(context.experiment, name).end_seconds for name in remote}
        loggers.append(Followers(run.path, limits, context.log))
    for name, node in context.experiment.logger.items():
        if name in remote:
            continue
        where = f"logger.{name}"
        target = f"{where}._target_={node.target}"
        kind = locate(node.target, context.experiment.trust, where)
        if isinstance(kind, NamedChecked):
            kind.check(context.experiment, where)
        check_takes_directory(kind, node.kwargs, target)
        logger = instantiate(node, context.experiment.trust, where, run.path)
        loggers.append(check_logger(logger, target))
    return LoggerCollection(loggers)


def build_average(strategy: Strategy, trainer: Trainer, steps_per_epoch: int, num_steps: int) -> WeightAverage | None:
    """Return the average of the weights, if the section `trainer` asks for one.

    Raises:
        RefusedError: it would never begin, or there is no BatchNorm to estimate for it.
    """
    average = WeightAverage.from_config(strategy.modules, trainer, steps_per_epoch)
    if average is None:
        return None
    if average.first_step > num_steps:
        raise RefusedError(
            f"with trainer.swa_every={trainer.swa_every} averages the first weights after step "
            f"{average.first_step:,}, but the run ends after step {num_steps:,}",
            key="trainer.swa_start",
            value=trainer.swa_start,
        )
    if trainer.average_batch_norm is not None and not average.layers:
        raise RefusedError(
            "The model has no BatchNorm that keeps statistics",
            key="trainer.average_batch_norm",
            value=trainer.average_batch_norm,
            suggestion="Leave it out.",
        )
    return average


def build_callbacks(experiment: Experiment, world: World, num_steps: int) -> Callbacks:
    """Return the callbacks of this rank, in the order of the configuration.

    Raises:
        RefusedError: the configuration names what is no callback.
    """
    members = {}
    for name, node in experiment.callbacks.items():
        where = f"callbacks.{name}"
        members[name] = check_callback(instantiate(node, experiment.trust, where), f"{where}._target_={node.target}")
        members[name].check(experiment, where)
    nodes = {name: [node.target, node.kwargs] for name, node in experiment.callbacks.items()}
    return Callbacks(members, world, json.dumps([nodes, num_steps], default=dict))


def build_loop(
    context: RunContext,
    strategy: Strategy,
    train: Batches,
    evals: Mapping[str, EvalBatches],
    logger: Logger,
    checkpointer: Checkpointer,
    average: WeightAverage | None,
    callbacks: Callbacks,
) -> Loop:
    """Build the task, its optimizers, the schedule and the precision, and the loop from everything.

    The generators of numpy and Python are seeded.
    """
    experiment, world = context.experiment, context.world
    trust, trainer = experiment.trust, experiment.trainer
    num_steps = count_steps(trainer, train.steps_per_epoch)
    random = RandomNumbers(HostRandom(trainer.seed, world.rank), world)
    check_set(trainer.keep_best, [name for name in evals if name != TEST_SET])
    if trainer.test_weights != "auto" and TEST_SET not in evals and world.is_rank_zero:
        logging.getLogger("ddpexp").warning(
            f"trainer.test_weights={trainer.test_weights} chooses nothing: the data has no set `{TEST_SET}`."
            f"{no_test(TEST_SET)}"
        )
    task = instantiate(experiment.task, trust, "task")
    evaluates = bool(evals) and (trainer.eval_every != 0 or trainer.eval_at_start)
    check_task(task, experiment.task.target, evaluates)
    check_train_step(task, experiment.strategy)
    evals = batches_for(task, evals, trainer.global_batch_size)

    def make_all(_model: Any) -> Mapping[str, torch.optim.Optimizer]:
        parts = strategy.modules, strategy.single, strategy.parameters
        return build_optimizers(experiment, task, *parts, is_fused=context.is_fused)

    optimizers = strategy.build_optimizers(make_all)
    run = TrainingRun(
        task=task,
        strategy=strategy,
        optimizers=optimizers,
        schedule=build_schedule(experiment, num_steps),
        precision=Precision(
            trainer.precision, world.device, trainer.nonfinite == "skip", strategy.gradient_weight, strategy
        ),
        world=replace(world, memory=strategy.memory),
        control=context.control,
        train=train,
        options=trainer,
        num_steps=num_steps,
        directory=context.run,
    )
    average = average_of(average, strategy.modules, optimizers, trainer)
    request = {"config": context.config, "data": context.prepared, "without_data": None}
    utilization = None
    if world.is_rank_zero and context.config:
        utilization = utilization_of(trainer, world.device, world.world_size, task, train, request)
    return Loop(
        run,
        evals,
        logger,
        checkpointer,
        average,
        callbacks,
        further_states={"rank/random": random},
        utilization=utilization,
    )
