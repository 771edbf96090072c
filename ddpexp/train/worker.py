"""What runs in every process: join, build the objects, fit, leave a result."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from ddpexp.checkpoint import weights
from ddpexp.checkpoint.format import Checkpoint, set_aside
from ddpexp.checkpoint.reader import load_weights, weights_sha256
from ddpexp.config.instantiate import Node, instantiate, locate, targets
from ddpexp.config.parse import load
from ddpexp.config.schema import Data, Experiment, Trainer
from ddpexp.data import fingerprint
from ddpexp.data.batch_plan import BatchPlan, plan_batches
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.datasets import Splits, hold_out, on_device
from ddpexp.data.loader import shared_memory_warning
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Many, Null, Tracker
from ddpexp.loggers.jsonl import JsonLines
from ddpexp.loggers.progress import Progress
from ddpexp.run.directory import RunDir
from ddpexp.strategy.base import Strategy
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.replica import Models
from ddpexp.system.fault_injection import fault_point
from ddpexp.system.files import relative
from ddpexp.task import HasOptimizers, Schedule
from ddpexp.train import lazy_dynamo, loop
from ddpexp.train.ema import EMA
from ddpexp.train.loop import Loop
from ddpexp.train.precision import Precision
from ddpexp.train.process import Interrupted, open_log, run_rank
from ddpexp.train.recipe_checks import check_model, check_optimizers, check_signature, check_splits, check_task
from ddpexp.train.report import Report
from ddpexp.train.run_state import RunState, check_room, choose, restore, truncate_records

_KEPT_BYTES = 31 << 20  # what glibc would keep at most, but for a page of its own


def main(path: str, worker_args: str) -> int:
    """Train what the run directory describes. Never returns in a worker.

    `worker_args` is JSON made by `ddpexp.run.jobs.Training`.
    """
    return run_rank(lambda control: train(RunDir(Path(path)), json.loads(worker_args), control))


def evaluate(described: str) -> int:
    """Evaluate weights; `described` is JSON made by `ddpexp.cli.subcommands.evaluate`. Never returns in a worker."""
    return run_rank(lambda control: evaluate_weights(json.loads(described), control))


def train(run: RunDir, worker_args: Mapping[str, Any], control: Control) -> None:
    """Do one experiment from start to result.

    Ranks: all.
    """
    data = worker_args["data"]
    experiment, layout = load(_configuration(run, worker_args.get("config"))), run.layout()
    control.set_phase("join")
    world = _join(experiment, layout)
    log = open_log(world, control, run.log)
    for note in worker_args.get("notes", ()) if world.is_rank_zero else ():
        log.info(note)
    control.set_phase("build")
    _warn_of_little_room(experiment, log)
    _import_all(experiment, world)
    if not experiment.trainer.compile:
        lazy_dynamo.defer()
    whole = load_data(experiment, data, world)
    inputs = _inputs(run, whole, data, experiment.data.num_workers) if world.is_rank_zero else {}
    splits = _arranged(whole, experiment.data, world)
    plan = plan_batches(experiment.trainer.global_batch_size, experiment.trainer.micro_batch_size, world.world_size)
    batches = TrainBatches(
        splits.train, plan, world.rank, experiment.trainer.seed, world.device, experiment.data.num_workers,
        experiment.trainer.timeout.data_seconds, experiment.data.on_device,
    )  # fmt: skip
    newest, damaged = choose(run, world, experiment.run.resume == "require")
    strategy = _strategy(experiment, world, plan, _init_from(experiment, newest, worker_args, log))
    if newest is not None and world.is_rank_zero:
        inputs |= _check_same_data(
            run, newest, inputs["data"], experiment.run.allow_changes, batches.steps_per_epoch, log
        )
    num_steps = count_steps(experiment.trainer, batches.steps_per_epoch)
    if newest is not None and newest.step > num_steps:
        raise RefusedError(
            f"the run is at step {newest.step} and would end after step {num_steps} with this trainer.max_steps and "
            f"trainer.epochs: ask for more, or evaluate what is there."
        )
    recorded = truncate_records(run, newest) if world.is_rank_zero else {}
    tracker = _tracker(experiment, run, world, control, log, num_steps, newest.step if newest else 0)
    decay = experiment.trainer.ema_decay
    average = EMA(strategy.modules, decay) if decay is not None else None
    checkpointer = RunState.of(run, experiment.trainer, strategy, average, tracker, world)
    checkpointer.recorded, checkpointer.inputs = recorded, inputs
    report = Report(experiment, run, layout, data, strategy.modules, strategy.memory is not None, batches, num_steps)
    log.info(report.headline())
    fit = _loop(experiment, world, strategy, splits, batches, tracker, control, num_steps, checkpointer, average)
    if world.is_rank_zero and (newest is None or newest.step < num_steps):
        check_room(run, experiment.trainer, fit, average)
    if newest is None:
        tracker.text("config", f"```yaml\n{run.config.read_text()}\n```")
        tracker.hyperparameters(report.hyperparameters())
    else:
        restore(newest, fit, checkpointer)
        log.info(f"resumed after step {newest.step} of {num_steps}, from {relative(newest.folder)}")
        if experiment.strategy.comm_hook == "powersgd":
            log.warning(
                "what powersgd remembers of the gradients begins anew: the last bits will not be the undisturbed run's"
            )
    set_aside(damaged)  # when nothing can refuse this start any more
    gc.collect()
    gc.freeze()  # what is built now lives as long as the run: the collector need not walk it again
    control.send_nowait("began", step=fit.position.step)
    control.set_phase("train")
    try:
        outcome = fit.fit()
        control.set_phase("save")
        checkpointer.finish()
        if world.is_rank_zero:
            log.info(report.finish(outcome, tracker))
    except (Exception, SystemExit):
        checkpointer.drain()
        raise
    finally:
        tracker.close()
    world.barrier()
    fault_point("leave")
    if outcome.interrupted:
        raise Interrupted(outcome.step)


def _configuration(run: RunDir, digest: str | None) -> str:
    """Read what the command has accepted: nobody else's words say whose code runs."""
    raw = run.config.read_bytes()
    if digest is not None and hashlib.sha256(raw).hexdigest() != digest:
        raise RefusedError(
            f"{run.config} is not what it was when the command read it: do not change it while a run starts."
        )
    return raw.decode()


