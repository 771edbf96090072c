"""The experiment as frozen, typed values: sections, cross-checks, and the way from and to the run directory's file."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ddpexp.config import registry
from ddpexp.config.build import build, convert, shown, unknown_key
from ddpexp.config.instantiate import Node, Trust, locate, refuse_target, refuse_untrusted
from ddpexp.data.batch_plan import plan_batches
from ddpexp.errors import RefusedError
from ddpexp.launch import Launcher, Layout, Timeout
from ddpexp.schedule import Schedule
from ddpexp.strategy import Options as Strategy

__all__ = [
    "Data",
    "Experiment",
    "Logger",
    "Node",
    "Run",
    "Strategy",
    "Timeout",
    "Trainer",
    "Trust",
    "check_layout",
    "load",
    "parse",
]

_MOST_LOADERS = 1024  # processes for each worker
Auto = Literal["auto"]
DATA_KEYS = ("prepare", "validation_fraction", "num_workers", "on_device")  # what every data section understands


@dataclass(frozen=True)
class Recipe:
    """What is trained: the name stands in the default run directory."""

    name: str


@dataclass(frozen=True)
class Trainer:
    """How it is trained; every field is explained in conf/trainer/default.yaml."""

    nodes: Auto | int | str
    gpus: Auto | int
    device: Literal["auto", "cpu", "cuda"]
    backend: Literal["auto", "gloo", "nccl", "mpi"]
    threads: Auto | int
    seed: int
    epochs: int | None
    max_steps: int | None
    global_batch_size: int
    micro_batch_size: Auto | int
    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool
    channels_last: bool
    clip_grad_norm: float | None
    ema_decay: float | None
    nonfinite: Literal["stop", "skip"]
    log_every: int
    eval_every: Literal["epoch"] | int
    checkpoint_every: Literal["epoch"] | int
    checkpoint_every_seconds: float | None
    keep_last: int | None
    keep_best: str | None
    on_save_error: Literal["stop", "continue"]
    reduction: Literal["fast", "exact"]
    deterministic: bool
    grace_seconds: float
    timeout: Timeout


@dataclass(frozen=True)
class Logger:
    """Where the scalars go beside metrics.jsonl."""

    kind: Literal["tensorboard", "none"]


@dataclass(frozen=True)
class Run:
    """Where the run lies and what it starts from."""

    dir: str | None
    resume: Literal["auto", "never", "require"]
    init_from: str | None
    trust: tuple[str, ...]
    code: str | None
    allow_changes: tuple[Literal["code", "data"], ...] = ()  # older runs do not have it


@dataclass(frozen=True)
class Data:
    """The data: who prepares it, who loads it, and what every kind of data understands."""

    target: str
    prepare: str | None
    validation_fraction: float
    num_workers: int
    on_device: bool
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One experiment, as asked: parsed, checked, frozen."""

    recipe: Recipe
    task: Node
    model: Node
    data: Data
    optimizer: Node
    scheduler: Schedule | Node  # a user's own is a node, which only workers build
    strategy: Strategy
    launcher: Launcher
    logger: Logger
    trainer: Trainer
    run: Run

    @property
    def trust(self) -> Trust:
        """Return whose code this experiment may name."""
        return Trust(self.run.trust, Path(self.run.code) if self.run.code else None)


_TYPED: Mapping[str, Any] = {"trainer": Trainer, "strategy": Strategy, "logger": Logger, "run": Run, "recipe": Recipe}


def load(text: str) -> Experiment:
    """Read the experiment back from the text of a run directory's config.yaml, in any process.

    Raises:
        RefusedError: it is no configuration, or refers to what is not there.
    """
    try:
        values = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (ValueError, yaml.YAMLError) as error:
        raise RefusedError(f"config.yaml cannot be read: {error}.") from None
    if not isinstance(values, Mapping):
        raise RefusedError("config.yaml is not the configuration of a run.")
    if "${" in text:  # secrets stay references in the file; the library is only loaded where there are some
        from ddpexp.config.interpolations import resolved

        values = resolved(values)
    return parse(values)


