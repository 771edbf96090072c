"""Entry points of the worker processes: train the experiment of a run directory, or evaluate weights."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

import ddpexp.strategy.ddp  # these three are named by the registry, and loaded before the fork
import ddpexp.strategy.exact.strategy
import ddpexp.train.schedule  # noqa: F401
from ddpexp.checkpoint.format import Checkpoint, Damaged, is_checkpoint, open_checkpoint, set_aside
from ddpexp.checkpoint.loading import load_weights
from ddpexp.checkpoint.reader import weights_sha256
from ddpexp.compat import lazy_dynamo
from ddpexp.compat.compiler import end_processes
from ddpexp.config import fitted, fused
from ddpexp.config.instantiate import instantiate
from ddpexp.config.parse import load
from ddpexp.config.sampling import eval_batch_size, training_plan
from ddpexp.config.schema import Experiment
from ddpexp.data.datasets import Splits
from ddpexp.data.loader_limits import shared_memory_warning
from ddpexp.data.streams import StreamBatches
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.run.directory import RunDir
from ddpexp.run.history import record_start
from ddpexp.run.resume_arguments import typed_arguments
from ddpexp.settings.profile import check_profiled
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Strategy
from ddpexp.strategy.mesh import DataRank
from ddpexp.strategy.replica import Models, modules_of
from ddpexp.system import files
from ddpexp.system.fault_injection import fault_point
from ddpexp.system.files import relative, shortest
from ddpexp.system.hardware import usable_cores
from ddpexp.train import collectives, compile_cache, fuse, gpu_memory
from ddpexp.train.average import slow_average_warning
from ddpexp.train.build import (
    RunContext,
    build_average,
    build_callbacks,
    build_evals,
    build_logger,
    build_loop,
    build_model,
    build_strategy,
    count_steps,
    import_all,
    load_data,
    max_eval_samples,
    open_data,
)
from ddpexp.train.checkpointer import Checkpointer, truncate_records, writer_of
from ddpexp.train.choose_checkpoint import choose
from ddpexp.train.choose_samples import arrange, check_held_out
from ddpexp.train.collectives import TaskCollectives
from ddpexp.train.compilations import Compilations, limit_processes
from ddpexp.train.disk_space import check_disk_space
from ddpexp.train.evaluate import Evaluator, batches_for, chosen_sets
from ddpexp.train.freezing import LateStarts
from ddpexp.train.initial_weights import InitialWeights
from ddpexp.train.join import join_world
from ddpexp.train.keep_best import UnknownMetricError
from ddpexp.train.load_data import build_batches, warn_of_streams
from ddpexp.train.loop import Loop
from ddpexp.train.memory_snapshot import on_oom
from ddpexp.train.metrics import MetricError
from ddpexp.train.offline import forbid_downloads
from ddpexp.train.optimizer_average import averages_itself
from ddpexp.train.optimizer_trial import other_rounding
from ddpexp.train.precision import Precision
from ddpexp.train.process import Interrupted, open_log, run_rank
from ddpexp.train.recipe_checks import check_task
from ddpexp.train.report import Report
from ddpexp.train.same_data import check_same_data, inputs_of
from ddpexp.train.states import check_models
from ddpexp.train.task_step import CurrentProgress, wants_progress


def main(path: str, worker_args: str, control: Control | None = None) -> int:
    """Train the experiment of a run directory; like `run_rank`.

    `worker_args` is JSON made by `ddpexp.run.training.Training`.
    """
    return run_rank(lambda control: train(RunDir(Path(path)), json.loads(worker_args), control), control)


def evaluate(evaluation: str, control: Control | None = None) -> int:
    """Evaluate weights; `evaluation` is JSON made by `ddpexp.run.evaluation.Evaluation`. Like `run_rank`."""
    return run_rank(lambda control: evaluate_weights(json.loads(evaluation), control), control)


@dataclass(frozen=True)
class Built:
    """A run that is ready to be restored and trained."""

    loop: Loop
    checkpointer: Checkpointer
    report: Report
    newest: Checkpoint | None  # the checkpoint to resume from
    damaged: Sequence[Damaged]  # newer ones that cannot be read. Ranks: rank zero
    compilations: Compilations | None = None  # None: nothing is compiled

    @property
    def resumes_at(self) -> int:
        """Return the step that the run resumes after; 0 for a new run."""
        return self.newest.step if self.newest is not None else 0


def train(run: RunDir, worker_args: Mapping[str, Any], control: Control) -> None:
    """Run one experiment from start to result.

    Ranks: all.
    """
    context = join(run, worker_args, control)
    snapshot = on_oom(context.experiment.trainer.memory_snapshot, run, context.world)
    now = partial(situation, context.experiment, context.world, control)
    with collectives.explained(), gpu_memory.explained(now), snapshot:
        built = build(context)
        restore(context, built)
        fit(context, built)


def join(run: RunDir, worker_args: Mapping[str, Any], control: Control) -> RunContext:
    """Read the configuration and join the other ranks. Ranks: all; returns when all have joined."""
    config = _read_configuration(run, worker_args.get("config"))
    experiment, layout = load(config), run.layout()
    control.status.set_phase("join")
    world = join_world(experiment, layout, control)
    log = open_log(world, control, run.log)
    for note in worker_args.get("notes", ()) if world.is_rank_zero else ():
        log.info(note)
    manifest = _least_fitted(run, worker_args.get("fit"), world)
    return RunContext(
        run=run,
        config=config,
        experiment=fitted.resolved(experiment, manifest),
        layout=layout,
        prepared=worker_args["data"],
        init_from=worker_args.get("init_from"),
        world=world,
        control=control,
        log=log,
        is_fused=fused.is_fused(experiment.optimizer, manifest),
        is_fitted=experiment.trainer.micro_batch_size == fitted.FIT,
    )


def build(context: RunContext) -> Built:
    """Build everything the run consists of, and check it against the checkpoint to resume from.

    Ranks: all; communicates.

    Raises:
        RefusedError: the run cannot start, or not resume from its newest checkpoint.
    """
    run = context.run
    experiment = context.experiment
    world = context.world
    log = context.log
    trainer = experiment.trainer
    context.control.status.set_phase("build")
    _warn_of_little_shared_memory(experiment, log)
    forbid_downloads(experiment)
    import_all(experiment, world)
    compilations = _watch_compilations(world, log) if trainer.compiles else None
    if compilations is None:
        lazy_dynamo.defer()

    undivided = load_data(experiment, context.prepared, world)
    splits = arrange(undivided, experiment, world)
    inputs = inputs_of(context, undivided, splits.order) if world.is_rank_zero else {}
    check_held_out(experiment, splits, undivided)
    data = experiment.strategy.data_rank(world.rank, world.world_size)
    plan = training_plan(experiment, data.size)
    batches = build_batches(experiment, splits, plan, data.rank, world.device)
    if isinstance(batches, StreamBatches) and world.is_rank_zero:
        warn_of_streams(batches, trainer, log)

    newest, damaged = choose(run, world, experiment.run.resume == "require")
    initial_weights = InitialWeights(context, newest)
    strategy = build_strategy(experiment, world, plan, initial_weights.load, initial_weights.are_complete)
    if newest is not None and world.is_rank_zero:
        inputs |= check_same_data(context, newest, inputs["data"], batches.steps_per_epoch)
    if world.is_rank_zero:
        inputs["starts"] = record_start(run.read(run.manifest), newest)
    num_steps = count_steps(trainer, batches.steps_per_epoch)
    if newest is not None and newest.step > num_steps:
        reason = (
            f"the run is at step {newest.step}, and trainer.max_steps or trainer.epochs ends it at step {num_steps}"
        )
        raise RefusedError(
            reason, suggestion="Increase trainer.max_steps or trainer.epochs, or evaluate the run as it is."
        )

    check_profiled(trainer, num_steps)

    logger = build_logger(context, num_steps, batches.steps_per_epoch)
    positions = truncate_records(run, logger, newest)
    average = build_average(strategy, trainer, batches.steps_per_epoch, num_steps)
    check_models(strategy)
    checkpointer = Checkpointer(
        run,
        writer_of(run, trainer, world),
        strategy,
        logger,
        world,
        inputs=inputs,
        positions=positions,
        config=run.config.read_bytes(),
    )
    callbacks = build_callbacks(experiment, replace(world, memory=strategy.memory), num_steps)
    report = Report(context, strategy, batches, num_steps)
    log.info(report.headline())
    evals = build_evals(experiment, splits, data, world.device, eval_batch_size(experiment, data.size))
    loop = build_loop(
        context, strategy, batches, evals, logger, checkpointer=checkpointer, average=average, callbacks=callbacks
    )
    _log_other_bits(context, plan.gradient_accumulation_steps, loop.run.optimizers.values())
    _warn_of_late_starts(trainer, strategy, num_steps, log)
    if slow := slow_average_warning(trainer.ema_decay, num_steps):
        log.warning(slow)
    initial_weights.finish()
    return Built(loop, checkpointer, report, newest, damaged, compilations)


def _warn_of_late_starts(trainer: Trainer, strategy: Strategy, num_steps: int, log: logging.Logger) -> None:
    for sentence in LateStarts.of(trainer, strategy.modules, strategy.single).never_reached(num_steps):
        log.warning(sentence)


def _log_other_bits(context: RunContext, gradient_accumulation_steps: int, optimizers: Iterable[Optimizer]) -> None:
    """Log which options change the last bits of the weights."""
    experiment, log = context.experiment, context.log
    if context.is_fused:
        log.info(fuse.describe(optimizers))
    if experiment.trainer.param_dtype != "fp32":
        log.info("trainer.param_dtype=bf16: the weights are not promised to be the same with every strategy")
    if other_bits := experiment.strategy.other_bits(experiment.trainer, gradient_accumulation_steps):
        log.info(other_bits)
        return
    for sentence in filter(None, dict.fromkeys(map(other_rounding, optimizers))):
        log.info(sentence)


def restore(context: RunContext, built: Built) -> None:
    """Restore the newest checkpoint, or record what a new run starts with. Ranks: all; communicates."""
    run = context.run
    experiment = context.experiment
    log = context.log
    loop, num_steps = built.loop, built.loop.run.num_steps
    if context.world.is_rank_zero and built.resumes_at < num_steps:
        check_disk_space(run, experiment.trainer, loop)
    if built.newest is None:
        loop.logger.text("config", f"```yaml\n{run.config.read_text()}\n```")
        loop.logger.hyperparameters(built.report.hyperparameters())
    else:
        built.checkpointer.restore(built.newest, loop.states)
        log.info(f"resumed after step {built.newest.step} of {num_steps}, from {relative(built.newest.folder)}")
        if missing := experiment.strategy.missing_in_checkpoints():
            log.warning(missing)
    set_aside(built.damaged)  # now that nothing can refuse this start any more
    gc.collect()
    gc.freeze()  # what is built now lives as long as the run: the collector need not walk it again


def fit(context: RunContext, built: Built) -> None:
    """Train, save and report the result. Ranks: all; communicates.

    Raises:
        Interrupted: asked to stop before the last step; the run is saved.
    """
    control, loop = context.control, built.loop
    control.send_nowait("began", step=loop.progress.step)
    control.status.set_phase("train")
    try:
        outcome = loop.fit()
        control.status.set_phase("save")
        built.checkpointer.finish()
        if built.compilations is not None:
            context.log.info(built.compilations.summary())
        if context.world.is_rank_zero:
            context.log.info(built.report.finish(outcome, loop.logger))
    except UnknownMetricError as error:
        built.checkpointer.drain()
        words = ["resume", shortest(context.run.path), *typed_arguments(context.run), error.override]
        raise DdpexpError(
            f"{error} Step {loop.progress.step} is saved",
            suggestion=f"Resume from it with another metric: python -m ddpexp {shlex.join(words)}",
        ) from None
    except MetricError as error:
        built.checkpointer.drain()
        control.status.set_phase("evaluate")
        # The correction is a change of code, which a resume does not accept by itself.
        words = ["resume", shortest(context.run.path), *typed_arguments(context.run), "run.allow_changes=[code]"]
        raise DdpexpError(
            f"{error} Step {loop.progress.step} is saved",
            suggestion=f"Correct the error and resume: python -m ddpexp {shlex.join(words)}",
        ) from error
    except (Exception, SystemExit):
        built.checkpointer.drain()
        raise
    finally:
        loop.logger.close()
        end_processes()
    context.world.barrier()
    if built.compilations is not None and context.world.local_rank == 0:
        compile_cache.record()
    fault_point("leave")
    if outcome.interrupted:
        raise Interrupted(outcome.step)


def evaluate_weights(evaluation: Mapping[str, Any], control: Control) -> None:
    """Print the metrics of weights on the evaluation sets.

    Ranks: all.
    """
    experiment, layout = load(evaluation["config"]), Layout(**evaluation["layout"])
    control.status.set_phase("join")
    world = join_world(experiment, layout, control)
    now = partial(situation, experiment, world, control, evaluation["batch_size"])
    with collectives.explained(), gpu_memory.explained(now):
        _evaluate_weights(evaluation, experiment, world, control)


def _evaluate_weights(evaluation: Mapping[str, Any], experiment: Experiment, world: World, control: Control) -> None:
    log = open_log(world, control, None)
    control.status.set_phase("build")
    _warn_of_little_shared_memory(experiment, log)
    forbid_downloads(experiment)
    splits, data = open_data(experiment, evaluation["data"], world), DataRank(world.rank, world.world_size)
    sets = chosen_sets(splits.evals, evaluation["split"])
    evals = build_evals(experiment, replace(splits, evals=sets), data, world.device, evaluation["batch_size"])
    model, models = build_trained(experiment, Path(evaluation["weights"]), "evaluate", world.device)
    if (batches := experiment.trainer.limit_eval_batches) is not None:
        log.info(
            f"trainer.limit_eval_batches={batches}: at most {max_eval_samples(experiment.trainer):,} samples of a set"
        )
    control.status.set_phase("evaluate")
    task = instantiate(experiment.task, experiment.trust, "task")
    check_task(task, experiment.task.target, evaluates=True)
    evals = batches_for(task, evals, experiment.trainer.global_batch_size)
    precision = Precision(experiment.trainer.precision, world.device, False)
    current = CurrentProgress()
    if wants_progress(task):
        current = _progress_of(experiment, splits, Path(evaluation["weights"]), world.device)
    with TaskCollectives(task, models).watched() if world.world_size > 1 else nullcontext():
        metrics = Evaluator(task, precision, world, data, control, current).evaluate(model, evals)
    if metrics is None:
        raise Interrupted(0)  # there is nothing to save
    log.info("  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    digest = weights_sha256(models)
    log.info(f"weights {evaluation['weights']}  sha256 {digest}")
    if (answer := evaluation.get("answer")) is not None and world.is_rank_zero:
        facts = {"weights": evaluation["weights"], "weights_sha256": digest, "metrics": metrics}
        files.answer(Path(answer), facts)
    world.barrier()


def _progress_of(experiment: Experiment, splits: Splits, weights: Path, device: torch.device) -> CurrentProgress:
    """Return the progress of the last step before a checkpoint, or of the run for a file of weights."""
    batches = build_batches(experiment, splits, training_plan(experiment, 1), 0, device)
    num_steps = count_steps(experiment.trainer, batches.steps_per_epoch)
    step = open_checkpoint(weights).step if is_checkpoint(weights) else num_steps
    current = CurrentProgress(num_steps, batches.steps_per_epoch, device if experiment.trainer.compiles else None)
    current.set(max(step - 1, 0))
    return current


def build_trained(experiment: Experiment, source: Path, command: str, device: torch.device) -> tuple[Any, Models]:
    """Return the model with the weights of a file or checkpoint in evaluation mode, and its modules by name."""
    model = build_model(experiment, trains=False)
    models = modules_of(model)
    for module in models.values():
        module.to(device).eval()
    averaged = experiment.trainer.averages or averages_itself(experiment, source)
    load_weights(models, source, f"{command} {source}", averaged)
    return model, models


def situation(
    experiment: Experiment, world: World, control: Control, batch_size: int | None = None
) -> gpu_memory.Situation:
    """Return what this rank does, for an answer to an error. `batch_size`: of an evaluation."""
    trainer, data = experiment.trainer, experiment.strategy.data_rank(world.rank, world.world_size)
    plan = training_plan(experiment, data.size)
    if batch_size is not None:
        plan = replace(plan, micro_batch_size=batch_size)
    return gpu_memory.Situation(plan, trainer.precision, control.status.phase, experiment.data.on_device is True)


def _least_fitted(run: RunDir, found: Mapping[str, Any] | None, world: World) -> dict[str, Any]:
    """Return the manifest; where hosts have found micro-batches, with the least one. Ranks: all; communicates then."""
    manifest = run.read(run.manifest)
    if found is None:
        return manifest
    least = -int(world.max(torch.tensor([-found["size"]], device=world.device)))
    if least != fitted.recorded(manifest):
        manifest = {**manifest, "resolved": {**manifest["resolved"], fitted.KEY: least}}
        world.barrier()  # every rank has read the old one
        if world.is_rank_zero:
            files.write_json(run.manifest, manifest)
    return manifest


def _read_configuration(run: RunDir, digest: str | None) -> str:
    """Return config.yaml if it is what the command has checked: it decides whose code runs.

    Raises:
        RefusedError: it was changed since.
    """
    raw = run.config.read_bytes()
    if digest is not None and hashlib.sha256(raw).hexdigest() != digest:
        raise RefusedError("has changed since the command read it: do not edit it while a run starts", place=run.config)
    return raw.decode()


def _watch_compilations(world: World, log: logging.Logger) -> Compilations:
    """Prepare to compile. Ranks: all; communicates."""
    limit_processes(os.environ, usable_cores(), world.local_world_size)
    compilations = Compilations.watched()
    if world.local_rank == 0:
        warning = compile_cache.repair()
        if warning is not None:
            log.warning(warning)
    world.barrier()
    return compilations


def _warn_of_little_shared_memory(experiment: Experiment, log: logging.Logger) -> None:
    warning = shared_memory_warning(experiment.data.num_workers)
    if warning is not None:
        log.warning(warning)  # on every rank; the command shows identical warnings once