def evaluate_weights(described: Mapping[str, Any], control: Control) -> None:
    """Print the metrics of weights on the evaluation sets.

    Ranks: all.
    """
    experiment, layout = load(described["config"]), Layout(**described["layout"])
    control.set_phase("join")
    world = _join(experiment, layout)
    log = open_log(world, control, None)
    control.set_phase("build")
    _warn_of_little_room(experiment, log)
    evals = _evals(experiment, open_data(experiment, described["data"], world), world, described["batch_size"])
    model = check_model(instantiate(experiment.model, experiment.trust, "model"), experiment.model.target, trains=False)
    models: Models = {"model": model} if isinstance(model, torch.nn.Module) else dict(model)
    for module in models.values():
        module.to(world.device).eval()
    averaged = experiment.trainer.ema_decay is not None
    load_weights(models, Path(described["weights"]), f"evaluate {described['weights']}", averaged)
    control.set_phase("evaluate")
    task = instantiate(experiment.task, experiment.trust, "task")
    check_task(task, experiment.task.target)
    precision = Precision(experiment.trainer.precision, world.device, False)
    metrics = loop.evaluate(task, model, evals, precision, world, control)
    if metrics is None:
        raise Interrupted(0)  # there is nothing to save
    log.info("  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    log.info(f"weights {described['weights']}  sha256 {weights_sha256(models)}")
    world.barrier()


def _join(experiment: Experiment, layout: Layout) -> World:
    torch.set_num_threads(layout.threads)
    _keep_freed_memory()
    if experiment.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    experiment.trust.make_importable()
    world = World.join(layout, _patience(experiment))
    fault_point("joined")
    return world


def _import_all(experiment: Experiment, world: World) -> None:
    """Import what the configuration names before anything is built of it: see `deferred_dynamo`.

    Raises:
        RefusedError: a name that is not allowed, or that is not there.
    """
    data = Node(experiment.data.target, {} if experiment.data.prepare else experiment.data.options)
    nodes = {"data": data, "model": experiment.model, "task": experiment.task, "optimizer": experiment.optimizer}
    if isinstance(experiment.scheduler, Node):
        nodes["scheduler"] = experiment.scheduler
    for where, node in nodes.items():
        for key, target in targets({"_target_": node.target, **node.kwargs}, where):
            locate(target, experiment.trust, key.removesuffix("._target_"))
    if experiment.strategy.comm_hook != "none":
        import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook  # noqa: F401
    if world.is_rank_zero and experiment.logger.kind == "tensorboard":
        import ddpexp.loggers.tensorboard  # noqa: F401  # only rank zero of a run that writes there needs it


def _keep_freed_memory() -> None:
    """Have glibc keep the memory of activations from step to step, instead of returning it.

    And clearing new pages each time.

    Up to 32 MiB it keeps blocks as large as the largest that was ever freed. Programs that read their data into memory
    have freed such a one by then; ours maps it, and a step with convolutions took a third longer. Nothing is written
    here, so it costs no memory.
    """
    with suppress(RuntimeError):  # a limit on the address space is told where something needs it
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)