def parse(values: Mapping[str, Any]) -> Experiment:
    """Turn the composed and resolved tree into an experiment; imports neither torch nor any user's code.

    Raises:
        RefusedError: an unknown key, a wrong type, a name outside the allowlist or keys that contradict one another.
    """
    values = registry.with_keys(values)
    sections = list(Experiment.__dataclass_fields__)
    for key in values:
        if key not in sections:
            keys = [f"{name}.{field}" for name, section in _TYPED.items() for field in section.__dataclass_fields__]
            raise unknown_key(str(key), sections, "", keys, kind="section")
    for name in sections:
        if values.get(name) is None:
            own = f"as {name}: {{_target_: mine.Name}}, or" if name == "task" else "for example"
            raise RefusedError(f"{name} is missing: a recipe gives it, {own} recipe=mnist.")
        if not isinstance(values[name], Mapping):
            raise RefusedError(f"{name}={values[name]} is not a section with keys.{_as_section(name, values[name])}")
    run = build(Run, values["run"], "run")
    trust = Trust(run.trust, Path(run.code) if run.code else None)
    refuse_untrusted(values, trust)
    experiment = Experiment(
        recipe=build(Recipe, values["recipe"], "recipe"),
        task=_node(values["task"], "task"),
        model=_node(values["model"], "model"),
        data=_data(values["data"], trust),
        optimizer=_node(values["optimizer"], "optimizer"),
        scheduler=_schedule(values["scheduler"]),
        strategy=build(Strategy, values["strategy"], "strategy"),
        launcher=_call(values["launcher"], "launcher", Launcher),
        logger=build(Logger, values["logger"], "logger"),
        trainer=build(Trainer, values["trainer"], "trainer"),
        run=run,
    )
    _check(experiment)
    return experiment


def _as_section(name: str, value: object) -> str:
    """Say how a name that stands in the place of a section is written as one."""
    found = re.fullmatch(r"(?:_target_ *)?([A-Za-z_]\w*(?:\.\w+)+)", value) if isinstance(value, str) else None
    return f" Write {name}: {{_target_: {found[1]}}}." if found is not None else ""


def check_layout(experiment: Experiment, found: Layout) -> None:
    """Check what depends on the number of workers and their device.

    Raises:
        RefusedError: a batch that does not split, an option that the device does not have.
    """
    trainer = experiment.trainer
    batch = plan_batches(trainer.global_batch_size, trainer.micro_batch_size, found.world_size)
    if experiment.strategy.static_graph and batch.gradient_accumulation_steps > 1:
        raise RefusedError(
            f"strategy.static_graph=true does not go with {batch.gradient_accumulation_steps} accumulated passes a step: torch "
            f"would reduce other passes than it planned. Use strategy.static_graph=false or a larger trainer.micro_batch_size."
        )
    if experiment.strategy.comm_hook == "bf16" and found.backend == "gloo":
        raise RefusedError("strategy.comm_hook=bf16 needs trainer.backend=nccl: gloo cannot add bf16 numbers. Use fp16 or none.")
    if experiment.strategy.sync_batchnorm and found.device == "cpu":
        raise RefusedError(
            "strategy.sync_batchnorm=true needs GPUs: torch has no synchronised batch normalisation on CPU. "
            "Use strategy.sync_batchnorm=false."
        )
    if trainer.reduction == "exact" and found.device == "cuda" and not trainer.deterministic:
        raise RefusedError(
            "trainer.reduction=exact on GPUs needs trainer.deterministic=true: else a GPU's own sums differ each time."
        )
    if experiment.strategy.reduce_through == "shared_memory" and (found.device == "cuda" or found.nodes > 1):
        where = "workers have GPUs" if found.device == "cuda" else f"workers are on {found.nodes} nodes"
        raise RefusedError(
            f"strategy.reduce_through=shared_memory is for CPU workers of one host, and these {where}. "
            f"Use strategy.reduce_through=auto."
        )


