"""What runs in every process: join, build the objects, fit, leave a result."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ddpexp import checkpoint, deferred_dynamo, loop
from ddpexp.config import Experiment, Node, load
from ddpexp.config.instantiate import instantiate
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.plan import Batches, plan
from ddpexp.data.sets import Splits, hold_out
from ddpexp.errors import EXIT_DONE, EXIT_FAILED, DdpexpError, RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.control import Control
from ddpexp.loop import Loop, Outcome
from ddpexp.precision import Precision
from ddpexp.rundir import RunDir, dumps, relative, write
from ddpexp.strategy.ddp import DDP, Models
from ddpexp.task import HasOptimizers
from ddpexp.track import Many, Null, Tracker
from ddpexp.track.console import Console
from ddpexp.track.lines import Lines
from ddpexp.world import World


class _Stopped(BaseException):
    """The watcher asked this worker to leave."""


def main(path: str) -> int:
    """Train what the run directory describes. Never returns in a worker: see `_leave`."""
    return _run(lambda control, phase: train(RunDir(Path(path)), control, phase))


def evaluate(described: str) -> int:
    """Evaluate weights; `described` is JSON made by `ddpexp.verbs.evaluate`. Never returns in a worker."""
    return _run(lambda control, phase: evaluate_weights(json.loads(described), control, phase))


def train(run: RunDir, control: Control, phase: Callable[[str], None]) -> None:
    """Do one experiment from start to result.

    Ranks: all.
    """
    experiment, layout, data = load(run.config.read_text()), run.layout(), run.read(run.manifest)["data"]
    phase("join")
    world = _join(experiment, layout)
    log = _log(world, control, run)
    phase("build")
    splits = _data(experiment, data)
    cut = plan(experiment.trainer.global_batch_size, experiment.trainer.micro_batch_size, world.world_size)
    seed = experiment.trainer.seed
    batches = TrainBatches(splits.train, cut, world.rank, seed, world.device, experiment.data.num_workers)
    strategy = _strategy(experiment, world, _init_from(experiment))
    num_steps = _num_steps(experiment, batches.steps_per_epoch)
    tracker = _tracker(experiment, run, world, control, log, num_steps)
    log.info(_headline(experiment, layout, cut, strategy.bare, data, batches, num_steps, run))
    tracker.text("config", f"```yaml\n{run.config.read_text()}\n```")
    fit = _loop(experiment, world, strategy, splits, batches, tracker, control, num_steps)
    gc.collect()
    gc.freeze()  # what is built now lives as long as the run: the collector need not walk it again
    phase("train")
    try:
        outcome = fit.fit()
        phase("save")
        if world.is_rank_zero:
            _finish(experiment, run, world, strategy.bare, cut, data, outcome, tracker, log)
    finally:
        tracker.close()
    world.barrier()


def evaluate_weights(described: Mapping[str, Any], control: Control, phase: Callable[[str], None]) -> None:
    """Print the metrics of weights on the evaluation sets.

    Ranks: all.
    """
    experiment, layout = load(described["config"]), Layout(**described["layout"])
    phase("join")
    world = _join(experiment, layout)
    log = _log(world, control, None)
    phase("build")
    evals = _evals(experiment, _data(experiment, described["data"]), world, described["batch_size"])
    model = instantiate(experiment.model, experiment.trust, "model")
    models: Models = {"model": model} if isinstance(model, torch.nn.Module) else dict(model)
    for module in models.values():
        module.to(world.device).eval()
    checkpoint.load_weights(models, Path(described["weights"]), f"evaluate {described['weights']}")
    phase("evaluate")
    task = instantiate(experiment.task, experiment.trust, "task")
    precision = Precision(experiment.trainer.precision, world.device, False)
    metrics = loop.evaluate(task, model, evals, precision, world)
    log.info("  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    log.info(f"weights {described['weights']}  sha256 {checkpoint.weights_sha256(models)}")
    world.barrier()


def _run(work: Callable[[Control, Callable[[str], None]], None]) -> int:
    """Do the work, tell the watcher how it ended, and leave without running any destructor."""
    control = Control.from_environ()

    def phase(name: str) -> None:
        control.say("phase", phase=name)

    _prepare_process()
    code = EXIT_FAILED
    try:
        work(control, phase)
        code = EXIT_DONE
        control.tell("done")
    except _Stopped:
        code = 128 + signal.SIGTERM
    except SystemExit as end:
        code = _exit_code(end)
        _report(control, "SystemExit", f"the recipe ended the process: sys.exit({end.code!r})", code, None)
    except RefusedError as error:
        code = error.exit_code
        _report(control, type(error).__name__, str(error), code, None)
    except DdpexpError as error:
        code = error.exit_code
        _report(control, type(error).__name__, str(error), code, "")
    except BaseException as error:
        _report(control, type(error).__name__, str(error), code, traceback.format_exc())
    return _leave(code)


def _leave(code: int) -> int:
    """End this process at once, with everything flushed.

    torch 2.13 with gloo can abort or hang in its destructors after the work is done: the reducer's one joins a thread that
    waits for the interpreter lock. Nothing of value happens in them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def _prepare_process() -> None:
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C: whoever started the workers coordinates the end

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Stopped

    signal.signal(signal.SIGTERM, stop)