def _patience(experiment: Experiment) -> float:
    """Return how long a rank waits for another one by itself.

    Longer than the command, which knows who holds the others up.
    """
    timeout = experiment.trainer.timeout
    return 2 * (timeout.init_seconds + timeout.step_seconds + timeout.save_seconds + timeout.data_seconds)


def _warn_of_little_room(experiment: Experiment, log: logging.Logger) -> None:
    warning = shared_memory_warning(experiment.data.num_workers)
    if warning is not None:
        log.warning(warning)  # on every rank: the same sentence is shown once


def _inputs(run: RunDir, splits: Splits, prepared: Mapping[str, Any] | None, num_workers: int) -> dict[str, Any]:
    """Return what tells this start's configuration and code, as the command has recorded them.

    And its data from others.
    """
    recorded = run.read(run.manifest).get("inputs")
    known = prepared is not None and any(key in prepared for key in fingerprint.IDENTITY)
    return {
        **(recorded if isinstance(recorded, dict) else {}),
        "data": fingerprint.fingerprint(splits, known, num_workers),
    }


def _check_same_data(
    run: RunDir,
    newest: Checkpoint,
    now: Mapping[str, Any],
    allowed: Sequence[str],
    steps_per_epoch: int,
    log: logging.Logger,
) -> dict[str, Any]:
    """Compare the data with that of the steps so far, where the checkpoint says. Ranks: rank zero.

    Returns the data as later checkpoints record it, and what has changed so far.

    Raises:
        RefusedError: the data has changed and run.allow_changes does not list it.
    """
    inputs = newest.manifest.get("inputs")
    inputs = inputs if isinstance(inputs, Mapping) else {}
    before, history = inputs.get("data"), inputs.get("data_changes") or []
    changes = fingerprint.differences(before, now) if isinstance(before, Mapping) else []
    if not changes:
        return {"data": fingerprint.carried_over(before, now), **({"data_changes": history} if history else {})}
    what = f"since step {newest.step} the data has changed: {', '.join(changes)}"
    if "data" not in allowed:
        raise RefusedError(
            f"{relative(run.path)}: {what}, so the steps to come would see other samples than the steps so far. Make "
            "the same "
            f"data available, type run.allow_changes=[data] to resume with this, or start a new run with another "
            "run.dir."
        )
    log.info(f"{what} (run.allow_changes=[data]): {steps_per_epoch:,} steps an epoch from here on")
    return {"data_changes": [*history, what]}