def _check(experiment: Experiment) -> None:
    trainer = experiment.trainer
    for name in ("epochs", "max_steps", "log_every"):
        value = getattr(trainer, name)
        if value is not None and value < 1:
            raise RefusedError(f"trainer.{name}={value} is too small: use 1 or more.")
    if isinstance(trainer.nodes, str) and trainer.nodes != "auto" and not re.fullmatch(r"[1-9]\d*:[1-9]\d*", trainer.nodes):
        raise RefusedError(f"trainer.nodes={trainer.nodes}: use auto, a number of machines, or a range such as 1:4.")
    for name in Timeout.__dataclass_fields__:
        seconds = getattr(trainer.timeout, name)
        if not 0 < seconds < math.inf:
            raise RefusedError(f"trainer.timeout.{name}={seconds}: use a number above 0.")
    if trainer.backend == "mpi" and not getattr(experiment.launcher, "provides_mpi", False):
        raise RefusedError("trainer.backend=mpi needs launcher=mpi: only mpirun connects the ranks for it. Use auto.")
    if trainer.epochs is None and trainer.max_steps is None:
        raise RefusedError("trainer.epochs=null trainer.max_steps=null: the run would never end. Give one of them.")
    if trainer.eval_every != "epoch" and trainer.eval_every < 0:
        raise RefusedError(f"trainer.eval_every={trainer.eval_every}: use epoch, a number of steps, or 0 for never.")
    if trainer.checkpoint_every != "epoch" and trainer.checkpoint_every < 0:
        raise RefusedError(f"trainer.checkpoint_every={trainer.checkpoint_every}: use epoch, a number of steps, or 0 for never.")
    if trainer.checkpoint_every_seconds is not None and not trainer.checkpoint_every_seconds > 0:
        raise RefusedError(f"trainer.checkpoint_every_seconds={trainer.checkpoint_every_seconds}: use a number above 0, or null.")
    if trainer.keep_last is not None and trainer.keep_last < 1:
        raise RefusedError(f"trainer.keep_last={trainer.keep_last} would remove every checkpoint: use 1 or more, or null for all.")
    if trainer.keep_best is not None:
        if not re.fullmatch(r"(max|min):[^/\s]+/\S+", trainer.keep_best):
            raise RefusedError(
                f"trainer.keep_best={trainer.keep_best}: use max: or min: and a metric of the evaluation, "
                f"such as max:eval/accuracy."
            )
        if trainer.eval_every == 0:
            raise RefusedError(f"trainer.keep_best={trainer.keep_best} needs evaluations, and trainer.eval_every=0 makes none.")
    if trainer.ema_decay is not None and not 0 < trainer.ema_decay < 1:
        raise RefusedError(f"trainer.ema_decay={trainer.ema_decay}: use a number between 0 and 1, such as 0.999, or null.")
    if not 0 < trainer.grace_seconds < math.inf:
        raise RefusedError(f"trainer.grace_seconds={trainer.grace_seconds}: use a number above 0.")
    _check_exact(experiment)
    if trainer.clip_grad_norm is not None and not trainer.clip_grad_norm > 0:
        raise RefusedError(f"trainer.clip_grad_norm={trainer.clip_grad_norm}: use a number above 0, or null.")
    if not 0 <= trainer.seed < 2**63:
        raise RefusedError(f"trainer.seed={trainer.seed}: use a whole number from 0 to 2**63 - 1.")
    rate = experiment.optimizer.kwargs.get("lr")
    if rate is None:
        raise RefusedError(
            "optimizer.lr is missing: schedules multiply it, so every optimizer needs one. Type it, for example optimizer.lr=0.01."
        )
    if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 <= rate < math.inf:
        raise RefusedError(f"optimizer.lr={shown(rate)}: use a number from 0, such as 0.05.")
    if Path(experiment.recipe.name).name != experiment.recipe.name:
        raise RefusedError(f"recipe.name={experiment.recipe.name}: use a plain name, for it names the folder of the runs.")
    if experiment.run.dir == "":
        raise RefusedError("run.dir= is empty: give it a folder, or null for one under outputs.")
    if re.search(r"[\x00-\x1f\x7f]", experiment.run.dir or ""):
        raise RefusedError(
            f"run.dir has a line break or another control character, which no line can show: {experiment.run.dir!r}."
        )
    if not 0 <= experiment.data.validation_fraction < 1:
        raise RefusedError(
            f"data.validation_fraction={experiment.data.validation_fraction}: use a share from 0 to below 1, such as 0.1."
        )
    if experiment.data.num_workers < 0:
        raise RefusedError(f"data.num_workers={experiment.data.num_workers}: use 0 or more.")
    if experiment.data.num_workers > _MOST_LOADERS:
        raise RefusedError(
            f"data.num_workers={experiment.data.num_workers} is more processes for each worker than a machine can start: use "
            f"{_MOST_LOADERS} or fewer."
        )
    if experiment.strategy.bucket_cap_mb <= 0:
        raise RefusedError(f"strategy.bucket_cap_mb={experiment.strategy.bucket_cap_mb}: use a number above 0.")
    if experiment.strategy.reduce_through == "shared_memory" and experiment.strategy.comm_hook != "none":
        raise RefusedError(
            f"strategy.reduce_through=shared_memory leaves nothing to compress, so it does not go with "
            f"strategy.comm_hook={experiment.strategy.comm_hook}. Use strategy.reduce_through=auto or strategy.comm_hook=none."
        )
    if experiment.strategy.powersgd_rank < 1:
        raise RefusedError(f"strategy.powersgd_rank={experiment.strategy.powersgd_rank}: use 1 or more.")
    scaled = trainer.precision == "fp16" or trainer.nonfinite == "skip"
    if experiment.strategy.comm_hook == "powersgd" and scaled:
        raise RefusedError(
            f"strategy.comm_hook=powersgd remembers every gradient, also one that is left out because it is not finite. "
            f"Use trainer.precision=fp32 or bf16 and trainer.nonfinite=stop, not {trainer.precision} and {trainer.nonfinite}."
        )
    if experiment.strategy.static_graph and experiment.strategy.find_unused_parameters:
        raise RefusedError(
            "strategy.static_graph=true finds unused parameters by itself in the first step: "
            "leave strategy.find_unused_parameters=false."
        )