def _report(control: Control, kind: str, message: str, code: int, trace: str | None) -> None:
    """Tell the watcher, who shows it once; without one, print it here."""
    limited = trace[-60_000:] if trace else trace
    control.tell("error", host=platform.node(), error=kind, message=message, traceback=limited, step=control.step, exit_code=code)
    if not control.watched:
        print(trace or f"{kind}: {message}", file=sys.stderr)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return EXIT_FAILED  # a recipe that leaves in the middle has not done its work
    return end.code if isinstance(end.code, int) and 3 <= end.code <= 125 else EXIT_FAILED


def _join(experiment: Experiment, layout: Layout) -> World:
    if not experiment.trainer.compile:
        deferred_dynamo.defer()
    torch.set_num_threads(layout.threads)
    if experiment.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if experiment.run.code and experiment.run.code not in sys.path:
        sys.path.insert(0, experiment.run.code)
    return World.join(layout)


def _log(world: World, control: Control, run: RunDir | None) -> logging.Logger:
    """Rank zero logs to run.log and standard output; of the others the watcher shows warnings that rank zero has not."""
    log = logging.getLogger("ddpexp")
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.captureWarnings(True)
    handlers: list[logging.Handler] = [_ToWatcher(control)]
    if world.is_rank_zero:
        shown = logging.StreamHandler(sys.stdout)
        shown.addFilter(lambda record: not getattr(record, "watched", False))  # the watcher shows progress itself
        handlers.append(shown)
        if run is not None:
            kept = logging.FileHandler(run.log)
            kept.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            handlers.append(kept)
    else:
        shown = logging.StreamHandler(sys.stderr)
        shown.setLevel(logging.WARNING)
        handlers.append(shown)
    for logger in (log, logging.getLogger("py.warnings")):
        logger.handlers = handlers
    return log


class _ToWatcher(logging.Handler):
    def __init__(self, control: Control) -> None:
        super().__init__(logging.WARNING)
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        self._control.say("warning", text=self.format(record).strip())


def _data(experiment: Experiment, prepared: Mapping[str, Any] | None) -> Splits:
    data = experiment.data
    if data.prepare is None:
        node = Node(data.target, data.options)
        splits = instantiate(node, experiment.trust, "data")
    else:
        splits = instantiate(Node(data.target), experiment.trust, "data", prepared)
    if not isinstance(splits, Splits):
        raise RefusedError(f"data._target_={data.target} must return ddpexp.data.sets.Splits, not {type(splits).__name__}.")
    for name, part in {"train": splits.train, **splits.evals}.items():
        if len(part) == 0:
            raise RefusedError(f"data._target_={data.target} gave no samples for `{name}`.")
    if data.validation_fraction == 0:
        return splits
    if len(splits.train) < 2:
        raise RefusedError(f"data.validation_fraction={data.validation_fraction}: {len(splits.train)} samples cannot be divided.")
    if "validation" in splits.evals:
        raise RefusedError(
            f"data.validation_fraction={data.validation_fraction}: {data.target} has a `validation` set of its own. Use 0."
        )
    kept, held = hold_out(splits.train, data.validation_fraction)
    return Splits(kept, {**splits.evals, "validation": held})


def _init_from(experiment: Experiment) -> Callable[[Models], None]:
    source = experiment.run.init_from
    if source is None:
        return lambda models: None
    return lambda models: checkpoint.load_weights(models, Path(source), f"run.init_from={source}")


def _strategy(experiment: Experiment, world: World, prepare: Callable[[Models], None]) -> DDP:
    trainer = experiment.trainer

    def factory() -> Any:
        torch.manual_seed(trainer.seed)
        return instantiate(experiment.model, experiment.trust, "model")

    return DDP(
        experiment.strategy, world, factory,
        channels_last=trainer.channels_last, compile=trainer.compile, prepare=prepare,
    )  # fmt: skip


def _num_steps(experiment: Experiment, steps_per_epoch: int) -> int:
    trainer = experiment.trainer
    limits = [
        trainer.max_steps,
        trainer.epochs * steps_per_epoch if trainer.epochs is not None else None,
    ]
    return min(limit for limit in limits if limit is not None)