def open_data(experiment: Experiment, prepared: Mapping[str, Any] | None, world: World) -> Splits:
    """Build the data sets as they are trained on and evaluated; like `load_data`. Ranks: all; communicates."""
    return _arranged(load_data(experiment, prepared, world), experiment.data, world)


def load_data(experiment: Experiment, prepared: Mapping[str, Any] | None, world: World) -> Splits:
    """Build the data sets; `prepared` is what `ddpexp.run.prepare` said of them. Ranks: all; communicates.

    Raises:
        RefusedError: they are not what the loop takes, or differ from rank to rank.
    """
    data = experiment.data
    if data.prepare is None:
        node = Node(data.target, data.options)
        made = instantiate(node, experiment.trust, "data")
    else:
        made = instantiate(Node(data.target), experiment.trust, "data", prepared)
    splits = check_splits(made, data.target)
    _check_same_sizes(splits, data.target, world)
    return splits


def _arranged(splits: Splits, data: Data, world: World) -> Splits:
    """Hold out what is evaluated, and move what is to lie in the memory of a device."""
    if data.validation_fraction:
        splits = _divided(splits, data)
    return on_device(splits, world.device) if data.on_device else splits


def _divided(splits: Splits, data: Data) -> Splits:
    """Hold a part of the training data out, to be evaluated."""
    if len(splits.train) < 2:
        raise RefusedError(
            f"data.validation_fraction={data.validation_fraction}: {len(splits.train)} samples cannot be divided."
        )
    if "validation" in splits.evals:
        raise RefusedError(
            f"data.validation_fraction={data.validation_fraction}: {data.target} has a `validation` set of its own. "
            "Use 0."
        )
    kept, held = hold_out(splits.train, data.validation_fraction)
    return Splits(kept, {**splits.evals, "validation": held})


def _check_same_sizes(splits: Splits, target: str, world: World) -> None:
    """Compare the sizes of the sets with those that rank zero sees. Ranks: all; communicates.

    Raises:
        RefusedError: they are others; the ranks would not take the same steps, and would wait for one another for ever.
    """
    own = [len(splits.train), sum(len(part) for part in splits.evals.values())]
    first = world.broadcast(torch.tensor(own, device=world.device)).tolist()
    if own != first:
        raise RefusedError(
            f"data._target_={target} gave rank {world.rank} {own[0]:,} samples to train and {own[1]:,} to evaluate, "
            "and rank zero "
            f"{first[0]:,} and {first[1]:,}: give every rank the same data, for each takes its own part of it."
        )


def _init_from(
    experiment: Experiment, newest: Checkpoint | None, worker_args: Mapping[str, Any], log: logging.Logger
) -> Callable[[Models], None]:
    source = experiment.run.init_from
    if source is None or newest is not None:
        return lambda models: None
    asked = f"run.init_from={source}"
    # The command has found them, unless it has counted on checkpoints that turned out to be damaged.
    found = weights.find(Path(worker_args.get("init_from", source)), asked, log.warning)
    log.info(f"{asked}: the weights of {relative(found)}")
    return lambda models: load_weights(models, found, asked)


def _strategy(experiment: Experiment, world: World, plan: BatchPlan, prepare: Callable[[Models], None]) -> Strategy:
    trainer = experiment.trainer

    def factory() -> Any:
        torch.manual_seed(trainer.seed)
        model = instantiate(experiment.model, experiment.trust, "model")
        return check_model(model, experiment.model.target, trains=True)

    build: Callable[..., Strategy]
    if trainer.reduction == "exact":
        build = partial(Exact, gradient_accumulation_steps=plan.gradient_accumulation_steps)
    else:
        build = partial(DDP, deterministic=trainer.deterministic)
    return build(
        experiment.strategy, world, factory,
        channels_last=trainer.channels_last, compile=trainer.compile, prepare=prepare,
    )  # fmt: skip


