"""What a run reports: the headline and the hyperparameters at its start, the result at its end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpexp.checkpoint.weights import best_step
from ddpexp.config.override_syntax import unescaped
from ddpexp.config.schema import Experiment
from ddpexp.data.batch_plan import epochs_text
from ddpexp.data.batches import TrainBatches
from ddpexp.data.lengths import ByLength
from ddpexp.data.schema import guesses_about
from ddpexp.data.streams import Batches, StreamBatches
from ddpexp.data.token_batches import ByTokens
from ddpexp.loggers.base import Logger
from ddpexp.settings.node import Node
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Strategy
from ddpexp.system.files import relative, write_json
from ddpexp.system.hardware import usable_cores, why_no_gpu
from ddpexp.system.text import counted, first_few, metric_text, one_line
from ddpexp.train.build import RunContext
from ddpexp.train.freezing import count_text
from ddpexp.train.micro_batch_effects import effects
from ddpexp.train.param_groups import group_texts
from ddpexp.train.progress import Outcome
from ddpexp.train.verdict import read_verdict


@dataclass(frozen=True)
class Report:
    """What is reported of a run: its configuration, and what was built from it."""

    context: RunContext
    strategy: Strategy
    train: Batches
    num_steps: int

    def headline(self) -> str:
        """Return what will run, in a few lines."""
        experiment = self.context.experiment
        layout = self.context.layout
        prepared = self.context.prepared
        plan = self.train.plan
        size = count_text(experiment.trainer, self.strategy.modules, self.strategy.single)
        groups = group_texts(experiment, self.strategy.modules, self.strategy.single)
        note = prepared.get("note") if prepared else None
        workers = counted(layout.world_size, "GPU worker" if layout.device == "cuda" else "CPU worker")
        cores, local = usable_cores(), layout.world_size // layout.nodes
        crowded = f"; {local} share {counted(cores, 'core')}" if layout.device == "cpu" and local > cores else ""
        shared = ", gradients through shared memory" if self.strategy.memory is not None else ""
        asks = layout.device == "cpu" and experiment.trainer.device == "auto"
        no_gpu = why_no_gpu() if asks else ""
        is_stream = isinstance(self.train, StreamBatches)
        batch = plan.formula(experiment.data.batch_tokens)
        mesh = experiment.strategy.mesh(layout.world_size).drawn()
        if experiment.trainer.reduction == "exact":
            batch += ", summed in one order at every number of workers"
        lines = {
            "recipe": " ".join([experiment.recipe.name, *self.context.run.options()]),
            "data": (note or f"{experiment.data.target}, {self.train.description}") + self._limits(),
            **({"guess": f"\n{'':8}".join(guesses)} if (guesses := guesses_about(prepared)) else {}),
            "model": f"{_model(experiment.model)}, {size}, {_numbers(experiment.trainer)}",
            **({"groups": f"{len(groups)}: {first_few(groups, 4)}"} if groups else {}),
            "world": f"{workers} ({layout.backend}{shared}), {counted(layout.threads, 'thread')} each{crowded}",
            **({"gpus": no_gpu} if no_gpu else {}),
            **({"mesh": f"\n{'':8}".join(mesh)} if mesh else {}),
            "batch": f"{plan.global_batch_size} = {batch}",
            **({"fit": self._fitted()} if self.context.is_fitted else {}),
            "steps": (f"{self.num_steps:,}" if is_stream else f"{self.num_steps:,} ({self._epochs()})") + self._limit(),
            "folder": relative(self.context.run.path),
        }
        return "\n".join(f"{name:<8}{text}" for name, text in lines.items())

    def _fitted(self) -> str:
        """Return the micro-batch that was found, and what depends on it."""
        size = f"trainer.micro_batch_size={self.context.experiment.trainer.micro_batch_size}"
        return f"{size}, found by the first start as the largest that fits; another one would change " + effects(
            self.strategy.modules
        )

    def _epochs(self) -> str:
        """Return the length of the run in epochs, and what an epoch leaves out."""
        train = self.train
        text = epochs_text(self.num_steps / train.steps_per_epoch, train.steps_per_epoch)
        if not isinstance(train, TrainBatches) or isinstance(train.order, ByTokens):
            return text
        dropped = train.samples_per_epoch % train.plan.global_batch_size
        return f"{text}; each leaves out {counted(dropped, 'sample')}" if dropped else text

    def _limit(self) -> str:
        """Return that the epochs end the run before the steps that are asked for."""
        trainer = self.context.experiment.trainer
        if trainer.epochs is None or trainer.max_steps is None or trainer.max_steps <= self.num_steps:
            return ""
        epochs, steps = f"trainer.epochs={trainer.epochs}", f"trainer.max_steps={trainer.max_steps}"
        return f"; {epochs} ends the run before {steps}: trainer.epochs=null leaves it to the steps"

    def _limits(self) -> str:
        """Return what is held out of the data, and what the trainer leaves out."""
        trainer = self.context.experiment.trainer
        data = self.context.experiment.data
        prepared = self.context.prepared
        parts = []
        if data.validation_fraction > 0:
            parts.append(f"{data.validation_fraction:.3g} of the training samples held out to evaluate on")
        elif data.folds is None and prepared is not None and prepared.get("num_test") == 0:
            parts.append("no evaluation set (data.validation_fraction=0.1 would hold one out)")
        if trainer.limit_train_samples is not None:
            parts.append(f"trained on {trainer.limit_train_samples:,} samples")
        order = self.train.order if isinstance(self.train, TrainBatches) else None
        if isinstance(order, ByTokens):
            parts.append(
                f"{order.samples_per_epoch:,} batches an epoch of at most {order.most_tokens:,} tokens, of which "
                f"{order.padding:.1%} is padding"
            )
        elif isinstance(self.train, TrainBatches) and self.train.samples_per_epoch != len(self.train.data):
            parts.append(f"{self.train.samples_per_epoch:,} samples an epoch")
        if isinstance(order, ByLength):
            sorted_share, other_share = order.padding(self.train.seed, self.train.plan.micro_batch_size)
            parts.append(f"by length: {sorted_share:.1%} of a batch is padding instead of {other_share:.1%}")
        if trainer.limit_eval_batches is not None:
            parts.append(f"evaluated on at most {trainer.limit_eval_batches * trainer.global_batch_size:,} of each set")
        return f"; {', '.join(parts)}" if parts else ""

    def hyperparameters(self) -> dict[str, bool | float | str]:
        """Return the hyperparameters by their keys: a fixed selection, and every override of this run."""
        overrides = {}
        for override in self.context.run.read_overrides():
            key, _, value = override.lstrip("+").partition("=")
            if not key.startswith(("~", "run.", "hydra.", "sweep.", "launcher.")):
                overrides[key] = _value(unescaped(value))
        return {**overrides, **_hyperparameters(self.context.experiment)}

    def finish(self, outcome: Outcome, logger: Logger) -> str:
        """Write result.json; return the last line. Ranks: rank zero, once the last checkpoint is on disk."""
        experiment = self.context.experiment
        prepared = self.context.prepared
        status = "interrupted" if outcome.interrupted else "done"
        samples = self.train.num_samples(outcome.step)
        seconds = outcome.train_seconds
        best = None if experiment.trainer.keep_best is None else best_step(self.context.run.checkpoints)
        if not outcome.interrupted:
            if best is not None:
                logger.best(best.step, best.metric, best.value)
            logger.done()
        verdict = read_verdict(self.context.run)
        result = {
            "status": status,
            "stopped": one_line(outcome.stopped) if outcome.stopped is not None else None,
            "recipe": experiment.recipe.name,
            "data": prepared["name"] if prepared else experiment.data.target,
            "step": outcome.step,
            "epoch": outcome.epoch,
            "samples": samples,
            "world_size": self.context.layout.world_size,
            "metrics": dict(outcome.metrics),
            "best": None if best is None else asdict(best),
            "tested_step": outcome.tested,
            "verdict": None if verdict is None else verdict.as_dict(),
            "weights_sha256": outcome.digest,
            "first_step_at": outcome.first_step_at,
            "ended_at": time.time(),
            "seconds": round(seconds, 3),
            "elapsed_seconds": round(outcome.elapsed_seconds, 3),
            "samples_per_second": round(samples / seconds, 1) if seconds else None,
        }
        write_json(self.context.run.result, result)
        if outcome.interrupted:
            return f"stopped after step {outcome.step} of {self.num_steps}, which is saved"
        shown = "  ".join(f"{one_line(name)} {metric_text(name, value)}" for name, value in outcome.metrics.items())
        if outcome.tested is not None:
            shown += f"  tested with the weights of step {outcome.tested}"
        if best is not None:
            shown += f"  best {one_line(best.metric)} {metric_text(best.metric, best.value)} at step {best.step}"
        elif (seen := best_seen(self.context.run.metrics, experiment.callbacks, outcome.stopped)) is not None:
            shown += f"  best {seen}, whose weights are not kept (trainer.keep_best)"
        why = "" if outcome.stopped is None else f"ended early: {one_line(outcome.stopped)}\n"
        if verdict is not None:
            data = experiment.data
            options = {"_target_": data.target, "num_workers": data.num_workers, "cache": data.options.get("cache")}
            values = {f"data.{key}": value for key, value in options.items()}
            manifest = self.context.run.read(self.context.run.manifest)
            why += f"verdict {verdict.sentence(manifest, values)}\n"
        return f"{why}done    {shown or 'no evaluation'}  in {seconds:.1f} s  see {relative(self.context.run.path)}"


def best_seen(metrics: Path, callbacks: Mapping[str, Node], stopped: str | None) -> str | None:
    """Return the best value, in the records of a run, of the metric by which a callback has ended it.

    None where none has.
    """
    named = re.match(r"callbacks\.([\w-]+)", stopped or "")
    node = None if named is None else callbacks.get(named[1])
    monitor, mode = (None, None) if node is None else (node.kwargs.get("monitor"), node.kwargs.get("mode"))
    if not isinstance(monitor, str) or mode not in ("min", "max"):
        return None
    lines = [json.loads(line) for line in metrics.read_bytes().splitlines()]
    values = [(line[monitor], line["step"]) for line in lines if isinstance(line.get(monitor), int | float)]
    if not values:
        return None
    value, step = (min if mode == "min" else max)(values, key=lambda one: one[0])
    return f"{one_line(monitor)} {metric_text(monitor, value)} at step {step}"


def _numbers(trainer: Trainer) -> str:
    """Return in which numbers the model computes, and what is compiled."""
    parts: list[str] = [trainer.precision]
    if trainer.param_dtype != "fp32":
        parts = [f"{trainer.param_dtype} with weights in fp32" if trainer.master_weights else trainer.param_dtype]
    if trainer.matmul_precision != "highest":
        parts.append(f"matrix products in {trainer.matmul_precision} precision")
    if trainer.compile:
        blocks = f" {trainer.compile_blocks}" if trainer.compile_blocks else ""
        parts.append(f"compiled{blocks}{'' if trainer.compile is True else f' ({trainer.compile})'}")
    if trainer.compile_step:
        parts.append("compiled steps")
    return ", ".join(parts)


def _hyperparameters(experiment: Experiment) -> dict[str, bool | float | str]:
    trainer, scheduler = experiment.trainer, experiment.scheduler
    values = {
        "recipe": experiment.recipe.name,
        "model": _model(experiment.model),
        "optimizer": _short(experiment.optimizer.target),
        **{f"optimizer.{key}": value for key, value in experiment.optimizer.kwargs.items()},
        "scheduler": _short(scheduler.target) if isinstance(scheduler, Node) else type(scheduler).__name__,
        "trainer.global_batch_size": trainer.global_batch_size,
        "trainer.epochs": trainer.epochs,
        "trainer.max_steps": trainer.max_steps,
        "trainer.precision": trainer.precision,
        "trainer.seed": trainer.seed,
    }
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in values.items()
        if value is not None
    }


def _value(text: str) -> bool | float | str:
    """Return the value of an override as a bool, number or string: HParams columns of numbers take no strings."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def _model(node: Node) -> str:
    """Return the name of a model: for functions that build many, such as timm's `create_model`, their argument."""
    for key in ("model_name", "name", "pretrained_model_name_or_path"):
        name = node.kwargs.get(key)
        if isinstance(name, str) and name:
            return one_line(name)
    return _short(node.target)


def _short(target: str) -> str:
    return target.rpartition(".")[2]