def _loop(
    experiment: Experiment, world: World, strategy: DDP, splits: Splits, batches: TrainBatches, tracker: Tracker, control: Control,
    num_steps: int,
) -> Loop:  # fmt: skip
    trust, trainer = experiment.trust, experiment.trainer
    task = instantiate(experiment.task, trust, "task")

    def make(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = instantiate(experiment.optimizer, trust, "optimizer", parameters)
        return made

    model = strategy.evaluating
    optimizers = task.optimizers(model, make) if isinstance(task, HasOptimizers) else {"optimizer": make(strategy.parameters())}
    return Loop(
        task=task,
        strategy=strategy,
        optimizers=optimizers,
        schedule=experiment.scheduler,
        precision=Precision(trainer.precision, world.device, trainer.nonfinite == "skip"),
        world=world,
        train=batches,
        evals={
            name: EvalBatches(
                part,
                batches.batches.micro_batch_size,
                world.rank,
                world.world_size,
                world.device,
                experiment.data.num_workers,
            )
            for name, part in splits.evals.items()
        },
        tracker=tracker,
        control=control,
        options=trainer,
        num_steps=num_steps,
    )


def _evals(experiment: Experiment, splits: Splits, world: World, batch_size: int) -> dict[str, EvalBatches]:
    workers = experiment.data.num_workers
    return {
        name: EvalBatches(part, batch_size, world.rank, world.world_size, world.device, workers)
        for name, part in splits.evals.items()
    }


def _tracker(experiment: Experiment, run: RunDir, world: World, control: Control, log: logging.Logger, num_steps: int) -> Tracker:
    if not world.is_rank_zero:
        return Null()
    trackers: list[Tracker] = [Lines(run.metrics), Console(control, log, num_steps)]
    if experiment.logger.kind == "tensorboard":
        from ddpexp.track.board import Board  # half a second of imports that only rank zero of a logging run needs

        trackers.append(Board(run.tensorboard))
    return Many(trackers)


def _finish(
    experiment: Experiment, run: RunDir, world: World, models: Models, cut: Batches, data: Mapping[str, Any] | None,
    outcome: Outcome, tracker: Tracker, log: logging.Logger,
) -> None:  # fmt: skip
    digest = checkpoint.weights_sha256(models)
    facts = {"step": outcome.step, "epoch": outcome.epoch, "weights_sha256": digest, "metrics": dict(outcome.metrics)}
    tracker.flush()
    checkpoint.save(run.checkpoints / f"step-{outcome.step:08d}", models, facts)
    tracker.hyperparameters(_hyperparameters(experiment), outcome.metrics)
    samples = outcome.step * cut.global_batch_size
    result = {
        "status": "done",
        "recipe": experiment.recipe.name,
        "data": data["name"] if data else experiment.data.target,
        "step": outcome.step,
        "epoch": outcome.epoch,
        "samples": samples,
        "world_size": world.world_size,
        "metrics": dict(outcome.metrics),
        "weights_sha256": digest,
        "first_step_at": outcome.first_step_at,
        "seconds": round(outcome.train_seconds, 3),
        "samples_per_second": round(samples / outcome.train_seconds, 1),
    }
    write(run.result, dumps(result))
    shown = "  ".join(
        f"{name} {value:.2%}" if "accuracy" in name else f"{name} {value:.4g}" for name, value in outcome.metrics.items()
    )
    log.info(f"done    {shown or 'no evaluation'}  in {outcome.train_seconds:.1f} s  see {relative(run.path)}")


def _hyperparameters(experiment: Experiment) -> dict[str, Any]:
    trainer = experiment.trainer
    return {
        "recipe": experiment.recipe.name,
        "model": experiment.model.target.rpartition(".")[2],
        "optimizer": experiment.optimizer.target.rpartition(".")[2],
        **{f"optimizer.{key}": value for key, value in experiment.optimizer.kwargs.items()},
        "scheduler": type(experiment.scheduler).__name__,
        "global_batch_size": trainer.global_batch_size,
        "epochs": trainer.epochs or 0,
        "precision": trainer.precision,
        "seed": trainer.seed,
    }


def _headline(
    experiment: Experiment, layout: Layout, cut: Batches, models: Models, data: Mapping[str, Any] | None, batches: TrainBatches,
    num_steps: int, run: RunDir,
) -> str:  # fmt: skip
    size = sum(p.numel() for module in models.values() for p in module.parameters())
    kind = "GPU" if layout.device == "cuda" else "CPU"
    workers = f"{layout.world_size} {kind} worker{'s' if layout.world_size > 1 else ''}"
    note = data.get("note") if data else None
    lines = [
        ("recipe", experiment.recipe.name),
        ("data", note or f"{experiment.data.target}, {len(batches.data):,} samples to train"),
        ("model", f"{experiment.model.target.rpartition('.')[2]}, {size:,} parameters, {experiment.trainer.precision}"),
        ("world", f"{workers} ({layout.backend}), {layout.threads} thread{'s' if layout.threads > 1 else ''} each"),
        (
            "batch",
            f"{cut.global_batch_size} = {cut.micro_batch_size} x {cut.accumulation} accumulated x {cut.world_size} workers",
        ),
        ("steps", f"{num_steps:,} ({num_steps / batches.steps_per_epoch:.3g} epochs of {batches.steps_per_epoch:,})"),
        ("folder", relative(run.path)),
    ]
    return "\n".join(f"{name:<8}{text}" for name, text in lines)