def count_steps(trainer: Trainer, steps_per_epoch: int) -> int:
    """Return how many steps a run takes: what ends first of the epochs and the steps asked for."""
    limits = [
        trainer.max_steps,
        trainer.epochs * steps_per_epoch if trainer.epochs is not None else None,
    ]
    return min(limit for limit in limits if limit is not None)


def _loop(
    experiment: Experiment, world: World, strategy: Strategy, splits: Splits, batches: TrainBatches, tracker: Tracker,
    control: Control, num_steps: int, checkpointer: RunState, average: EMA | None,
) -> Loop:  # fmt: skip
    trust, trainer = experiment.trust, experiment.trainer
    task = instantiate(experiment.task, trust, "task")
    check_task(task, experiment.task.target)

    def make(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = instantiate(experiment.optimizer, trust, "optimizer", parameters)
        return made

    model = strategy.eval_model
    optimizers = (
        check_optimizers(task.optimizers(model, make), task.optimizers)
        if isinstance(task, HasOptimizers)
        else {"optimizer": make(strategy.parameters())}
    )
    return Loop(
        task=task,
        strategy=strategy,
        optimizers=optimizers,
        schedule=_schedule(experiment, num_steps),
        precision=Precision(trainer.precision, world.device, trainer.nonfinite == "skip", strategy.gradient_weight),
        world=replace(world, memory=strategy.memory),
        train=batches,
        evals=_evals(experiment, splits, world, batches.plan.micro_batch_size),
        tracker=tracker,
        control=control,
        options=trainer,
        num_steps=num_steps,
        checkpointer=checkpointer,
        average=average,
    )


def _schedule(experiment: Experiment, num_steps: int) -> Schedule:
    """Return the schedule, a user's own after a look at its first and last factor.

    Raises:
        RefusedError: it has no `factor`, or that gives no number.
    """
    node = experiment.scheduler
    if not isinstance(node, Node):
        return node
    schedule = instantiate(node, experiment.trust, "scheduler")
    if not isinstance(schedule, Schedule):
        raise RefusedError(
            f"scheduler._target_={node.target} gave a {type(schedule).__name__} without the method factor(step, "
            "num_steps), which "
            f"returns what optimizer.lr is multiplied by at a step: see ddpexp.task.Schedule."
        )
    check_signature(schedule.factor, "factor", ("step", "num_steps"))
    for step in (0, num_steps - 1):
        value: Any = schedule.factor(step, num_steps)
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise RefusedError(
                f"scheduler._target_={node.target}: factor({step}, {num_steps}) returned {value!r}, where a number "
                "belongs: what "
                f"optimizer.lr is multiplied by at that step."
            )
    return schedule


def _evals(experiment: Experiment, splits: Splits, world: World, batch_size: int) -> dict[str, EvalBatches]:
    data, seconds = experiment.data, experiment.trainer.timeout.data_seconds
    return {
        name: EvalBatches(
            part,
            batch_size,
            world.rank,
            world.world_size,
            world.device,
            data.num_workers,
            seconds,
            name,
            data.on_device,
        )
        for name, part in splits.evals.items()
    }


def _tracker(
    experiment: Experiment,
    run: RunDir,
    world: World,
    control: Control,
    log: logging.Logger,
    num_steps: int,
    from_step: int,
) -> Tracker:
    if not world.is_rank_zero:
        return Null()
    trackers: list[Tracker] = [JsonLines(run.metrics), Progress(control, log, num_steps)]
    if experiment.logger.kind == "tensorboard":
        from ddpexp.loggers.tensorboard import TensorBoard  # imports that only rank zero of a logging run needs

        trackers.append(TensorBoard(run.tensorboard, from_step))
    return Many(trackers)