def _check_exact(experiment: Experiment) -> None:
    """Refuse what would make the numbers depend on the number of workers although `trainer.reduction=exact`."""
    trainer, strategy = experiment.trainer, experiment.strategy
    if trainer.reduction != "exact":
        return
    why = "trainer.reduction=exact"
    if trainer.micro_batch_size == "auto":
        raise RefusedError(
            f"{why} sums over micro-batches that are the same at every number of workers: "
            f"type their size, for example trainer.micro_batch_size={max(1, trainer.global_batch_size // 8)}."
        )
    if strategy.comm_hook != "none":
        raise RefusedError(
            f"{why} does not go with strategy.comm_hook={strategy.comm_hook}, which rounds each worker's sum. Use none."
        )
    if strategy.sync_batchnorm:
        raise RefusedError(
            f"{why} does not go with strategy.sync_batchnorm=true: its statistics are those of all workers' micro-batches of a "
            f"pass, which another number of workers cuts in another way. Use strategy.sync_batchnorm=false."
        )
    if strategy.static_graph:
        raise RefusedError(f"{why} does without DDP, whose option strategy.static_graph=true is. Use strategy.static_graph=false.")
    if not strategy.broadcast_buffers:
        raise RefusedError(f"{why} combines the buffers of all micro-batches, so strategy.broadcast_buffers must stay true.")


def _node(values: Mapping[str, Any], where: str) -> Node:
    if "_target_" not in values:
        raise RefusedError(f"{where}._target_ is missing: it names the class or function to call.")
    rest = {key: _frozen(value) for key, value in values.items() if key != "_target_"}
    return Node(values["_target_"], types.MappingProxyType(rest))


def _data(values: Mapping[str, Any], trust: Trust) -> Data:
    node = _node({key: value for key, value in values.items() if key not in DATA_KEYS}, "data")
    prepare = convert(values.get("prepare"), str | None, "data.prepare")
    if prepare is not None:
        refuse_target(prepare, trust, "data.prepare")
        if registry.key_of("data.prepare", prepare) is not None:  # ours are quick to import; a user's may import torch
            _typed_arguments(locate(prepare, trust, "data.prepare"), node.kwargs, "data")
    return Data(
        target=node.target,
        prepare=prepare,
        validation_fraction=convert(values.get("validation_fraction", 0.0), float, "data.validation_fraction"),
        num_workers=convert(values.get("num_workers", 0), int, "data.num_workers"),
        on_device=convert(values.get("on_device", False), bool, "data.on_device"),
        options=node.kwargs,
    )


def _schedule(values: Mapping[str, Any]) -> Schedule | Node:
    """Build a schedule of ours, which checks itself; a user's own may import torch."""
    node = _node(values, "scheduler")
    found: Schedule | Node = _call(values, "scheduler", Schedule) if registry.key_of("scheduler", node.target) is not None else node
    return found


def _call(values: Mapping[str, Any], where: str, contract: type) -> Any:
    """Build a section whose class is free of torch, so that its arguments are checked before any worker starts."""
    node = _node(values, where)
    try:
        found = locate(node.target, Trust(), where)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(
            f"{where}._target_={node.target} cannot be imported: {type(error).__name__}: {error}. Is its package complete?"
        ) from error
    if contract is Launcher and not isinstance(found, type):
        raise RefusedError(f"{where}._target_={node.target} is not a {where}.")
    if not (dataclasses.is_dataclass(found) and isinstance(found, type) and issubclass(found, contract)):
        raise RefusedError(f"{where}._target_={node.target} is not a {where}.")
    return found(**_typed_arguments(found, node.kwargs, where))


def _typed_arguments(function: Any, kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
    parameters = {
        name: one
        for name, one in inspect.signature(function).parameters.items()
        if isinstance(function, type) or one.kind is not one.KEYWORD_ONLY  # of a function those are for code, not for a config
    }
    hints = typing.get_type_hints(vars(function)["__init__"] if isinstance(function, type) else function)
    for key in kwargs:
        if key not in parameters:
            raise unknown_key(key, parameters, where)
    missing = [name for name, one in parameters.items() if one.default is one.empty and name not in kwargs]
    if missing:
        raise RefusedError(f"{where}.{missing[0]} is missing: give it a value, for example as {where}.{missing[0]}=... .")
    return {key: convert(value, hints[key], f"{where}.{key}") for key, value in kwargs.items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return types.MappingProxyType({key: _frozen(inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(inner) for inner in value)
    return value
